"""Processes and descriptors, as the tests count and await them."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path
from time import monotonic

import anyio

GONE_S = 60.0


def open_descriptors() -> list[str]:
    return sorted(
        str(entry.readlink())
        for entry in Path("/proc/self/fd").iterdir()
        if entry.is_symlink() and "/proc/" not in str(entry.readlink())
    )


def children(pid: int) -> list[int]:
    """Child processes, dead ones too."""
    found: list[int] = []
    tasks: list[Path] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # a process that has just ended
        tasks += Path(f"/proc/{pid}/task").iterdir()
    for task in tasks:
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    below = children(pid)
    for child in list(below):
        below += descendants(child)
    return below


def named(name: str, *, below: int) -> list[int]:
    """The processes below another one that have a name."""
    found = []
    for pid in descendants(below):
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(pid)
    return found


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def held(pids: list[int]) -> list[int]:
    """Handles of running processes."""
    return [os.pidfd_open(pid) for pid in pids]


async def ended(handles: list[int]) -> None:
    """Wait until the processes are gone."""
    with anyio.fail_after(60):
        for handle in handles:
            await anyio.wait_readable(handle)
            os.close(handle)


def ends(pids: set[int]) -> list[int]:
    """Wait for processes to end; those that are left after the time."""
    handles = {}
    for pid in pids:
        with suppress(ProcessLookupError):
            handles[pid] = os.pidfd_open(pid)
    end = monotonic() + GONE_S
    left = []
    for pid, handle in handles.items():
        ready, _, _ = select.select([handle], [], [], max(0.0, end - monotonic()))
        os.close(handle)
        if not ready:
            left.append(pid)
    return left
