"""Tells processes that owe an answer and do nothing from those that work or have to wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import anyio

from kernel_mcp.linux.proc import processor_seconds, waits_for_machine

LOOK_S = 1.0
"""Seconds between two looks."""
SILENT_LOOKS = 10
"""Looks that find them at rest until they count as silent."""
RESTING_CPU_S = 0.05
"""Processor time up to which they are at rest."""
BUSY_CPU_S = 60.0
"""Processor time without an answer after which they count as silent all the same."""
LONGEST_S = 60.0
"""Seconds that `heard` waits: code can hold its own process in the state of one that must wait."""

PATIENCE = 10
"""Bound of a patient wait as a multiple of its seconds, for a busy machine."""
PAUSE_S = 0.5
"""Longest pause between two looks of a patient wait."""


class Silence:
    """Begins when processes are asked for something.

    A process that can run, or waits for a disk, is not at rest: on a busy machine it has not had
    its turn. Hence no bound is in seconds.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], most_cpu_s: float = 0.0) -> None:
        """`pids` owe the answer, within `most_cpu_s` of processor time, 0 for `BUSY_CPU_S`."""
        self._pids = pids
        self._most_cpu_s = most_cpu_s
        self._began: float | None = None
        """Their processor time at the first look."""
        self._rested = 0.0
        self._looks = 0

    def look(self) -> str:
        """Return why they count as silent, else nothing; to be called each `LOOK_S`."""
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


async def heard(answer: anyio.Event, pids: Callable[[], Iterable[int]], most_cpu_s: float) -> str:
    """Wait for an answer; return why its processes count as silent, else nothing.

    Their ends have to set `answer`, too.
    """
    watched, why = Silence(pids, most_cpu_s), ""
    with anyio.move_on_after(LONGEST_S):
        while not (answer.is_set() or why):
            with anyio.move_on_after(LOOK_S):
                await answer.wait()
            why = "" if answer.is_set() else watched.look()
        return why
    return f"it did not answer within {LONGEST_S:g} s"


async def patient(answer: anyio.Event, pids: Callable[[], Iterable[int]], seconds: float) -> None:
    """Wait for an answer for some seconds, or that much of what its processes compute."""
    left = seconds
    with anyio.move_on_after(PATIENCE * seconds):
        while left > 0 and not answer.is_set():
            before, pause_s = computed_s(pids()), min(left, PAUSE_S)
            with anyio.move_on_after(max(pause_s, PAUSE_S / 10)):
                await answer.wait()
            left -= spent_s(before, computed_s(pids()), pause_s)


def computed_s(pids: Iterable[int]) -> float | None:
    """Return the processor time of processes that can run or wait for a disk, None for others."""
    used, waiting = 0.0, False
    for pid in pids:
        with suppress(OSError):  # it has ended, or the server has no descriptor left
            used += processor_seconds(pid)
            waiting = waiting or waits_for_machine(pid)
    return used if waiting else None


def spent_s(before: float | None, after: float | None, pause_s: float) -> float:
    """Return what a pause between two `computed_s` counts as: all of it where they rest."""
    if before is None or after is None:
        return pause_s
    return min(pause_s, abs(after - before))
