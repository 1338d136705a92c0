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


class Watched:
    """A process held by pidfd: its number cannot come to mean another one."""

    def __init__(
        self, pid: int, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None] | None
    ) -> None:
        self.pid = pid
        self.gone = anyio.Event()
        self._loop = loop
        self._on_end = on_end
        self._fd = os.pidfd_open(pid)
        loop.add_reader(self._fd, self._ended)

    @property
    def pidfd(self) -> int:
        """Stands for the process until `close`."""
        return self._fd

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

    def reap(self) -> None:
        """Take over an end that nobody waits for, where this server is the machine's process 1."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ended(self) -> None:
        self._loop.remove_reader(self._fd)
        self.gone.set()
        if self._on_end is not None:
            self._on_end()


def parent_of(pid: int) -> int:
    """The parent of a process. Raises ProcessLookupError when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} has ended") from None
    return int(stat.rpartition(b")")[2].split()[1])
