"""Memory and processor time of whole process trees, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import anyio

_TICKS = os.sysconf("SC_CLK_TCK")
QUIET = 0.04
"""Processors that a tree at rest may use."""
_QUIET_S = 0.25


def descendants(root: int) -> set[int]:
    """Every process that `root` has started, directly or not."""
    parents = _parents()
    below: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        below.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        children = below.get(todo.pop(), [])
        found.update(children)
        todo.extend(children)
    return found


def children(parent: int) -> set[int]:
    """The processes that `parent` has started itself."""
    return {pid for pid, found in _parents().items() if found == parent}


def pss_mib(pids: Iterable[int]) -> float:
    """Proportional set size of some processes in MiB: shared pages count by their share.

    Raises PermissionError for processes of other users.
    """
    kib = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        kib += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return kib / 1024


def cpu_s(pids: Iterable[int]) -> float:
    """Processor time that some processes have used, without their children, in seconds."""
    return sum(sum(map(int, fields[11:13])) for pid in pids if (fields := _stat(pid))) / _TICKS


async def load(pids: Iterable[int], seconds: float) -> float:
    """How many processors some processes use on average."""
    pids = list(pids)
    before, started = cpu_s(pids), perf_counter()
    await anyio.sleep(seconds)
    return (cpu_s(pids) - before) / (perf_counter() - started)


async def settle(limit_s: float = 15.0) -> None:
    """Wait until everything this process has started is at rest, at most `limit_s` seconds.

    Templates then are loaded, spares made and closed kernels gone.
    """
    with anyio.move_on_after(limit_s):
        while True:
            pids = descendants(os.getpid())
            if await load(pids, _QUIET_S) < QUIET and descendants(os.getpid()) == pids:
                return


def meminfo_mib(key: str) -> float:
    """A line of /proc/meminfo, such as MemAvailable: what can be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) / 1024
    return 0.0


def _parents() -> dict[int, int]:
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    return {pid: int(fields[1]) for pid in pids if (fields := _stat(pid))}


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat that follow the name; none when it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()
