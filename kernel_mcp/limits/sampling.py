"""The memory of some processes as /proc tells it, for systems that do not limit it themselves.

What is counted: private and shared memory, files in memory that have no name, and files in the
private folders for temporary ones, with their inodes. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import cache
from itertools import repeat
from pathlib import Path

from kernel_mcp.launch.usage import memory_lines
from kernel_mcp.limits.unnamed import opened
from kernel_mcp.settings import KIB

INODE_BYTES = KIB
"""Memory of the system that an inode of a tmpfs and its name take, roughly."""
_TEMPORARY = ("tmp", "dev/shm")


class Unmeasurable(Exception):
    """There is more than can be looked at; the text says of what."""


def held_memory(processes: Sequence[int], *, closely: bool = False, segments: int = 0) -> int:
    """Bytes that `processes` hold together; `segments` are in System V shared memory.

    Looked at `closely`, what several of them share counts once; that takes the system longer, and
    it waits for processes that are busy getting memory. Raises Unmeasurable.
    """
    files = _files(processes) + segments
    if closely:
        private, shared = _sums(processes, "smaps_rollup", {b"Pss_Anon:": 0, b"Pss_Shmem:": 1})
        if private:
            return private + max(shared, files)
    private, shared = _sums(processes, "status", {b"RssAnon:": 0, b"RssShmem:": 1})
    return private + max(shared, files)


def _sums(processes: Sequence[int], file: str, lines: dict[bytes, int]) -> tuple[int, int]:
    """Add up lines of a file that each process has, in two sums of bytes."""
    sums = [0, 0]
    for pid in processes:
        for name, size in memory_lines(pid, file, lines).items():
            sums[lines[name]] += size
    return sums[0], sums[1]


def _files(processes: Sequence[int]) -> int:
    """What files in memory take, those without a name among them."""
    unnamed, found = _device_of_memory(), opened(processes)
    if not found.complete:
        raise Unmeasurable("its processes hold more files than can be measured")
    size = sum(held for (device, _), held in found.files.items() if device == unnamed)
    return size + sum(map(_temporary, _TEMPORARY, repeat(processes)))


def _temporary(name: str, processes: Sequence[int]) -> int:
    """What is in a private folder for temporary files, shown by any process that lives."""
    for pid in reversed(processes):
        with contextlib.suppress(OSError):
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
