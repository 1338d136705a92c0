"""One forked kernel: watched and signalled through pidfds that its template has handed over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import anyio

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.base import ExitStatus
from kernel_mcp.launch.process import fatal_line
from kernel_mcp.launch.readiness import ReadinessChannel
from kernel_mcp.launch.tail import OutputTail
from kernel_mcp.launch.template_process import Fork
from kernel_mcp.launch.watched import PIDFD_SIGNAL_PROCESS_GROUP

READY_S = 15.0
"""A forked kernel is ready after some 20 ms; past this a cold start is tried."""
STATUS_S = 1.0
"""How long after its end the word on how a kernel ended may take."""


class ForkedProcess:
    """A kernel and its sandbox's init: the counterpart of a cold start's `ConfinedProcess`."""

    def __init__(self, fork: Fork, tail: OutputTail) -> None:
        """Take over the pidfds of `fork` and `tail`."""
        self._loop = asyncio.get_running_loop()
        self._fork = fork
        self._tail = tail
        self.init_pid, self.pid = _pid(fork.init), _pid(fork.kernel)
        self._gone = {fd: anyio.Event() for fd in (fork.init, fork.kernel)}
        self._ended = anyio.Event()
        self._late: asyncio.TimerHandle | None = None
        self.explain: Callable[[ExitStatus], ExitStatus] = lambda status: status
        self.exit: ExitStatus | None = None
        for fd in self._gone:
            self._loop.add_reader(fd, self._on_gone, fd)
        fork.on_end = self._finish
        if fork.over:
            self._finish()

    @property
    def output(self) -> str:
        """The last that it wrote to its standard output and error."""
        return self._tail.text()

    @property
    def pidfd(self) -> int:
        """Stands for the kernel itself."""
        return self._fork.kernel

    async def ready(self, channel: ReadinessChannel) -> None:
        """Wait for the kernel's word. Raises LaunchError with the end of what it wrote."""
        try:
            with anyio.fail_after(READY_S):
                pid = await channel.wait()
            if pid == self.pid:
                return
            reason = f"its readiness came from process {pid} instead of {self.pid}"
        except TimeoutError:
            reason = f"the kernel was not ready after {READY_S:g} s"
        except LaunchError as failure:
            reason = str(failure)
        output = self.output.strip()
        raise LaunchError(f"{reason}. It wrote:\n{output}" if output else f"{reason}.")

    def interrupt(self) -> None:
        """SIGINT to the kernel's process group."""
        if self.exit is not None or self._gone[self._fork.kernel].is_set():
            return
        try:
            self._signal(self._fork.kernel, signal.SIGINT, PIDFD_SIGNAL_PROCESS_GROUP)
        except OSError:  # before Linux 6.9: the group cannot be named by pidfd
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGINT)

    def signal(self, number: int) -> None:
        """Any signal to the kernel alone."""
        if self.exit is None:
            self._signal(self._fork.kernel, number)

    def kill(self) -> None:
        """SIGKILL to the init, and with it to every process of the sandbox."""
        if not self._ended.is_set() or not self._gone[self._fork.init].is_set():
            self._signal(self._fork.init, signal.SIGKILL)

    async def wait(self) -> ExitStatus:
        """Return how the kernel ended as soon as it has."""
        await self._ended.wait()
        assert self.exit is not None
        return self.exit

    async def aclose(self) -> None:
        """Kill what runs, wait until all of it is gone and close every descriptor."""
        with anyio.CancelScope(shield=True):
            self.kill()
            for gone in self._gone.values():
                await gone.wait()
            await self._ended.wait()
        self._fork.on_end = _nothing
        for fd in self._gone:
            os.close(fd)
        self._tail.close()

    def _signal(self, pidfd: int, number: int, flags: int = 0) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number, None, flags)

    def _on_gone(self, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        self._gone[pidfd].set()
        if pidfd == self._fork.kernel and not self._ended.is_set():
            self._late = self._loop.call_later(STATUS_S, self._finish)

    def _finish(self) -> None:
        """The kernel has ended, and how is as well known as it will ever be."""
        if self._late is not None:
            self._late.cancel()
        if self._ended.is_set():
            return
        self.kill()
        self._tail.drain()
        self.exit = self.explain(_exit_status(self._fork.status, self.output))
        self._ended.set()


def _nothing() -> None:
    """What is done about the end of a kernel that is closed."""


def _pid(pidfd: int) -> int:
    """The process id behind a pidfd, as this process's /proc numbers it; -1 when it has ended."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Pid":
            return int(value)
    return -1


def _exit_status(status: int | None, output: str) -> ExitStatus:
    if status is None:
        return ExitStatus(signal=signal.SIGKILL, detail="its template has ended")
    code = os.waitstatus_to_exitcode(status)
    detail = fatal_line(output) if code else ""
    if code < 0:
        return ExitStatus(signal=-code, detail=detail)
    return ExitStatus(code=code, detail=detail)
