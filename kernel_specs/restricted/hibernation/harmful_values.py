"""Find values that kill or block a process, by pickling all of them in forked children first.

Pickling runs code of objects. A child pickles name by name; if it dies or hangs, the kernel leaves
that name out, and the next child goes on with the names after it. A child that only waits proves
nothing: the thread that it waits for may be missing in a fork.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kernel_specs.restricted.hibernation.attempt_limits import TimeUpError
from kernel_specs.restricted.originals import io, os, select, signal, time, warnings

SECONDS = 4.0
"""CPU seconds of a child for all values."""
STUCK_SECONDS = 6.0
"""CPU seconds after which a value that ignores its limit is dropped; above the kernel's limit."""
WAIT_SECONDS = 30.0
"""Seconds that one child may wait; waiting for a processor does not count."""
ALL_WAIT_SECONDS = 90.0
"""Seconds (wall clock) after which no further child is forked."""
LOOK_SECONDS = 0.05
MOST_CHILDREN = 24
MOST_BYTES = 1024 * 1024 * 1024
"""Resident memory beyond which a kernel is not forked: a child copies the pages it touches."""
_PLACE = struct.Struct("<I")
Say = Callable[[str], None]


def harmful(
    names: Sequence[str],
    work: Callable[[Sequence[str], Say], None],
    ask: Callable[[], object] = bool,
) -> dict[str, str]:
    """Return reasons by name for values that end or block a forked child in `work`.

    `work` is called with names and a callback that reports each before it begins. `ask` is called
    repeatedly: a TimeUpError ends the search, other exceptions are raised. No child is left.
    """
    found: dict[str, str] = {}
    left = list(names)
    end_s = time.monotonic() + ALL_WAIT_SECONDS
    while left and len(found) < MOST_CHILDREN and time.monotonic() < end_s:
        if _resident() > MOST_BYTES:
            break
        try:
            end = _Child(left, work).watch(ask)
        except (OSError, TimeUpError):  # no process or no time is left: return what was found
            break
        if end is None:
            break
        place, reason = end
        found[left[place]] = reason
        del left[: place + 1]
    return found


class _Child:
    """A forked child that does `work`, and writes the index of each name to a pipe."""

    def __init__(self, names: Sequence[str], work: Callable[[Sequence[str], Say], None]) -> None:
        """Fork the child. Raises OSError."""
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

    def watch(self, ask: Callable[[], object]) -> tuple[int, str] | None:
        """Return index and reason of the name that killed or blocked the child, or None."""
        try:
            return self._watch(ask)
        finally:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            os.close(self._reader)

    def _watch(self, ask: Callable[[], object]) -> tuple[int, str] | None:
        place, began, passed = -1, 0.0, 0.0
        while passed < WAIT_SECONDS:
            ask()
            if select.select([self._reader], [], [], LOOK_SECONDS)[0]:
                data = os.read(self._reader, 4096 * _PLACE.size)
                if data:
                    (place,) = _PLACE.unpack(data[-_PLACE.size :])
                    began = self._cpu()
                    continue
            if not self._runs():
                passed += LOOK_SECONDS
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended and os.waitstatus_to_exitcode(status) == 0:
                return None
            if place >= 0 and ended:
                return place, f"ended the process that stored it ({_words(status)})"
            if place >= 0 and self._cpu() - began > STUCK_SECONDS:
                return place, "blocked the process that stored it"
        return None

    def _runs(self) -> bool:
        return self._stat()[:1] == ["R"]

    def _cpu(self) -> float:
        with contextlib.suppress(ValueError, IndexError):
            fields = self._stat()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def _stat(self) -> list[str]:
        """Return the fields of /proc/PID/stat that follow the name: the state first."""
        try:
            text = Path(f"/proc/{self._pid}/stat").read_text()
        except OSError:
            return []
        return text.rpartition(")")[2].split()


def _work(names: Sequence[str], work: Callable[[Sequence[str], Say], None], writer: int) -> None:
    """Do the child's work and exit; never returns."""
    places = {name: place for place, name in enumerate(names)}
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nowhere, fd)
        sys.stdout = sys.stderr = io.open(os.devnull, "w")

        def on_progress(name: str) -> None:
            os.write(writer, _PLACE.pack(places[name]))

        work(names, on_progress)
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
