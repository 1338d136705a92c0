"""Distinguish silent processes from those that are busy or wait for the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import anyio

from kernel_mcp.linux.proc import processor_seconds, waits_for_machine

LOOK_S = 1.0
"""Seconds between two checks."""
SILENT_LOOKS = 10
"""Number of consecutive checks with idle processes after which they count as silent."""
RESTING_CPU_S = 0.05
"""CPU seconds between two checks below which the processes count as idle."""
BUSY_CPU_S = 60.0
"""CPU seconds without an answer after which busy processes count as silent."""
LONGEST_S = 60.0
"""Maximum wait of `await_answer` in seconds: code can keep its process in a waiting state."""

PATIENCE = 10
"""Maximum of a patient wait, as a multiple of its seconds, for a busy machine."""
PAUSE_S = 0.5
"""Maximum pause in seconds between two checks of a patient wait."""


class Silence:
    """Test for silence of the processes that must answer a request, made when it is sent.

    A process that is runnable, or waits for a disk, is not idle: on a busy machine it may not have
    been scheduled yet. Hence no limit is in wall-clock seconds.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], most_cpu_s: float = 0.0) -> None:
        """`pids` must answer within `most_cpu_s` CPU seconds; 0 means `BUSY_CPU_S`."""
        self._pids = pids
        self._most_cpu_s = most_cpu_s
        self._began: float | None = None
        """CPU seconds of the processes at the first check."""
        self._rested = 0.0
        self._looks = 0

    def look(self) -> str:
        """Return why the processes count as silent, or ""; must be called each `LOOK_S`."""
        used, waiting = 0.0, False
        try:
            for pid in self._pids():
                with suppress(ProcessLookupError):  # it has just ended
                    used += processor_seconds(pid)
                    waiting = waiting or waits_for_machine(pid)
        except OSError:  # no free descriptor in the server: try again
            return ""
        if self._began is None:
            self._began = self._rested = used
        if used - self._began >= (self._most_cpu_s or BUSY_CPU_S):
            return f"it did not answer within {used - self._began:.0f} s of processor time"
        if abs(used - self._rested) >= RESTING_CPU_S:  # less than before if a process has ended
            self._rested, self._looks = used, 0
        elif not waiting:
            self._looks += 1
        if self._looks < SILENT_LOOKS:
            return ""
        return f"it did not answer, and did nothing, for {self._looks * LOOK_S:g} s"


async def await_answer(
    answer: anyio.Event, pids: Callable[[], Iterable[int]], most_cpu_s: float
) -> str:
    """Wait for an answer; return why its processes count as silent, or "" after the answer.

    The caller must also set `answer` when a process ends.
    """
    watched, why = Silence(pids, most_cpu_s), ""
    with anyio.move_on_after(LONGEST_S):
        while not (answer.is_set() or why):
            with anyio.move_on_after(LOOK_S):
                await answer.wait()
            why = "" if answer.is_set() else watched.look()
        return why
    return f"it did not answer within {LONGEST_S:g} s"


async def await_patiently(
    answer: anyio.Event, pids: Callable[[], Iterable[int]], seconds: float
) -> None:
    """Wait up to `seconds` for an answer; while its processes are runnable, count their CPU time.

    Returns after `PATIENCE` times as many seconds at the latest.
    """
    left = seconds
    with anyio.move_on_after(PATIENCE * seconds):
        while left > 0 and not answer.is_set():
            before, pause_s = computed_s(pids()), min(left, PAUSE_S)
            with anyio.move_on_after(max(pause_s, PAUSE_S / 10)):
                await answer.wait()
            left -= spent_s(before, computed_s(pids()), pause_s)


def computed_s(pids: Iterable[int]) -> float | None:
    """Return the CPU seconds of processes; None if none of them is runnable or waits for a disk."""
    used, waiting = 0.0, False
    for pid in pids:
        with suppress(OSError):  # it has ended, or the server has no free descriptor
            used += processor_seconds(pid)
            waiting = waiting or waits_for_machine(pid)
    return used if waiting else None


def spent_s(before: float | None, after: float | None, pause_s: float) -> float:
    """Return the seconds counted for a pause between two `computed_s`: all if one is None."""
    if before is None or after is None:
        return pause_s
    return min(pause_s, abs(after - before))
