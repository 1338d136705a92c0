"""The memory of one kernel, weighed again and again where no group of the system limits it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import anyio

from kernel_mcp.config.settings import MIB
from kernel_mcp.limits.sampling import Memory, closely, files_in_memory, plainly, total
from kernel_mcp.limits.segments import Segments

LONG_S = 0.1
REST = 3
"""Where weighing takes long, it is not done again for this many times as long."""
SLICE_S = 0.5
"""How long processes are asked for their shares at once, and one of them at least."""
PATIENCE_S = 3.0
"""How long the system may take for that. A process that is busy getting memory can hold it up:
the plain sums then have to do."""
FEW_PROCESSES = 3
"""A kernel that has started nothing consists of no more, those of its sandbox included."""
NOTABLE = 64 * MIB
"""What processes beside the largest hold is of interest from here on: it may be shared."""
SELDOM = 50
"""Within the limit finding that out takes at most this part of the time."""


class Scales:
    """What weighs one kernel.

    `held` is what it weighed the last time in bytes, with what its processes share counted once
    as far as that was of interest; `sharing` whether they shared much. `crowded` when it had
    started other processes.
    """

    def __init__(self, processes: Callable[[], Sequence[int]]) -> None:
        """`processes` tells who the kernel consists of. Blocks."""
        self.held = 0
        self.sharing = self.crowded = False
        self._processes = processes
        self._segments = Segments()
        self._busy = False
        self._next = 0.0
        self._next_closely = 0.0

    async def weigh(self, most: int) -> bool:
        """Bring `held` up to date; whether it is more than `most`.

        Does nothing while an earlier call is at it, as a process that is starved of memory can keep
        those waiting who look at it, and too soon after one that took long. Raises Unmeasurable,
        and OSError when the server lacks what it takes to look.
        """
        begin = anyio.current_time()
        if self._busy or begin < self._next:
            return False
        self._busy = True
        try:
            return await self._weigh(most)
        finally:
            self._busy = False
            now = anyio.current_time()
            if (took := now - begin) > LONG_S:
                self._next = now + took * REST

    def close(self) -> None:
        """Give up what is open."""
        self._segments.close()

    async def _weigh(self, most: int) -> bool:
        files, plain = await anyio.to_thread.run_sync(self._plainly)
        held = total(plain.values(), files)
        largest = max((memory.private + memory.shared for memory in plain.values()), default=0)
        begin = anyio.current_time()
        notable = held - files - largest > NOTABLE  # what may be another's share
        if held > most or (notable and begin >= self._next_closely):
            self.held = total((await self._closely(plain)).values(), files)
            self.sharing = held - self.held > NOTABLE
            self._next_closely = begin + (anyio.current_time() - begin) * SELDOM
            return self.held > most
        if not notable or not self.sharing:
            self.held, self.sharing = held, False
        return False

    def _plainly(self) -> tuple[int, dict[int, Memory]]:
        """What files in memory take, and the memory of each process as it sees it."""
        processes = self._processes()
        self.crowded = len(processes) > FEW_PROCESSES
        files = files_in_memory(processes) + self._segments.held(processes)
        return files, {pid: plainly(pid) for pid in processes}

    async def _closely(self, plain: dict[int, Memory]) -> dict[int, Memory]:
        """The share of each process in what it has in memory, as far as the system tells.

        Processes that have come meanwhile have shares, too, which the others lack.
        """
        found, waiting = dict(plain), list(plain)
        for _ in range(2):
            while waiting:
                with anyio.move_on_after(PATIENCE_S) as patience:
                    await anyio.to_thread.run_sync(_ask, waiting, found, abandon_on_cancel=True)
                if patience.cancelled_caught:
                    return dict(found)
            present = await anyio.to_thread.run_sync(self._processes)
            waiting = [pid for pid in present if pid not in found]
        return found


def _ask(waiting: list[int], found: dict[int, Memory]) -> None:
    """Ask some of those who wait for their shares."""
    end = time.monotonic() + SLICE_S
    while waiting:
        pid = waiting.pop()
        found[pid] = closely(pid)
        if time.monotonic() > end:
            return
