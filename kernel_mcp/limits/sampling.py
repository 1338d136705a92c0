"""The memory of some processes as /proc tells it, for systems that do not limit it themselves.

What is counted: private and shared memory, files in memory that have no name, and files in the
private folders for temporary ones, with their inodes. Everything here blocks, and raises OSError
when the server lacks what it takes to look.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from pathlib import Path

from kernel_mcp.barriers import absences
from kernel_mcp.config.settings import KIB
from kernel_mcp.limits.unnamed import opened
from kernel_mcp.linux.proc import memory_lines

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
