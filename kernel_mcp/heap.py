"""The C heap of this process: what is in use no more can go back to the system.

As glibc does by itself, each thread gets a heap of its own, whose end it keeps, and it keeps ever
larger blocks the larger those were that have been given back. Elsewhere nothing is done here.
"""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of mallopt(3)."""
_LARGE_BYTES = 1 << 20
"""Blocks of this size are the system's again when they are given back, and so is the heap's end."""


def keep_small() -> None:
    """Have one heap for all threads, and large blocks outside it; before other threads begin."""
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is not None:
        setting(_M_ARENA_MAX, 1)
        setting(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        setting(_M_TRIM_THRESHOLD, _LARGE_BYTES)


def trim() -> None:
    """Give back to the system what is in use no more. Takes some 40 ms."""
    gc.collect()
    trimming = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trimming is not None:
        trimming(0)
