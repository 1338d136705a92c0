"""Kill processes of sandboxes that hold open files and folders which were masked later."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.host_folders.exposed import ExposedMount
from kernel_mcp.host_folders.open_files import CoveredFile, OpenFileHolder, open_file_holders
from kernel_mcp.host_folders.secrets import FILE, FIXED, FOLDER, Parts

PATIENCE_S = 1.0
"""Seconds for which a process may still read what it has opened: programs read whole folders."""
_PAUSE_S = PATIENCE_S / 4
MOST_WAITING = 1000
"""Maximum number of masked paths that are searched for at a time; further ones are skipped."""


class FileHolders:
    """Kills processes of sandboxes that hold open a path that became read-only, or a masked folder.

    `namespaces` returns the mount namespaces of the sandboxes. `on_killed` is called for each
    process that was killed, with the path that it held.
    """

    def __init__(
        self,
        blank: Path,
        namespaces: Callable[[], frozenset[int]],
        on_killed: Callable[[ExposedMount, Parts, OpenFileHolder], None],
    ) -> None:
        self._blank = blank
        self._namespaces = namespaces
        self._on_killed = on_killed
        self._waiting: dict[CoveredFile, tuple[ExposedMount, Parts]] = {}
        self._since: dict[tuple[int, str, str, CoveredFile], float] = {}
        """Time (monotonic) when a process was first seen to hold a path, by process and kind."""
        self._more = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def covered(self, shown: ExposedMount, covers: Mapping[Parts, str]) -> None:
        """Search for processes that hold open the paths that were just masked."""
        for parts, kind in covers.items():
            path = shown.mount.host.joinpath(*parts)
            if shown.mount.writable and shown.executes(parts):
                kind = FIXED  # also for hidden paths
            if kind not in (FIXED, FOLDER) or len(self._waiting) >= MOST_WAITING:
                continue
            with contextlib.suppress(OSError):
                info = path.lstat()
                place = "/".join((shown.mount.guest, *parts))
                each = CoveredFile(place, kind, (info.st_dev, info.st_ino))
                self._waiting[each] = (shown, parts)
        if self._waiting:
            self._more.set()
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())

    async def aclose(self) -> None:
        """Stop the search."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    async def _look(self) -> None:
        """Search until no process holds a path; processes that only read are given `PATIENCE_S`."""
        while self._waiting:
            self._more.clear()
            wanted, self._waiting = self._waiting, {}
            with Barrier("looking for who holds covered files open"):
                found = await anyio.to_thread.run_sync(self._found, list(wanted))
                going_on = [each for each in found if not self._ended(each, *wanted[each.covered])]
                self._since = {_key(each): self._since[_key(each)] for each in going_on}
                self._waiting |= {each.covered: wanted[each.covered] for each in going_on}
                if going_on:
                    with anyio.move_on_after(_PAUSE_S):
                        await self._more.wait()

    def _found(self, wanted: Sequence[CoveredFile]) -> list[OpenFileHolder]:
        namespaces = self._namespaces()
        if not namespaces:
            return []
        infos = ((self._blank / kind).stat() for kind in (FILE, FOLDER))
        blank = {(info.st_dev, info.st_ino) for info in infos}
        return list(open_file_holders(namespaces, wanted, blank))

    def _ended(self, holder: OpenFileHolder, shown: ExposedMount, parts: Parts) -> bool:
        """Kill a process, unless it may only be reading and has time left; return False then."""
        since = self._since.setdefault(_key(holder), time.monotonic())
        if not holder.immediate and time.monotonic() - since < PATIENCE_S:
            return False
        if holder.end(self._namespaces()):
            self._on_killed(shown, parts, holder)
        return True


def _key(holder: OpenFileHolder) -> tuple[int, str, str, CoveredFile]:
    return holder.pid, holder.started, holder.opened_by, holder.covered
