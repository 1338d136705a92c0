"""The processes of a kernel that a template has forked, or a checkpoint of one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.checkpoint import Checkpoint, ResumedKernel
from kernel_mcp.launch.process import OnEnd, SandboxProcesses
from kernel_mcp.launch.readiness import StderrTail
from kernel_mcp.launch.template.process import Fork
from kernel_mcp.linux.proc import WatchedProcess, pid_of, wait_status

STATUS_S = 1.0
"""Seconds to wait for a kernel's exit status after its end."""
LOOK_S = 0.005
"""Seconds between two checks of something that ends soon."""


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


class SharedSandbox(Protocol):
    """The sandbox of several kernels: its init, and the end of what that prints."""

    init: WatchedProcess
    tail: StderrTail

    def needed(self, beside: SandboxProcesses) -> bool:
        """Return True if another kernel, or a checkpoint, needs the sandbox."""

    def kill(self) -> None:
        """Send SIGKILL to the init."""


class ResumedProcess:
    """The processes of a kernel that a checkpoint has forked."""

    wrapped = False

    def __init__(
        self, resumed: ResumedKernel, checkpoint: Checkpoint, group: SharedSandbox
    ) -> None:
        self.tail = group.tail
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._status: int | None = None
        self._over = False
        self._end_by = 0.0
        self._later: asyncio.TimerHandle | None = None
        self._on_end: OnEnd = lambda _code: None
        self.kernel = WatchedProcess(
            resumed.pid, self._loop, self._on_kernel_end, pidfd=resumed.pidfd
        )
        checkpoint.when_ended(resumed.number, self._on_status)

    @property
    def pids(self) -> list[int]:
        """Process ids of the init and the kernel."""
        return [self._group.init.pid, self.kernel.pid]

    def begin(self, on_end: OnEnd) -> None:
        """Call `on_end` when the kernel ends."""
        self._on_end = on_end

    def adopt(self, pid: int) -> None:
        """Do nothing: the process is known from the beginning."""

    def kill(self) -> None:
        """Send SIGKILL to the kernel, and to all processes if nothing else needs the sandbox."""
        self.kernel.signal(signal.SIGKILL)
        self.kernel.continue_parent()
        if not self._group.needed(self):
            self._group.kill()

    async def settled(self) -> None:
        """Return at once: all processes are known from the beginning."""

    async def gone(self) -> None:
        """Wait until the kernel is gone."""
        await self.kernel.gone.wait()

    def close(self) -> None:
        """Close its descriptor; the tail belongs to the group."""
        if self._later is not None:
            self._later.cancel()
        self.kernel.close()

    def _on_kernel_end(self) -> None:
        self._end_by = self._loop.time() + STATUS_S
        self._look()

    def _on_status(self, status: int) -> None:
        self._status = status
        if self.kernel.gone.is_set():
            self._look()

    def _look(self) -> None:
        """Report the end with the status that Linux shows, else with that of the checkpoint.

        Without either, try again until `STATUS_S` after the end.
        """
        if self._over:
            return
        status = wait_status(self.kernel.pidfd)
        status = self._status if status is None else status
        if status is None and self._loop.time() < self._end_by:
            if self._later is not None:
                self._later.cancel()
            self._later = self._loop.call_later(LOOK_S, self._look)
            return
        self._over = True
        self._on_end(None if status is None else os.waitstatus_to_exitcode(status))
