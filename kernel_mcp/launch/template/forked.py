"""The processes of a forked kernel: the init of its sandbox, and the kernel itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.process import OnEnd
from kernel_mcp.launch.readiness import StderrTail
from kernel_mcp.launch.template.process import Fork
from kernel_mcp.linux.proc import WatchedProcess, pid_of

STATUS_S = 1.0
"""Seconds to wait for a kernel's exit status after its end."""


class Forked:
    """A kernel and its sandbox's init (pid 1), whose exit ends all other processes."""

    wrapped = False

    def __init__(self, fork: Fork, tail: StderrTail) -> None:
        self._loop = asyncio.get_running_loop()
        self._fork = fork
        self.stage = fork.stage
        self.tail = tail
        self._late: asyncio.TimerHandle | None = None
        self._over = False
        self._on_end: OnEnd = lambda _code: None
        self.needed: Callable[[], bool] | None = None
        """Returns True if the sandbox must outlive this kernel; None if it ends with the kernel."""
        with ExitStack() as undo:
            self.init = WatchedProcess(pid_of(fork.init), self._loop, None, pidfd=fork.init)
            undo.callback(self.init.close)
            self.kernel = WatchedProcess(
                pid_of(fork.kernel), self._loop, self._on_kernel_end, pidfd=fork.kernel
            )
            undo.pop_all()

    @property
    def pids(self) -> list[int]:
        """Process ids of the init and the kernel."""
        return [self.init.pid, self.kernel.pid]

    def begin(self, on_end: OnEnd) -> None:
        """Call `on_end` once the template has reported the kernel's end, or can no longer do so."""
        self._on_end = on_end
        self._fork.on_end = self._finish
        if self._fork.over:
            self._finish()

    def adopt(self, pid: int) -> None:
        """Raise LaunchError if `pid` is not the kernel."""
        if pid != self.kernel.pid:
            raise LaunchError(f"its readiness came from process {pid} instead of {self.kernel.pid}")

    def kill(self) -> None:
        """Send SIGKILL to the init, which ends all; continue the parents, which report the end.

        If the sandbox is still needed, only the kernel is killed.
        """
        if self.needed is not None and self.needed():
            self.kernel.signal(signal.SIGKILL)
            self.kernel.continue_parent()
        elif not self._over or not self.init.gone.is_set():
            self.init.signal(signal.SIGKILL)
            self.init.continue_parent()
            self.kernel.continue_parent()

    async def settled(self) -> None:
        """Return at once: all processes are known from the beginning."""

    async def gone(self) -> None:
        """Wait until both are gone; only for the kernel if a sandbox group owns the sandbox."""
        if self.needed is None:
            await self.init.gone.wait()
        await self.kernel.gone.wait()

    def close(self) -> None:
        """Close every descriptor."""
        self._fork.on_end = _nothing
        if self._late is not None:
            self._late.cancel()
        self.kernel.close()
        if self.needed is None:
            self.init.close()
            self.tail.close()
            self.release()

    def release(self) -> None:
        """Report to the template that all of the sandbox has ended."""
        self._fork.on_release()

    def _on_kernel_end(self) -> None:
        if not self._over:
            self._late = self._loop.call_later(STATUS_S, self._finish)
            self.kernel.continue_parent()
            self.init.continue_parent()

    def _finish(self) -> None:
        if self._late is not None:
            self._late.cancel()
        if not self._over:
            self._over = True
            status = self._fork.status
            self._on_end(None if status is None else os.waitstatus_to_exitcode(status))


def _nothing() -> None:
    """Ignore the end of a closed kernel."""
