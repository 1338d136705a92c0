"""Distinguish processes that do not answer and do nothing from those that work or have to wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import anyio

from kernel_mcp.linux.proc import processor_seconds, waits_for_machine

LOOK_S = 1.0
"""Seconds between two looks."""
SILENT_LOOKS = 10
"""Consecutive looks that find the processes idle until they count as silent."""
RESTING_CPU_S = 0.05
"""CPU seconds per look below which the processes are idle."""
BUSY_CPU_S = 60.0
"""CPU seconds without an answer after which the processes count as silent although they work."""
LONGEST_S = 60.0
"""Longest wait of `await_answer`, in seconds: code can keep its process in a state that waits."""

PATIENCE = 10
"""Bound of a patient wait as a multiple of its seconds, for a busy machine."""
PAUSE_S = 0.5
"""Longest pause between two looks of a patient wait."""


class Silence:
    """Watch on the processes that have to answer a request, made when it is sent.

    A process that can run, or waits for a disk, is not idle: on a busy machine it has not had its
    turn. Hence no bound is in wall-clock seconds.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], most_cpu_s: float = 0.0) -> None:
        """`pids` have to answer within `most_cpu_s` CPU seconds; 0 means `BUSY_CPU_S`."""
        self._pids = pids
        self._most_cpu_s = most_cpu_s
        self._began: float | None = None
        """Their processor time at the first look."""
        self._rested = 0.0
        self._looks = 0

    def look(self) -> str:
        """Return why the processes count as silent, or ""; to be called each `LOOK_S`."""
        used, waiting = 0.0, False
        try:
            for pid in self._pids():
                with suppress(ProcessLookupError):  # it has just ended
                    used += processor_seconds(pid)
                    waiting = waiting or waits_for_machine(pid)
        except OSError:  # the server has no descriptor left: try again
            return ""
        if self._began is None:
            self._began = self._rested = used
        if used - self._began >= (self._most_cpu_s or BUSY_CPU_S):
            return f"it did not answer within {used - self._began:.0f} s of processor time"
        if abs(used - self._rested) >= RESTING_CPU_S:  # less where one has ended
            self._rested, self._looks = used, 0
        elif not waiting:
            self._looks += 1
        if self._looks < SILENT_LOOKS:
            return ""
        return f"it did not answer, and did nothing, for {self._looks * LOOK_S:g} s"


async def await_answer(
    answer: anyio.Event, pids: Callable[[], Iterable[int]], most_cpu_s: float
) -> str:
    """Wait for an answer; return why its processes count as silent, or "" once it has come.

    The end of a process has to set `answer`, too.
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
    """Wait for an answer for `seconds`; while its processes can run, their CPU time counts instead.

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
    """Return the CPU seconds of processes, None if none of them can run or waits for a disk."""
    used, waiting = 0.0, False
    for pid in pids:
        with suppress(OSError):  # it has ended, or the server has no descriptor left
            used += processor_seconds(pid)
            waiting = waiting or waits_for_machine(pid)
    return used if waiting else None


def spent_s(before: float | None, after: float | None, pause_s: float) -> float:
    """Return the seconds that a pause between two `computed_s` counts: all of it if one is None."""
    if before is None or after is None:
        return pause_s
    return min(pause_s, abs(after - before))
