"""The memory of one kernel, weighed again and again where no group of the system limits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from kernel_mcp.limits.sampling import held_memory
from kernel_mcp.limits.segments import Segments

LONG_S = 0.1
REST = 3
"""Where weighing takes long, it is not done again for this many times as long."""
PATIENCE_S = 3.0
"""How long the system may take to tell shares of memory before the plain sum has to do."""
FEW_PROCESSES = 3
"""A kernel that has started nothing consists of no more, those of its sandbox included."""


class Scales:
    """What weighs one kernel; `crowded` when that had started other processes the last time."""

    def __init__(self, processes: Callable[[], Sequence[int]]) -> None:
        """`processes` tells who the kernel consists of. Blocks."""
        self.crowded = False
        self._processes = processes
        self._segments = Segments()
        self._in_segments = 0
        self._busy = False
        self._next = 0.0

    async def weigh(self, most: int) -> int:
        """Bytes that the kernel holds; shared memory is only looked at closely above `most`.

        Answers 0 while an earlier call is at it, as a process that is starved of memory can keep
        those waiting who look at it, and too soon after one that took long. Raises Unmeasurable.
        """
        begin = anyio.current_time()
        if self._busy or begin < self._next:
            return 0
        self._busy = True
        try:
            held = await anyio.to_thread.run_sync(self._plainly)
            if held > most:
                with anyio.move_on_after(PATIENCE_S):
                    held = await anyio.to_thread.run_sync(self._closely, abandon_on_cancel=True)
            return held
        finally:
            self._busy = False
            now = anyio.current_time()
            if (took := now - begin) > LONG_S:
                self._next = now + took * REST

    def close(self) -> None:
        """Give up what is open."""
        self._segments.close()

    def _plainly(self) -> int:
        processes = self._processes()
        self.crowded = len(processes) > FEW_PROCESSES
        self._in_segments = self._segments.held(processes)
        return held_memory(processes, segments=self._in_segments)

    def _closely(self) -> int:
        return held_memory(self._processes(), closely=True, segments=self._in_segments)
