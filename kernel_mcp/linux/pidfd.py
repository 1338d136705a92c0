"""Processes held by pidfd: watched on the event loop, signalled and reaped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import anyio

PIDFD_SIGNAL_PROCESS_GROUP = 1 << 2
"""<linux/pidfd.h>; Linux 6.9 and later."""
_STOPPED = (b"T", b"t")


class Watched:
    """A process held by pidfd: its number cannot come to mean another one."""

    def __init__(
        self,
        pid: int,
        loop: asyncio.AbstractEventLoop,
        on_end: Callable[[], None] | None,
        *,
        pidfd: int = -1,
    ) -> None:
        """Hold process `pid`, by `pidfd` when there is one already, which is taken over.

        Raises ProcessLookupError when it is gone.
        """
        self.pid = pid
        self.gone = anyio.Event()
        self._loop = loop
        self._on_end = on_end
        self._fd = pidfd if pidfd >= 0 else os.pidfd_open(pid)
        loop.add_reader(self._fd, self._ended)

    @property
    def pidfd(self) -> int:
        """Stands for the process until `close`."""
        return self._fd

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it, so that it does nothing until it is continued."""
        try:
            return _stat(self.pid)[0] in _STOPPED
        except ProcessLookupError:
            return False

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens when the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the group that the process leads, or to it alone if it leads none."""
        try:
            signal.pidfd_send_signal(self._fd, number, None, PIDFD_SIGNAL_PROCESS_GROUP)
        except ProcessLookupError:
            self.signal(number)
        except OSError:
            # before Linux 6.9: the group cannot be named by pidfd
            if not self.gone.is_set():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)

    def continue_parent(self) -> None:
        """Continue its parent if that is stopped: nobody else can take note of an end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            parent = parent_of(self.pid)
            signal.pidfd_send_signal(self._fd, 0)  # not reaped: the number meant this process
            os.kill(parent, signal.SIGCONT)

    def reap(self) -> None:
        """Take over an end that nobody waits for, where this server is the machine's process 1."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._loop.remove_reader(fd)
            os.close(fd)

    def _ended(self) -> None:
        self._loop.remove_reader(self._fd)
        self.gone.set()
        if self._on_end is not None:
            self._on_end()


def parent_of(pid: int) -> int:
    """The parent of a process. Raises ProcessLookupError when it is gone."""
    return int(_stat(pid)[1])


def pid_of(pidfd: int) -> int:
    """The process id behind a pidfd, as this process's /proc numbers it; -1 when it has ended."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Pid":
            return int(value)
    return -1


def _stat(pid: int) -> list[bytes]:
    """What follows the name in /proc/PID/stat: the state, the parent. Raises ProcessLookupError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} has ended") from None
    return stat.rpartition(b")")[2].split()
