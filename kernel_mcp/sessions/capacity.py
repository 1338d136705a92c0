"""The number of further kernels that the limits of the server's own process allow.

Measured on Linux 6.x, per kernel: 10 descriptors when forked, 12 when started cold, and one more
while its output goes to a file. Processes and threads: 4, sandbox included. A test repeats this
measurement.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kernel_mcp.linux.cgroupfs import find_hierarchies
from kernel_mcp.records import dataclass

KERNEL_DESCRIPTORS = 14
KERNEL_TASKS = 6
SPARE_DESCRIPTORS = 20
"""Descriptors kept free for the start of a kernel and for reading files."""
SPARE_TASKS = 8
"""Processes and threads kept free for the server's own threads and the start of a kernel."""


@dataclass(frozen=True, slots=True)
class Bound:
    """One limit of `most` units, of which `used()` are in use.

    A kernel requires `each` units, and `spare` units stay free. `name` is the operator's term for
    the limit, `remedy` the advice on how to raise it.
    """

    name: str
    unit: str
    most: int
    used: Callable[[], int]
    each: int
    spare: int
    remedy: str

    def kernels(self) -> int:
        """Return the number of kernels that still fit; negative if `spare` units are in use."""
        return (self.most - self.used() - self.spare) // self.each

    def __str__(self) -> str:
        return (
            f"{self.name} is {self.most}, of which {self.used()} {self.unit} are in use; a session "
            f"takes some {self.each}, and {self.spare} have to stay free"
        )


class Capacity:
    """All limits of the server's process; without `bounds` nothing is limited."""

    def __init__(self, bounds: Iterable[Bound] = ()) -> None:
        self._bounds = tuple(bounds)

    @classmethod
    def of_this_process(cls) -> Capacity:
        """Return the limits from RLIMIT_NOFILE, RLIMIT_NPROC and the pids controllers."""
        return cls([*_descriptors(), *_processes(), *_groups()])

    def shortage(self, kernels: int) -> str:
        """Return the reason why `kernels` more do not fit, with the remedy; empty if they fit."""
        fits, tight = self._tightest()
        if tight is None or fits >= kernels:
            return ""
        return f"{tight}. For more sessions {tight.remedy}"

    def kernels(self) -> int | None:
        """Return the number of kernels that still fit; None without a limit."""
        fits, tight = self._tightest()
        return None if tight is None else max(0, fits)

    def _tightest(self) -> tuple[int, Bound | None]:
        found = ((bound.kernels(), bound) for bound in self._bounds)
        return min(found, key=lambda each: each[0], default=(0, None))


def _descriptors() -> Sequence[Bound]:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return ()
    remedy = f"start the server with a higher one, such as ulimit -n {max(1024, 4 * most)}"
    name = "the limit of open files (ulimit -n)"
    return [
        Bound(name, "descriptors", most, _open_files, KERNEL_DESCRIPTORS, SPARE_DESCRIPTORS, remedy)
    ]


def _open_files() -> int:
    if count := os.stat("/proc/self/fd").st_size:  # noqa: PTH116  # Linux 6.2
        return count
    with os.scandir("/proc/self/fd") as entries:
        return sum(1 for _ in entries) - 1


def _processes() -> Sequence[Bound]:
    """Return the bound from RLIMIT_NPROC; empty for root, to which it does not apply."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most == resource.RLIM_INFINITY or os.geteuid() == 0:
        return ()
    remedy = f"start the server with a higher one, such as ulimit -u {max(1024, 4 * most)}"
    name = "the limit of this user's processes and threads (ulimit -u)"

    def used() -> int:
        everyone = _everyones_tasks()
        enough = most - everyone >= 8 * KERNEL_TASKS + SPARE_TASKS
        return everyone if enough else _tasks_of(os.getuid())

    return [Bound(name, "of them", most, used, KERNEL_TASKS, SPARE_TASKS, remedy)]


def _everyones_tasks() -> int:
    """Return the machine's processes and threads: `all` in the field `running/all` of loadavg."""
    return int(Path("/proc/loadavg").read_text().split()[3].rpartition("/")[2])


def _tasks_of(uid: int) -> int:
    found = 0
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    found += _tasks(Path(entry.path, "status").read_text(), uid)
    return found


def _tasks(status: str, uid: int) -> int:
    """Return the threads in a /proc/PID/status of this user's process; 0 for other users'."""
    facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(facts["Threads"]) if int(facts["Uid"].split()[0]) == uid else 0


def _groups() -> Sequence[Bound]:
    """Return the bounds from `pids.max` of the server's control group and of its ancestors."""
    found = []
    for tree in find_hierarchies():
        if "pids" in tree.controllers:
            for folder in (tree.own, *tree.own.parents):
                most = _number(folder / "pids.max")
                if most is not None:
                    found.append(_group(folder, most))
    return found


def _group(folder: Path, most: int) -> Bound:
    def used() -> int:
        return _number(folder / "pids.current") or 0

    name = f"the limit of processes and threads of the control group {folder.name or '/'}"
    remedy = f"raise {folder / 'pids.max'} or the container's limit of processes"
    return Bound(name, "of them", most, used, KERNEL_TASKS, SPARE_TASKS, remedy)


def _number(path: Path) -> int | None:
    """Return the number in a file; None for `max` or a missing file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
