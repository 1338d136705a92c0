"""What one kernel uses and has used, as far as somebody tells; else the last that was told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio

from kernel_mcp.barriers import Faults
from kernel_mcp.config.values import format_bytes
from kernel_mcp.limits.group import KernelGroup, backstop
from kernel_mcp.limits.weighing import Scales
from kernel_mcp.linux.proc import Meter, Usage

ALMOST = 0.95
"""A group that never held this part of what it may was not out of memory by itself."""


class Gauge:
    """Reads the figures of a kernel's group, or of its processes one by one.

    A failure of the server changes no figure; `faults` notes it.
    """

    def __init__(
        self,
        group: KernelGroup | None,
        processes: Callable[[], Sequence[int]],
        *,
        budget: int,
        faults: Faults,
    ) -> None:
        """`processes` tells who the kernel consists of; `budget` is its memory, 0 for any."""
        self._group = group
        self._processes = processes
        self._budget = budget
        self._faults = faults
        self._meter = Meter()
        self._scales = Scales(processes)
        self._last = Usage(measured=False)
        self._peak = 0
        self._starved = 0

    @property
    def crowded(self) -> bool:
        """Whether there were processes beside its own when its memory was last weighed."""
        return self._scales.crowded

    def usage(self) -> Usage:
        """What all processes use now; not `measured` when it is what they used before."""
        self._last = replace(self._last, measured=False)
        with self._faults.kept("memory and processor time"):
            self._last = self._usage()
        return self._last

    async def used(self) -> Usage:
        """As `usage`, without holding up the event loop where many processes have to be read."""
        if self._group is not None:
            return self.usage()
        with self._faults.kept("memory and processor time"):  # there may be no thread left
            return await anyio.to_thread.run_sync(self.usage)
        self._last = replace(self._last, measured=False)
        return self._last

    async def too_much(self) -> bool:
        """Whether the memory is more than it may be where no group limits it.

        Raises Unmeasurable when there are too many files to tell.
        """
        if not self._budget or (self._group is not None and "memory" in self._group.controllers):
            return False
        too_much = False
        with self._faults.kept("memory"):
            too_much = await self._scales.weigh(backstop(self._budget))
            self._peak = max(self._peak, self._scales.held)
        return too_much

    def starved(self) -> int:
        """How many processes the system has killed for lack of memory since the last `forgive`."""
        return self._count() - self._starved

    def forgive(self) -> int:
        """As `starved`, which counts from here on."""
        count = self._count()
        killed, self._starved = count - self._starved, count
        return killed

    def out_of_memory(self) -> str:
        """The end of what has used up its memory, or was there when the machine had none left."""
        peak = self._peak
        if self._group is not None:
            with self._faults.kept("most memory"):
                peak = max(peak, self._group.peak())
        if not self._budget or 0 < peak < ALMOST * self._budget:
            told = f"; this session held {format_bytes(peak)} at most" if peak else ""
            return f"the machine was out of memory{told}"
        told = f", peak {format_bytes(peak)}" if peak else ""
        return f"out of memory (limit {format_bytes(self._budget)}{told})"

    def close(self) -> None:
        """Give up what is open. Blocks."""
        self._scales.close()

    def _usage(self) -> Usage:
        sample = self._group.sample() if self._group is not None else None
        if sample is not None and sample.cpu_s is not None and sample.memory_bytes is not None:
            return Usage(sample.cpu_s, sample.memory_bytes)
        found = self._meter.usage(self._processes())
        if self._scales.sharing:
            found = replace(found, memory_bytes=self._scales.held)
        if sample is not None and sample.cpu_s is not None:
            found = replace(found, cpu_s=sample.cpu_s)
        if sample is not None and sample.memory_bytes is not None:
            found = replace(found, memory_bytes=sample.memory_bytes)
        return found

    def _count(self) -> int:
        count = self._starved
        if self._group is not None:
            with self._faults.kept("number of processes killed for lack of memory"):
                count = self._group.starved()
        return count
