"""Locks between processes that end with their last holder.

The files stay: to remove one would let two processes lock two files of one name. Closing is the
only release, so that a child which outlives this process still holds the lock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.05
"""flock wakes nobody up, so waiting is asking again."""


@contextmanager
def exclusive_now(file: Path) -> Iterator[int | None]:
    """Hold the lock on `file` alone, if nobody holds it: yields its descriptor, or else None.

    A child that keeps the descriptor goes on holding the lock.
    """
    descriptor = _opened(file)
    try:
        yield descriptor if _locked(descriptor, fcntl.LOCK_EX) else None
    finally:
        os.close(descriptor)


class Lease:
    """A lock that many may hold at once, and nobody else alone meanwhile."""

    def __init__(self, descriptor: int) -> None:
        """Takes over a descriptor that holds the lock."""
        self._descriptor = descriptor

    @classmethod
    def taken(cls, file: Path) -> Lease | None:
        """A lease on `file`; None while somebody holds the lock alone. Raises OSError."""
        descriptor = _opened(file)
        if _locked(descriptor, fcntl.LOCK_SH):
            return cls(descriptor)
        os.close(descriptor)
        return None

    def close(self) -> None:
        """Give it back; does nothing the second time."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _opened(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PermissionError:  # a cache that only somebody else may write to
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
