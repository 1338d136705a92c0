"""Which threads of a process show what it holds: not always the first, and not always one alone.

An entry of /proc shows what belongs to one thread. A first thread that has ended shows nothing of
what the others go on with, and a thread can have open files of its own.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from functools import cache

from kernel_mcp.limits.faults import absences
from kernel_mcp.sandbox.syscalls import architecture

_KCMP_FILES = 2


def threads(pid: int) -> list[int]:
    """All threads of a process, the first one first; none when it is gone."""
    with absences:
        found = map(int, os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208  # called for each process
        return sorted(found, key=lambda thread: thread != pid)
    return []


def tables(pid: int) -> Iterator[int]:
    """Threads that together show all open files of a process: one for each table of them.

    All threads where the system does not tell which of them share theirs.
    """
    first, *others = threads(pid) or [0]
    if not first:
        return
    yield first
    latest = first
    for thread in others:
        if not (_share_files(thread, first) or _share_files(thread, latest)):
            latest = thread
            yield thread


def _share_files(one: int, other: int) -> bool:
    """Whether two threads are known to have the same table of open files."""
    return one == other or _compare()(one, other) == 0


@cache
def _compare() -> Callable[[int, int], int]:
    """kcmp(2) for tables of open files: 0 when they are the same, -1 when nobody tells."""
    arch = architecture(platform.machine())
    if arch is None:
        return lambda _one, _other: -1
    number = arch.numbers["kcmp"]
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    call.argtypes = [ctypes.c_long] * 6
    return lambda one, other: int(call(number, one, other, _KCMP_FILES, 0, 0))
