"""The System V shared memory of a kernel, which lasts while no process has it attached."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from kernel_mcp.barriers import absences

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
RETRY = 100
"""A table that could not be opened is not tried again for this many times as long as that took."""
_TABLE_BYTES = 65_536
_OPEN = """
import ctypes, fcntl, os, socket, sys
NS_GET_USERNS = 0xB701
pid, channel = map(int, sys.argv[1:])
setns = ctypes.CDLL(None, use_errno=True).setns
def enter(namespace):
    if setns(namespace, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
ipc = os.open(f"/proc/{pid}/ns/ipc", os.O_RDONLY)
owner = fcntl.ioctl(ipc, NS_GET_USERNS)
if not os.path.sameopenfile(owner, os.open("/proc/self/ns/user", os.O_RDONLY)):
    enter(owner)
enter(ipc)
table = os.open("/proc/sysvipc/shm", os.O_RDONLY)
socket.send_fds(socket.socket(fileno=channel), [b"t"], [table])
"""
"""The table shows the namespace of who opens it, so a process of its own goes there and does."""


class Segments:
    """Adds up the segments in the IPC namespace of a kernel. Used by any thread."""

    def __init__(self) -> None:
        self._in_use = Lock()
        self._table: int | None = None
        self._closed = False
        self._next = 0.0

    def held(self, processes: Sequence[int]) -> int:
        """Bytes in memory; 0 where the kernel has no namespace of its own. Blocks.

        A table that cannot be opened, as when the process that would show it ends meanwhile, is
        tried again some seconds later. Raises OSError when the server lacks what it takes.
        """
        with self._in_use:
            if self._table is None and not self._closed and time.monotonic() >= self._next:
                self._open(processes)
            return _sum(_content(self._table)) if self._table is not None else 0

    def close(self) -> None:
        """Give up the table; nothing counts any more."""
        with self._in_use:
            self._closed = True
            table, self._table = self._table, None
            if table is not None:
                os.close(table)

    def _open(self, processes: Sequence[int]) -> None:
        if not (member := _member(processes)):
            return
        begin = time.monotonic()
        try:
            self._table = _opened(member)
        except (OSError, subprocess.SubprocessError) as reason:
            logger.info("System V shared memory of a kernel is not counted yet: %s", reason)
        self._next = begin + RETRY * (time.monotonic() - begin)


def _member(processes: Sequence[int]) -> int:
    """A process in another IPC namespace than this one, or 0."""
    own = Path("/proc/self/ns/ipc").stat().st_ino
    for pid in reversed(processes):
        with absences:
            if Path(f"/proc/{pid}/ns/ipc").stat().st_ino != own:
                return pid
    return 0


def _opened(member: int) -> int:
    """The table of segments as `member` would see it. Raises OSError and SubprocessError."""
    here, there = socket.socketpair()
    with here, there:
        done = subprocess.run(  # a fixed program
            [sys.executable, "-I", "-S", "-c", _OPEN, str(member), str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise OSError(words or f"exit code {done.returncode}")
        _, fds, _, _ = socket.recv_fds(here, 1, 1)
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds[0]


def _content(table: int) -> bytes:
    parts = []
    os.lseek(table, 0, os.SEEK_SET)
    while part := os.read(table, _TABLE_BYTES):
        parts.append(part)
    return b"".join(parts)


def _sum(table: bytes) -> int:
    """Add up the column `rss` of a table with a line of titles."""
    titles, *lines = table.splitlines() or [b""]
    if b"rss" not in titles.split():
        return 0
    column = titles.split().index(b"rss")
    return sum(int(line.split()[column]) for line in lines)
