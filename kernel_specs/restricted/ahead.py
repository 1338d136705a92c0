"""What code of objects would do to the kernel that pickles them, found out in a child of it.

The child runs ahead of the kernel, name by name, and says which one it has come to. Where it ends
or hangs in code that heeds no signal, the kernel leaves that name alone, and the next child goes on
behind it. A child that only waits proves nothing: what was forked may lack a thread it waits for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

SECONDS = 4.0
"""Processor time for all values together; what is left then is not tried."""
STUCK_SECONDS = 6.0
"""Processor time of one value that heeds no limit; the kernel itself would not give it as much."""
WAIT_SECONDS = 30.0
ALL_WAIT_SECONDS = 90.0
"""How long one child, and all of them, may take on a clock."""
LOOK_SECONDS = 0.05
MOST_CHILDREN = 24
MOST_BYTES = 1024 * 1024 * 1024
"""Memory of a kernel that is not forked: pages that a child touches are copied."""
_PLACE = struct.Struct("<I")

Say = Callable[[str], None]


def harmful(names: Sequence[str], work: Callable[[Sequence[str], Say], None]) -> dict[str, str]:
    """The names that end or block a process which does `work`, with reasons.

    `work` does something for each of some names and says which one is next. Raises what a signal
    handler raises; no child is left then.
    """
    found: dict[str, str] = {}
    left = list(names)
    end_s = time.monotonic() + ALL_WAIT_SECONDS
    while left and len(found) < MOST_CHILDREN and time.monotonic() < end_s:
        if _resident() > MOST_BYTES:
            break
        try:
            end = _Child(left, work).watch()
        except OSError:  # no process to be had
            break
        if end is None:
            break
        place, reason = end
        found[left[place]] = reason
        del left[: place + 1]
    return found


class _Child:
    """A fork that works; the numbers of names come from it through a pipe."""

    def __init__(self, names: Sequence[str], work: Callable[[Sequence[str], Say], None]) -> None:
        """Raises OSError."""
        self._reader, writer = os.pipe()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of forks beside threads
                self._pid = os.fork()
        except OSError:
            os.close(self._reader)
            os.close(writer)
            raise
        if not self._pid:
            _work(names, work, writer)
        os.close(writer)

    def watch(self) -> tuple[int, str] | None:
        """Where and how it ended, or None where it came to its end or tells nothing."""
        try:
            return self._watch()
        finally:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            os.close(self._reader)

    def _watch(self) -> tuple[int, str] | None:
        place, began, passed = -1, 0.0, 0.0
        while passed < WAIT_SECONDS:
            if select.select([self._reader], [], [], LOOK_SECONDS)[0]:
                data = os.read(self._reader, 4096 * _PLACE.size)
                if data:
                    (place,) = _PLACE.unpack(data[-_PLACE.size :])
                    began = self._cpu()
                    continue
            passed += LOOK_SECONDS
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended and os.waitstatus_to_exitcode(status) == 0:
                return None
            if place >= 0 and ended:
                return place, f"ended the process that stored it ({_words(status)})"
            if place >= 0 and self._cpu() - began > STUCK_SECONDS:
                return place, "blocked the process that stored it"
        return None

    def _cpu(self) -> float:
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{self._pid}/stat").read_text()
            fields = text.rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0


def _work(names: Sequence[str], work: Callable[[Sequence[str], Say], None], writer: int) -> None:
    """What the child does; never returns."""
    places = {name: place for place, name in enumerate(names)}
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nowhere, fd)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115

        def say(name: str) -> None:
            os.write(writer, _PLACE.pack(places[name]))

        work(names, say)
    finally:
        os._exit(0)


def _words(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name if code < 0 else f"code {code}"
    return f"code {code}"


def _resident() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
