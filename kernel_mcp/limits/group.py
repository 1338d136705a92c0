"""The control group of one kernel, of version 1 or 2 or partly of both."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from kernel_mcp.barriers import ignore_missing
from kernel_mcp.config.settings import Limits
from kernel_mcp.linux import cgroupfs
from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB

BACKSTOP = 1.2
LEAST_ABOVE = 128 * MIB
"""Margin of the group's memory limit above the budget.

The limit is `BACKSTOP` times the budget, or `LEAST_ABOVE` bytes more if that is higher. RLIMIT_AS
acts first, in a process that can continue afterwards.
"""
MOST_TCP = 64 * MIB
"""Maximum bytes in buffers of TCP connections, which version 1 does not count as memory."""
PERIOD_US = 100_000
"""Period of the CPU quota in microseconds, the default of both versions."""
EQUAL, BEHIND = 1.0, 0.125
"""CPU weights of a kernel, relative to the default."""
SHELL = Path("/bin/sh")
_ENTER = """
count=$1
shift
while [ "$count" -gt 0 ]; do
    echo 0 > "$1" || exit 71
    shift
    count=$((count - 1))
done
exec "$@"
"""


def backstop(budget: int) -> int:
    """Return the memory limit of a kernel's group in bytes, which is above its `budget`."""
    return max(int(budget * BACKSTOP), budget + LEAST_ABOVE)


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU seconds that a group has used, and bytes that it holds; None without the controller."""

    cpu_s: float | None = None
    memory_bytes: int | None = None


class KernelGroup:
    """The control group of one kernel, a folder per hierarchy. Reads and writes raise OSError."""

    def __init__(self, folders: dict[str, Path], *, unified: frozenset[str]) -> None:
        """`folders` are by controller; the controllers in `unified` are of version 2."""
        self._folders = folders
        self._unified = unified
        self._kills = ""
        """The file that counts OOM kills; a string, as it is read after each cell."""
        if "memory" in folders:
            name = "memory.events" if "memory" in unified else "memory.oom_control"
            self._kills = str(folders["memory"] / name)

    @property
    def controllers(self) -> frozenset[str]:
        """The controllers that limit this kernel."""
        return frozenset(self._folders)

    def make(self, limits: Limits) -> None:
        """Create the group with these limits; a failure removes it again."""
        try:
            for folder in self._places():
                cgroupfs.make(folder)
            self._limit(limits)
        except OSError:
            self.remove()
            raise

    def _limit(self, limits: Limits) -> None:
        if limits.memory_bytes and "memory" in self._folders:
            self._limit_memory(backstop(limits.memory_bytes))
        if limits.pids and "pids" in self._folders:
            cgroupfs.write(self._folders["pids"] / "pids.max", limits.pids)
        if limits.cpus and "cpu" in self._folders:
            self._limit_processors(max(int(limits.cpus * PERIOD_US), 1000))

    def admit(self, pids: Iterable[int]) -> None:
        """Move processes with all their threads into the group; their children stay in it.

        Skips processes that are in it or have ended.
        """
        for folder in self._places():
            for pid in set(pids).difference(cgroupfs.processes(folder)):
                with contextlib.suppress(ProcessLookupError):
                    cgroupfs.write(folder / "cgroup.procs", pid)

    def limit_cpus(self, cpus: float) -> None:
        """Set the maximum number of busy processors; 0 means no limit."""
        if "cpu" not in self._folders:
            return
        if cpus:
            self._limit_processors(max(int(cpus * PERIOD_US), 1000))
        elif "cpu" in self._unified:
            cgroupfs.write(self._folders["cpu"] / "cpu.max", f"max {PERIOD_US}")
        else:
            cgroupfs.write(self._folders["cpu"] / "cpu.cfs_quota_us", -1)

    def entry(self) -> list[str]:
        """Prefix of a command line that runs the rest inside the group.

        Memory of a process that is moved later stays charged to its earlier group.
        """
        files = [str(file) for file in (*self._entry_files(), *self._moves())]
        return [str(SHELL), "-c", _ENTER, "sh", str(len(files)), *files]

    @property
    def enters_by_fds(self) -> bool:
        """Return True if processes can enter by `entry_fds`: every hierarchy is version 1."""
        return bool(self._folders) and not self._unified

    def entry_fds(self) -> list[int]:
        """Return descriptors of version 1 files, by which processes enter the group.

        A single-threaded process that writes 0 enters at once, whereas moving another process takes
        some 10 ms. The caller closes them.
        """
        made: list[int] = []
        try:
            made.extend(os.open(file, os.O_WRONLY | os.O_CLOEXEC) for file in self._entry_files())
        except BaseException:
            for fd in made:
                os.close(fd)
            raise
        return made

    def _entry_files(self) -> list[Path]:
        return [folder / "tasks" for folder in self._places(unified=False)]

    def _moves(self) -> list[Path]:
        return [folder / "cgroup.procs" for folder in self._places(unified=True)]

    def sample(self) -> Sample:
        """Return the current figures of the group; file caches do not count as memory."""
        return Sample(self.cpu_s(), self._memory())

    def peak(self) -> int:
        """Return the peak memory in bytes, file caches included; 0 if Linux does not report it."""
        if "memory" not in self._folders:
            return 0
        unified = "memory" in self._unified
        name = "memory.peak" if unified else "memory.max_usage_in_bytes"  # memory.peak: Linux 5.19
        with ignore_missing:
            return int(cgroupfs.read(self._folders["memory"] / name))
        return 0

    def oom_kills(self) -> int:
        """Return the number of processes that Linux's OOM killer has killed."""
        if not self._kills:
            return 0
        with ignore_missing:
            return cgroupfs.table(self._kills).get("oom_kill", 0)
        return 0

    def processes(self) -> list[int]:
        """Return the process ids in the group, without threads."""
        return sorted({pid for folder in self._places() for pid in cgroupfs.processes(folder)})

    def remove(self) -> bool:
        """Kill all processes and remove the folders; return False if the group is still busy."""
        gone = [cgroupfs.remove(folder) for folder in self._places()]
        return all(gone)

    def _places(self, *, unified: bool | None = None) -> list[Path]:
        """Return the group's folders; `unified` selects those of version 2 (True) or 1 (False)."""
        return list(
            dict.fromkeys(
                folder
                for controller, folder in self._folders.items()
                if unified is None or (controller in self._unified) == unified
            )
        )

    def _limit_memory(self, size: int) -> None:
        folder = self._folders["memory"]
        if "memory" in self._unified:
            cgroupfs.write(folder / "memory.max", size)
            with contextlib.suppress(OSError):  # no swap accounting
                cgroupfs.write(folder / "memory.swap.max", 0)
            return
        cgroupfs.write(folder / "memory.limit_in_bytes", size)
        try:
            cgroupfs.write(folder / "memory.memsw.limit_in_bytes", size)
        except OSError:  # no swap accounting
            cgroupfs.write(folder / "memory.swappiness", 0)
        with contextlib.suppress(OSError):  # no TCP accounting: no IP, or removed from Linux
            cgroupfs.write(folder / "memory.kmem.tcp.limit_in_bytes", min(size, MOST_TCP))

    def allow_memory(self, size: int) -> None:
        """Set the memory limit in bytes, unless processes already hold that much.

        Linux would then try in vain to reclaim memory, or kill a process.
        """
        if "memory" not in self._folders or (self._memory() or 0) >= size:
            return
        folder = self._folders["memory"]
        if "memory" in self._unified:
            cgroupfs.write(folder / "memory.max", size)
            return
        names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
        if size > int(cgroupfs.read(folder / names[0])):
            names.reverse()  # memsw must never be below the memory limit
        for name in names:
            if (folder / name).exists():
                cgroupfs.write(folder / name, size)

    def limit_processes(self, most: int) -> None:
        """Set the maximum number of processes and threads; 0 means no limit."""
        if "pids" in self._folders:
            cgroupfs.write(self._folders["pids"] / "pids.max", most or "max")

    def _limit_processors(self, quota: int) -> None:
        folder = self._folders["cpu"]
        if "cpu" in self._unified:
            cgroupfs.write(folder / "cpu.max", f"{quota} {PERIOD_US}")
            return
        cgroupfs.write(folder / "cpu.cfs_period_us", PERIOD_US)
        try:
            cgroupfs.write(folder / "cpu.cfs_quota_us", quota)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a parent group may have a lower quota
                raise

    def weigh(self, part: float) -> None:
        """Set the CPU weight as a multiple of the default, which is 1."""
        if "cpu" in self._unified:
            cgroupfs.write(self._folders["cpu"] / "cpu.weight", max(1, int(100 * part)))
        elif "cpu" in self._folders:
            cgroupfs.write(self._folders["cpu"] / "cpu.shares", max(2, int(1024 * part)))

    def cpu_s(self) -> float | None:
        """Return the CPU seconds used so far; None without a controller that counts them."""
        for controller in self._unified:  # every group of version 2 counts it
            return cgroupfs.table(self._folders[controller] / "cpu.stat")["usage_usec"] / 1e6
        if "cpuacct" in self._folders:
            return int(cgroupfs.read(self._folders["cpuacct"] / "cpuacct.usage")) / 1e9
        return None

    def _memory(self) -> int | None:
        if "memory" not in self._folders:
            return None
        names = ("anon", "shmem") if "memory" in self._unified else ("total_rss", "total_shmem")
        found = cgroupfs.table(self._folders["memory"] / "memory.stat")
        return sum(found.get(name, 0) for name in names)
