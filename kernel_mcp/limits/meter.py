"""Resource usage of one kernel, from its control group or /proc; the last values if both fail."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import repeat
from pathlib import Path

import anyio

from kernel_mcp.barriers import Faults, ignore_missing
from kernel_mcp.limits.activity import Activity
from kernel_mcp.limits.group import KernelGroup, backstop
from kernel_mcp.limits.quota import opened
from kernel_mcp.linux.proc import ProcessMeter, Usage, memory_lines
from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB, MIB, format_bytes

# Memory as in /proc, where no control group limits it: private and shared memory, deleted files in
# memory, and private temporary folders with their inodes. All functions block and raise OSError.
INODE_BYTES = KIB
"""Approximate bytes of a tmpfs inode and its name."""
_TEMPORARY = ("tmp", "dev/shm")


class Unmeasurable(Exception):
    """There are more processes or files than one scan may read; the text has the details."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one process in bytes: private, and shared as in RssShmem."""

    private: int = 0
    shared: int = 0


def total(parts: Iterable[Memory], files: int) -> int:
    """Return the bytes of processes and of `files` in memory, which processes may have mapped."""
    parts = tuple(parts)
    return sum(part.private for part in parts) + max(sum(part.shared for part in parts), files)


def plainly(pid: int) -> Memory:
    """Return RssAnon and RssShmem of a process; 0 if it has ended."""
    found = memory_lines(pid, "status", (b"RssAnon:", b"RssShmem:"))
    return Memory(found.get(b"RssAnon:", 0), found.get(b"RssShmem:", 0))


def closely(pid: int) -> Memory:
    """Return Pss_Anon and Pss_Shmem of a process: each of n mappings of a page counts 1/n of it.

    Falls back to `plainly` before Linux 5.9 and for unreadable processes. Takes some 10 ms per
    gigabyte, and waits for a process that is allocating.
    """
    found = memory_lines(pid, "smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:"))
    if found:
        return Memory(found.get(b"Pss_Anon:", 0), found.get(b"Pss_Shmem:", 0))
    return plainly(pid)


def files_in_memory(processes: Sequence[int]) -> int:
    """Return the bytes of files in memory, deleted ones included. Raises Unmeasurable."""
    unnamed, found = _device_of_memory(), opened(processes)
    if not found.complete:
        raise Unmeasurable("its processes hold more files than can be measured")
    size = sum(held for (device, _), held in found.files.items() if device == unnamed)
    return size + sum(map(_temporary, _TEMPORARY, repeat(processes)))


def _temporary(name: str, processes: Sequence[int]) -> int:
    """Return the bytes in a private temporary folder, read through any live process; 0 for none."""
    for pid in reversed(processes):
        with ignore_missing:
            folder = f"/proc/{pid}/root/{name}"
            if os.stat(folder).st_dev not in _shared_devices():  # noqa: PTH116  # read often
                found = os.statvfs(folder)
                size = (found.f_blocks - found.f_bfree) * found.f_frsize
                return size + (found.f_files - found.f_ffree) * INODE_BYTES
    return 0


@cache
def _device_of_memory() -> int:
    """Return the st_dev of anonymous shared memory and memfds."""
    fd = os.memfd_create("kernel-mcp", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


@cache
def _shared_devices() -> frozenset[int]:
    """Return the st_dev of the host's own folders, which are not charged to a kernel."""
    return frozenset(Path("/", name).stat().st_dev for name in ("", *_TEMPORARY))


LONG_S = 0.1
REST = 3
"""Pause after a slow measurement, as a multiple of its duration."""
SLICE_S = 0.5
"""Maximum seconds of one batch of PSS reads; at least one process is read."""
PATIENCE_S = 3.0
"""Seconds until PSS reads are abandoned for plain sums: an allocating process blocks them."""
FEW_PROCESSES = 3
"""Maximum number of processes of a kernel without children, its sandbox included."""
NOTABLE = 64 * MIB
"""PSS is read if processes besides the largest hold more bytes: they may be shared."""
SELDOM = 50
"""Below the memory limit, PSS reads use at most 1/`SELDOM` of the time."""


class MemoryMeter:
    """Measures the memory of one kernel.

    `held` is the last result in bytes; shared pages count once if PSS was read. `sharing` is True
    if much memory was shared, `crowded` if the kernel had child processes. `looked_at` is when the
    last look began, `cost_s` the CPU seconds that it took.
    """

    def __init__(self, processes: Callable[[], Sequence[int]], activity: Activity) -> None:
        """`processes` returns the kernel's process ids, and blocks; `activity` is theirs."""
        self.held = 0
        self._activity = activity
        self._mark: tuple[int, int] | None = None
        self.looked_at = -math.inf
        self.cost_s = 0.0
        self.sharing = self.crowded = False
        self._processes = processes
        self._busy = False
        self._next = 0.0
        self._next_closely = 0.0

    def since(self) -> int | None:
        """Return the CPU nanoseconds that the processes have used since the last look.

        None if that does not tell whether memory may have grown.
        """
        return self._activity.since_mark(self._mark)

    async def measure(self, most: int) -> bool:
        """Update `held`; return True if it exceeds `most` bytes.

        Returns False without measuring while an earlier call runs, as a process short of memory
        blocks readers of /proc. The same holds for a while after a slow measurement. Raises
        Unmeasurable, and OSError for shortages of the server.
        """
        begin = anyio.current_time()
        if self._busy or begin < self._next:
            return False
        self._busy = True
        try:
            return await self._measure(most)
        finally:
            self._busy = False
            now = anyio.current_time()
            if (took := now - begin) > LONG_S:
                self._next = now + took * REST

    async def _measure(self, most: int) -> bool:
        files, plain = await anyio.to_thread.run_sync(self._plainly)
        held = total(plain.values(), files)
        largest = max((memory.private + memory.shared for memory in plain.values()), default=0)
        begin = anyio.current_time()
        notable = held - files - largest > NOTABLE  # may be shared with the largest
        if held > most or (notable and begin >= self._next_closely):
            self.held = total((await self._closely(plain)).values(), files)
            self.sharing = held - self.held > NOTABLE
            self._next_closely = begin + (anyio.current_time() - begin) * SELDOM
            return self.held > most
        if not notable or not self.sharing:
            self.held, self.sharing = held, False
        return False

    def _plainly(self) -> tuple[int, dict[int, Memory]]:
        self.looked_at, began = time.monotonic(), time.thread_time()
        self._mark = self._activity.mark()  # first: what comes later is for the next look
        processes = self._processes()
        self.crowded = len(processes) > FEW_PROCESSES
        found = files_in_memory(processes), {pid: plainly(pid) for pid in processes}
        self.cost_s = time.thread_time() - began
        return found

    async def _closely(self, plain: dict[int, Memory]) -> dict[int, Memory]:
        """Return the PSS of each process, if the system shows it; else its plain sums.

        Processes started meanwhile are read as well: they hold shares of the same pages.
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
    end = time.monotonic() + SLICE_S
    while waiting:
        pid = waiting.pop()
        found[pid] = closely(pid)
        if time.monotonic() > end:
            return


HANDOVER_S = 0.00015
"""CPU seconds of other threads for a look: a task, a thread and its result."""
HEAVY_NS = 50_000_000
"""CPU nanoseconds after which the next look is due at once; a busy processor needs 5 ms for some
50 MB of fresh memory."""
LOOKS = 40
"""Looks at kernels that compute less, together, use at most 1/`LOOKS` of a processor."""
ALMOST = 0.95
"""Fraction of the memory limit: an OOM kill at a lower peak means that the machine ran out."""


class Gauge:
    """Resource usage of a kernel's group, or of its processes one by one.

    After a failed read the last figure is kept; `faults` logs the failure.
    """

    def __init__(
        self,
        group: KernelGroup | None,
        processes: Callable[[], Sequence[int]],
        *,
        activity: Activity,
        budget: int,
        faults: Faults,
    ) -> None:
        """`processes` returns the kernel's process ids; `budget` is in bytes, 0 for no limit.

        `activity` is that of the same processes.
        """
        self._group = group
        self._processes = processes
        self._activity = activity
        self._budget = budget
        self._faults = faults
        self._meter = ProcessMeter()
        self._memory = MemoryMeter(processes, activity)
        self._last = Usage(measured=False)
        self._peak = 0
        self._starved = 0

    @property
    def crowded(self) -> bool:
        """Return True if the last memory check found child processes of the kernel."""
        return self._memory.crowded

    def usage(self) -> Usage:
        """Return the usage of all processes now; not `measured` if it is an earlier value."""
        self._last = replace(self._last, measured=False)
        with self._faults.kept("memory and processor time"):
            self._last = self._usage()
        return self._last

    async def used(self) -> Usage:
        """Return `usage`; without a group, measure it in a thread."""
        if self._group is not None:
            return self.usage()
        with self._faults.kept("memory and processor time"):  # no thread may be available
            return await anyio.to_thread.run_sync(self.usage)
        self._last = replace(self._last, measured=False)
        return self._last

    async def cpu_s(self) -> float:
        """Return the CPU seconds of all processes, without reading their memory if possible.

        Without a control group, processes that started and ended between two measurements are not
        counted.
        """
        found = self.group_cpu_s() if self._group is not None else self._activity.cpu_s()
        return found if found is not None else (await self.used()).cpu_s

    def group_cpu_s(self) -> float | None:
        """Return the group's CPU seconds; None without a group, a controller or a result.

        Blocks.
        """
        if self._group is not None:
            with self._faults.kept("processor time"):
                return self._group.cpu_s()
        return None

    @property
    def weighs(self) -> bool:
        """Return True if memory is limited and no group enforces the limit."""
        if not self._budget:
            return False
        return self._group is None or "memory" not in self._group.controllers

    @property
    def unchanged(self) -> bool:
        """Return True if nothing has run since memory was looked at. Only known without a group."""
        return self._memory.since() == 0

    def due(self, others: int) -> bool:
        """Return True if memory may have grown enough to be looked at, and no group limits it.

        `others` is the number of other kernels whose memory is looked at.
        """
        if not self.weighs:
            return False
        used = self._memory.since()
        if used is None or used > HEAVY_NS:
            return True
        pause_s = (self._memory.cost_s + HANDOVER_S) * LOOKS * (1 + others)
        return used > 0 and time.monotonic() - self._memory.looked_at >= pause_s

    async def too_much(self) -> bool:
        """Return True if memory exceeds its limit; False if a group enforces the limit.

        Raises Unmeasurable if there are too many files to count.
        """
        if not self.weighs:
            return False
        too_much = False
        with self._faults.kept("memory"):
            too_much = await self._memory.measure(backstop(self._budget))
            self._peak = max(self._peak, self._memory.held)
        return too_much

    def starved(self) -> int:
        """Return the number of OOM kills since the last `forgive`."""
        return self._count() - self._starved

    def forgive(self) -> int:
        """Return `starved`, and restart the count."""
        count = self._count()
        killed, self._starved = count - self._starved, count
        return killed

    def excuse(self) -> None:
        """Exclude one of these OOM kills from the count."""
        if self.starved() > 0:
            self._starved += 1

    def out_of_memory(self) -> str:
        """Return the cause of an OOM kill: the kernel's own limit, or the machine's memory."""
        peak = self._peak
        if self._group is not None:
            with self._faults.kept("most memory"):
                peak = max(peak, self._group.peak())
        if not self._budget or 0 < peak < ALMOST * self._budget:
            told = f"; this session held {format_bytes(peak)} at most" if peak else ""
            return f"the machine was out of memory{told}"
        told = f", peak {format_bytes(peak)}" if peak else ""
        return f"out of memory (limit {format_bytes(self._budget)}{told})"

    def _usage(self) -> Usage:
        sample = self._group.sample() if self._group is not None else None
        if sample is not None and sample.cpu_s is not None and sample.memory_bytes is not None:
            return Usage(sample.cpu_s, sample.memory_bytes)
        found = self._meter.usage(self._processes())
        if self._memory.sharing:
            found = replace(found, memory_bytes=self._memory.held)
        if sample is not None and sample.cpu_s is not None:
            found = replace(found, cpu_s=sample.cpu_s)
        if sample is not None and sample.memory_bytes is not None:
            found = replace(found, memory_bytes=sample.memory_bytes)
        return found

    def _count(self) -> int:
        count = self._starved
        if self._group is not None:
            with self._faults.kept("number of processes killed for lack of memory"):
                count = self._group.oom_kills()
        return count
