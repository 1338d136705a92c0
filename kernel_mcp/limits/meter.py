"""What one kernel uses and has used, as far as somebody tells; else the last that was told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from pathlib import Path

import anyio

from kernel_mcp.barriers import Faults, absences
from kernel_mcp.config.values import KIB, MIB, format_bytes
from kernel_mcp.limits.group import KernelGroup, backstop
from kernel_mcp.limits.quota import opened
from kernel_mcp.linux.proc import Meter, Usage, memory_lines

# The memory of some processes as /proc tells it, for systems that do not limit it themselves.
#
# What is counted: private and shared memory, files in memory that have no name, and files in the
# private folders for temporary ones, with their inodes. Everything here blocks, and raises OSError
INODE_BYTES = KIB
"""Memory of the system that an inode of a tmpfs and its name take, roughly."""
_TEMPORARY = ("tmp", "dev/shm")


class Unmeasurable(Exception):
    """There is more than can be looked at; the text says of what."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is in memory of one process in bytes: private, and shared with files or others."""

    private: int = 0
    shared: int = 0


def total(parts: Iterable[Memory], files: int) -> int:
    """What processes hold together with `files` in memory, which they may have mapped."""
    parts = tuple(parts)
    return sum(part.private for part in parts) + max(sum(part.shared for part in parts), files)


def plainly(pid: int) -> Memory:
    """All that a process sees, whoever else does; nothing when it is gone."""
    found = memory_lines(pid, "status", (b"RssAnon:", b"RssShmem:"))
    return Memory(found.get(b"RssAnon:", 0), found.get(b"RssShmem:", 0))


def closely(pid: int) -> Memory:
    """The share of a process: what n of them see counts as an nth, so that it adds up to one.

    As `plainly` where the system does not tell: before Linux 5.9, and of a program that nobody may
    read. It takes the system some 10 ms for a gigabyte, and it waits for a process that is busy
    getting memory.
    """
    found = memory_lines(pid, "smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:"))
    if found:
        return Memory(found.get(b"Pss_Anon:", 0), found.get(b"Pss_Shmem:", 0))
    return plainly(pid)


def files_in_memory(processes: Sequence[int]) -> int:
    """Bytes of files in memory, those without a name among them. Raises Unmeasurable."""
    unnamed, found = _device_of_memory(), opened(processes)
    if not found.complete:
        raise Unmeasurable("its processes hold more files than can be measured")
    size = sum(held for (device, _), held in found.files.items() if device == unnamed)
    return size + sum(map(_temporary, _TEMPORARY, repeat(processes)))


def _temporary(name: str, processes: Sequence[int]) -> int:
    """What is in a private folder for temporary files, shown by any process that lives."""
    for pid in reversed(processes):
        with absences:
            folder = Path(f"/proc/{pid}/root/{name}")
            if folder.stat().st_dev not in _shared_devices():
                found = os.statvfs(folder)
                size = (found.f_blocks - found.f_bfree) * found.f_frsize
                return size + (found.f_files - found.f_ffree) * INODE_BYTES
    return 0


@cache
def _device_of_memory() -> int:
    """The device of all memory that is mapped or open without ever having had a name."""
    fd = os.memfd_create("kernel-mcp", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


@cache
def _shared_devices() -> frozenset[int]:
    """Devices of the host's own folders: what is on them does not belong to a kernel."""
    return frozenset(Path("/", name).stat().st_dev for name in ("", *_TEMPORARY))


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


class MemoryMeter:
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
        return files_in_memory(processes), {pid: plainly(pid) for pid in processes}

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
        self._scales = MemoryMeter(processes)
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
