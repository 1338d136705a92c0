"""The processes of one forked kernel: pidfds that its template has handed over, and its word."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.process import OnEnd
from kernel_mcp.launch.tail import OutputTail
from kernel_mcp.launch.template_process import Fork
from kernel_mcp.linux.pidfd import Watched, pid_of

READY_S = 15.0
"""A forked kernel is ready after some 20 ms; past this a cold start is tried."""
STATUS_S = 1.0
"""How long after its end the word on how a kernel ended may take."""


class Forked:
    """A kernel and its sandbox's init, which takes everything with it."""

    wrapped = False

    def __init__(self, fork: Fork, tail: OutputTail) -> None:
        """Take over the pidfds of `fork` and `tail`."""
        self._loop = asyncio.get_running_loop()
        self._fork = fork
        self.tail = tail
        self._late: asyncio.TimerHandle | None = None
        self._over = False
        self._on_end: OnEnd = lambda _code: None
        with ExitStack() as undo:
            self.init = Watched(pid_of(fork.init), self._loop, None, pidfd=fork.init)
            undo.callback(self.init.close)
            self.kernel = Watched(
                pid_of(fork.kernel), self._loop, self._on_kernel_end, pidfd=fork.kernel
            )
            undo.pop_all()

    @property
    def pids(self) -> list[int]:
        """The init and the kernel."""
        return [self.init.pid, self.kernel.pid]

    def begin(self, on_end: OnEnd) -> None:
        """Have `on_end` called when the template has told of the end, or never will."""
        self._on_end = on_end
        self._fork.on_end = self._finish
        if self._fork.over:
            self._finish()

    def adopt(self, pid: int) -> None:
        """Take note of who is ready. Raises LaunchError when it is not the kernel."""
        if pid != self.kernel.pid:
            raise LaunchError(f"its readiness came from process {pid} instead of {self.kernel.pid}")

    def kill(self) -> None:
        """SIGKILL to the init, and with it to all.

        The template's processes, their parents, are continued: they take note of the end.
        """
        if not self._over or not self.init.gone.is_set():
            self.init.signal(signal.SIGKILL)
            self.init.continue_parent()
            self.kernel.continue_parent()

    async def settled(self) -> None:
        """Everything is known from the beginning."""

    async def gone(self) -> None:
        """Return when both are gone."""
        await self.init.gone.wait()
        await self.kernel.gone.wait()

    def close(self) -> None:
        """Close every descriptor."""
        self._fork.on_end = _nothing
        if self._late is not None:
            self._late.cancel()
        self.init.close()
        self.kernel.close()
        self.tail.close()

    def _on_kernel_end(self) -> None:
        if not self._over:
            self.kernel.continue_parent()
            self.init.continue_parent()
            self._late = self._loop.call_later(STATUS_S, self._finish)

    def _finish(self) -> None:
        """The kernel has ended, and how is as well known as it will ever be."""
        if self._late is not None:
            self._late.cancel()
        if not self._over:
            self._over = True
            status = self._fork.status
            self._on_end(None if status is None else os.waitstatus_to_exitcode(status))


def _nothing() -> None:
    """What is done about the end of a kernel that is closed."""
