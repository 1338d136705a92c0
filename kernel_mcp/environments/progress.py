"""Report progress while packages are fetched: uv's lines as counts and sizes, and heartbeats.

The builder also writes each line into the environment's lock file. All waiters for the build read
it there: further calls, the server's warm-up, other servers.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, cast

import anyio

from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.units import KIB, format_bytes, size

BEAT_S = 5.0
"""Seconds of silence after which the last line is reported again, with the elapsed time."""
OFTEN_S = 0.1
"""Seconds between reports of downloads."""
_LINE_BYTES = KIB
_SHOWN = 3
_DOWNLOAD = re.compile(r"Downloading (\S+)(?: \(download\))?(?: \(([^)]+)\))?")
_DOWNLOADED = re.compile(r"Downloaded (\S+)")
T = TypeVar("T")

_PREPARED = re.compile(r"Prepared (\d+ packages?)")


async def cancel_on(
    event: Callable[[], Awaitable[object]], work: Callable[[], Awaitable[T]]
) -> T | None:
    """Return the result of `work`; None if `event` ends first. Raises what `work` raises."""
    result: T | None = None
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:

        async def stop() -> None:
            await event()
            tasks.cancel_scope.cancel()

        tasks.start_soon(stop)
        try:
            result = await work()
        except Exception as error:  # noqa: BLE001  # raised again, outside of the task group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


class Milestones:
    """Reports progress from the lines of uv, and repeats it during silence by `beat`.

    uv reports downloads above 1 MiB only, with their sizes; smaller ones are not counted.
    """

    def __init__(
        self,
        report: ProgressCallback,
        first: str = "Looking for packages",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._clock = clock
        self._began = self._reported_at = clock()
        self._now = first
        self._has_news = False
        self._sizes: dict[str, int] = {}
        self._fetched: set[str] = set()

    async def take(self, line: str) -> None:
        """Parse one line of uv's output, and report progress."""
        if match := _DOWNLOAD.match(line):
            self._sizes[match[1]] = _bytes(match[2])
        elif match := _DOWNLOADED.match(line):
            self._fetched.add(match[1])
        else:
            match = _PREPARED.match(line)
            await self.tell(line if match is None else f"Unpacking {match[1]}")
            return
        self._now, self._has_news = self._downloads(), True
        if self._fetched >= self._sizes.keys():
            await self.tell(self._now)

    async def tell(self, text: str) -> None:
        """Report a text as it is."""
        self._now, self._reported_at, self._has_news = text, self._clock(), False
        await self._report(text)

    async def beat(self) -> None:
        """Report downloads, and the last line after `BEAT_S` seconds of silence; never returns."""
        while True:
            await anyio.sleep(OFTEN_S)
            now = self._clock()
            if self._has_news:
                await self.tell(self._now)
            elif now >= self._reported_at + BEAT_S:
                self._reported_at = now
                await self._report(f"{self._now} ({now - self._began:.0f} s)")

    async def during(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`, with heartbeats meanwhile. Raises what `work` raises."""
        done = await cancel_on(self.beat, work)
        return cast(T, done)

    def _downloads(self) -> str:
        count, all_bytes = len(self._sizes), sum(self._sizes.values())
        done = self._fetched & self._sizes.keys()
        text = f"Downloading: {len(done)} of {count}"
        if all_bytes:
            fetched = sum(self._sizes[name] for name in done)
            text += f", {format_bytes(fetched)} of {format_bytes(all_bytes)}"
        left = sorted(self._sizes.keys() - done, key=lambda name: -self._sizes[name])
        if not left:
            return text
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        return f"{text}; now {', '.join(left[:_SHOWN])}{more}"


def _bytes(shown: str | None) -> int:
    with suppress(ValueError):
        return size(shown)
    return 0


class Bulletin:
    """The last line about a build, in the file whose exclusive lock its builder holds."""

    def __init__(self, file: Path, report: ProgressCallback) -> None:
        """`report` is called with the lines of this builder or of another one."""
        self._file = file
        self._report = report
        self._last = b""

    def written(self, descriptor: int) -> ProgressCallback:
        """Return the progress callback of the builder, which holds the lock by `descriptor`."""

        async def tell(text: str) -> None:
            _write(descriptor, text)
            await self._report(text)

        return tell

    async def read(self) -> None:
        """Report the line of another builder if it has changed; ignore an unreadable file."""
        line = b""
        with suppress(OSError):
            line = self._file.read_bytes().rstrip(b"\0")
        if line and line != self._last:
            self._last = line
            await self._report(line.decode(errors="replace"))

    def clear(self, descriptor: int) -> None:
        """Erase the line: whoever holds the lock for another purpose has no progress."""
        _write(descriptor, "")


def _write(descriptor: int, text: str) -> None:
    """Write a line at once and in full length, so that no reader finds parts of two."""
    line = text.encode()[:_LINE_BYTES].ljust(_LINE_BYTES, b"\0")
    with suppress(OSError):  # a full disk fails the build, with an error of its own
        os.pwrite(descriptor, line, 0)
