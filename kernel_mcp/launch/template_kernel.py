"""One forked kernel: watched and signalled through pidfds that its template has handed over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from kernel_mcp.launch.base import ConnectionInfo, ExitStatus, Usage
from kernel_mcp.launch.process import PIDFD_SIGNAL_PROCESS_GROUP, fatal_line
from kernel_mcp.launch.recorder import Recorder
from kernel_mcp.launch.tail import OutputTail
from kernel_mcp.launch.template_process import Fork
from kernel_mcp.limits.kernel import KernelLimits

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


class ForkedKernel:
    """One kernel that `TemplateLauncher` has forked."""

    def __init__(
        self,
        *,
        connection: ConnectionInfo,
        process: ForkedProcess,
        limits: KernelLimits,
        recorder: Recorder,
        resources: AsyncExitStack,
    ) -> None:
        self._connection = connection
        self._process = process
        self._limits = limits
        self._recorder = recorder
        self._resources = resources

    @property
    def pid(self) -> int:
        """Process id of the kernel itself, as the host sees it."""
        return self._process.pid

    @property
    def init_pid(self) -> int:
        """Process id of the sandbox's first process, as the host sees it."""
        return self._process.init_pid

    @property
    def connection(self) -> ConnectionInfo:
        """Where its channels listen, in host paths."""
        return self._connection

    @property
    def exit(self) -> ExitStatus | None:
        """How it ended, or None while it lives."""
        return self._process.exit

    @property
    def limits(self) -> KernelLimits:
        """What it may use."""
        return self._limits

    def usage(self) -> Usage:
        """What it uses, children included; zeros once it has ended."""
        return self._limits.usage() if self.exit is None else Usage()

    def unheard(self, characters: int) -> str:
        """What it printed after the first `characters`, as far as that is still known."""
        return self._recorder.unheard(characters)

    def interrupt(self) -> None:
        """Send SIGINT to the kernel's process group; does nothing once it has ended."""
        self._process.interrupt()

    def signal(self, number: int) -> None:
        """Send any other signal to the kernel alone; does nothing once it has ended."""
        self._process.signal(number)

    def kill(self) -> None:
        """End every process of the sandbox with SIGKILL; does nothing once it has ended."""
        self._process.kill()

    async def wait(self) -> ExitStatus:
        """Return how it ended, at once after its death."""
        return await self._process.wait()

    async def aclose(self) -> None:
        """Kill what still runs, remove the socket directory, give the user id back."""
        await self._resources.aclose()


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
