"""A lock between processes that ends with its last holder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

_POLL_S = 0.05


@asynccontextmanager
async def exclusive(file: Path) -> AsyncIterator[int]:
    """Hold the lock on `file`; yields its descriptor, which a child may keep to hold it longer.

    The file stays: to remove it would let two processes lock two files of one name. Closing is
    the only release, so that a child which outlives this process still holds the lock. flock
    wakes nobody up, so waiting is asking again.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await anyio.sleep(_POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)
