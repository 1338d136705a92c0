"""What a fork hands down besides memory: threads it loses, descriptors and mappings it shares.

A thread is gone in the child, with the locks it held. An open file keeps one position for all
children, and shared memory stays shared: sessions would reach each other through them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FIRST_FD = 3
"""Below are standard input, output and error."""


@dataclass(frozen=True)
class Heirlooms:
    """How much there is that must not be handed down."""

    threads: int
    mappings: int
    channels: int

    @classmethod
    def now(cls) -> Heirlooms:
        """Count threads, writable shared mappings, and descriptors other than of plain files."""
        return cls(
            threads=len(list(Path("/proc/self/task").iterdir())),
            mappings=sum(
                line.split()[1][1::2] == "ws"
                for line in Path("/proc/self/maps").read_text().splitlines()
            ),
            channels=sum(not stat.S_ISREG(mode) for mode in _descriptors().values()),
        )

    def more_than(self, before: Heirlooms) -> bool:
        """Whether any of them has grown."""
        return (
            self.threads > before.threads
            or self.mappings > before.mappings
            or self.channels > before.channels
        )


def plain_files() -> dict[int, tuple[int, int]]:
    """Files that packages keep open for reading, fonts for example: device and inode each."""
    return {
        fd: _identity(fd)
        for fd, mode in sorted(_descriptors().items())
        if stat.S_ISREG(mode) and _access(fd) == os.O_RDONLY
    }


def own_files(files: Mapping[int, tuple[int, int]]) -> list[int]:
    """Open files anew at their descriptors, for this process alone; those still open after a fork.

    A package may have closed its files in the child, and the numbers mean others by now.
    """
    kept: list[int] = []
    for fd, identity in files.items():
        with contextlib.suppress(OSError):
            if _identity(fd) == identity:
                _own(fd)
                kept.append(fd)
    return kept


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _own(fd: int) -> None:
    """Give a descriptor a position in the file that no other process moves."""
    fresh = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.lseek(fresh, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(fresh, fd, inheritable=False)
    finally:
        os.close(fresh)


def _access(fd: int) -> int:
    content = Path(f"/proc/self/fdinfo/{fd}").read_text()
    flags = next(line.split()[1] for line in content.splitlines() if line.startswith("flags:"))
    return int(flags, 8) & (os.O_ACCMODE | os.O_PATH)


def _descriptors() -> dict[int, int]:
    """The file modes of all open descriptors but the standard ones."""
    found: dict[int, int] = {}
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the one that was open to list them
            if fd >= FIRST_FD:
                found[fd] = os.fstat(fd).st_mode
    return found
