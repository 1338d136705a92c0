"""Tells processes that owe an answer and do nothing from those that work or have to wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kernel_mcp.linux.proc import processor_seconds, waits_for_machine

LOOK_S = 1.0
"""Seconds between two looks."""
SILENT_LOOKS = 10
"""Looks that find them at rest until they count as silent."""
RESTING_CPU_S = 0.05
"""Processor time up to which they are at rest."""
BUSY_CPU_S = 60.0
"""Processor time without an answer after which they count as silent all the same."""


class Silence:
    """Begins when processes are asked for something.

    A process that can run, or waits for a disk, is not at rest: on a busy machine it has not had
    its turn. Hence no bound is in seconds.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        """`pids` are the processes that owe the answer."""
        self._pids = pids
        self._began: float | None = None
        """Their processor time at the first look."""
        self._rested = 0.0
        self._looks = 0

    def look(self) -> str:
        """Return why they count as silent, else nothing; to be called each `LOOK_S`."""
        try:
            pids = list(self._pids())
            used = sum(map(processor_seconds, pids))
            waiting = any(map(waits_for_machine, pids))
        except OSError:  # one has just ended, or the server has no descriptor left: try again
            return ""
        if self._began is None:
            self._began = self._rested = used
        if used - self._began >= BUSY_CPU_S:
            return f"it did not answer within {used - self._began:.0f} s of processor time"
        if used - self._rested >= RESTING_CPU_S:
            self._rested, self._looks = used, 0
        elif not waiting:
            self._looks += 1
        if self._looks < SILENT_LOOKS:
            return ""
        return f"it did not answer, and did nothing, for {self._looks * LOOK_S:g} s"
