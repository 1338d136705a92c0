"""The memory of some processes as /proc tells it, for systems that do not limit it themselves.

What is counted: private and shared memory, files in memory that have no name, and files in the
private folders for temporary ones, with their inodes. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kernel_mcp.limits.unnamed import opened
from kernel_mcp.settings import KIB

INODE_BYTES = KIB
"""Memory of the system that an inode of a tmpfs and its name take, roughly."""
_TEMPORARY = ("tmp", "dev/shm")


def held_memory(processes: Sequence[int], *, closely: bool = False) -> int:
    """Bytes that `processes` hold together.

    Looked at `closely`, what several of them share counts once; that takes the system longer, and
    it waits for processes that are busy getting memory.
    """
    files = _files(processes)
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
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/{file}").read_bytes().splitlines():
                name, *rest = line.split() or [b""]  # a tab or spaces, depending on the file
                if name in lines:
                    sums[lines[name]] += int(rest[0]) * KIB
    return sums[0], sums[1]


def _files(processes: Sequence[int]) -> int:
    """What files in memory take, those without a name among them."""
    unnamed = _device_of_memory()
    size = sum(held for (device, _), held in opened(processes).files.items() if device == unnamed)
    for name in _TEMPORARY if processes else ():
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{processes[-1]}/root/{name}")
            if folder.stat().st_dev not in _shared_devices():
                found = os.statvfs(folder)
                size += (found.f_blocks - found.f_bfree) * found.f_frsize
                size += (found.f_files - found.f_ffree) * INODE_BYTES
    return size


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
