"""One confined process with all it starts: spawned, watched through pidfds, ended as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack

import anyio

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.base import ExitStatus
from kernel_mcp.launch.spawn import spawn
from kernel_mcp.launch.tail import OutputTail
from kernel_mcp.launch.watched import Watched, parent_of
from kernel_mcp.sandbox.base import SandboxCommand

logger = logging.getLogger(__name__)

STATUS_WAIT_S = 1.0
"""How long an end waits to learn the sandbox's first process: known some ms after the start."""
END_WAIT_S = 10.0
"""How long killed processes may take to end."""


class ConfinedProcess:
    """A running `SandboxCommand`.

    Has to be made and used on the event loop's thread: the kernel dies with the thread that
    started it, and its end is noticed by the loop.
    """

    def __init__(
        self,
        command: SandboxCommand,
        explain: Callable[[ExitStatus], ExitStatus] = lambda status: status,
    ) -> None:
        """Start the command; `explain` adds the cause to how it ended.

        Raises LaunchError when it cannot be executed.
        """
        self._explain = explain
        self._loop = asyncio.get_running_loop()
        self._status_fd = command.status_fd
        self._wrapped = command.status_fd >= 0
        self._detached = command.detached
        self._first: Watched | None = None
        self._kernel: Watched | None = None
        self._status = b""
        self._status_known = anyio.Event()
        self._ended = anyio.Event()
        self.exit: ExitStatus | None = None
        with ExitStack() as undo:
            if self._wrapped:
                undo.callback(self._close_status)
            self._popen, read = spawn(command)
            undo.callback(self._popen.wait)
            undo.callback(self._popen.kill)
            self._tail = OutputTail(read, self._loop)
            undo.callback(self._tail.close)
            self._outer = Watched(self._popen.pid, self._loop, self._on_end)
            undo.pop_all()
        if self._wrapped:
            self._loop.add_reader(self._status_fd, self._on_status)

    @property
    def output(self) -> str:
        """The last that it wrote to its standard output and error."""
        return self._tail.text()

    @property
    def pids(self) -> list[int]:
        """Those of its processes that are known: what was started first, the kernel last."""
        known = (self._outer, self._first, self._kernel)
        return [watched.pid for watched in known if watched is not None]

    @property
    def pidfd(self) -> int:
        """Stands for the kernel itself from `adopt` on, -1 before."""
        return self._kernel.pidfd if self._kernel is not None else -1

    def adopt(self, pid: int) -> None:
        """Take `pid` as the process to interrupt. Raises LaunchError when it is not of this tree.

        The number comes with the credentials of the message that the kernel has sent.
        """
        try:
            self._kernel = Watched(pid, self._loop, None)
            # after opening: from here on the number can only mean this process
            parent = parent_of(pid)
        except ProcessLookupError:
            raise LaunchError("the kernel ended right after it had become ready") from None
        if self._wrapped:
            belongs = self._first is not None and parent == self._first.pid
        else:
            belongs = pid == self._popen.pid
        if not belongs:
            raise LaunchError(
                f"the kernel's readiness came from process {pid}, which is not the one that was "
                "started; report this as a defect"
            )

    def interrupt(self) -> None:
        """Send SIGINT to the kernel's process group."""
        if self._kernel is not None and self.exit is None:
            self._kernel.signal_group(signal.SIGCONT)  # a stopped process would not react
            self._kernel.signal_group(signal.SIGINT)

    def signal(self, number: int) -> None:
        """Send any signal to the kernel itself."""
        if self._kernel is not None and self.exit is None:
            self._kernel.signal(number)

    def kill(self) -> None:
        """SIGKILL to every process of the sandbox."""
        if self._first is not None:
            self._first.signal(signal.SIGKILL)
        elif self.exit is None:
            if not self._wrapped:
                self._kill_group()
            self._outer.signal(signal.SIGKILL)

    async def wait(self) -> ExitStatus:
        """Return how it ended as soon as it has."""
        await self._ended.wait()
        assert self.exit is not None
        return self.exit

    async def aclose(self) -> None:
        """Kill what runs, wait until all of it is gone and close every descriptor.

        A process that hangs in a system call of a broken disk is left to itself after a while.
        """
        with anyio.CancelScope(shield=True):
            if self._wrapped:
                with anyio.move_on_after(STATUS_WAIT_S):
                    await self._status_known.wait()
            self.kill()
            with anyio.move_on_after(END_WAIT_S) as patience:
                await self._ended.wait()
                if self._first is not None:
                    await self._first.gone.wait()
            if patience.cancelled_caught:
                logger.error("process %d does not end although it was killed", self._popen.pid)
        if self._first is not None:
            self._first.reap()
        for watched in (self._outer, self._first, self._kernel):
            if watched is not None:
                watched.close()
        self._tail.close()
        self._close_status()

    def _on_status(self) -> None:
        """Read bubblewrap's report, which arrives in pieces, up to the first process's id."""
        try:
            piece = os.read(self._status_fd, 4096)
        except BlockingIOError:
            return
        self._status += piece
        first, complete, _ = self._status.partition(b"\n")
        if not complete and piece:
            return
        self._loop.remove_reader(self._status_fd)
        if complete:
            with contextlib.suppress(ProcessLookupError):
                self._watch_first(json.loads(first)["child-pid"])
        self._status_known.set()

    def _watch_first(self, pid: int) -> None:
        """Hold the sandbox's first process. Raises ProcessLookupError when it is gone."""
        with ExitStack() as undo:
            found = Watched(pid, self._loop, None)
            undo.callback(found.close)
            # a detached one is held to be the right one by `adopt`, as the kernel's parent
            if self._detached or parent_of(pid) == self._popen.pid:
                self._first = found
                undo.pop_all()

    def _on_end(self) -> None:
        # what the kernel left behind; before the wait, which gives the group's number free
        if self._first is not None:
            self._first.signal(signal.SIGKILL)
        elif not self._wrapped:
            self._kill_group()
        code = self._popen.wait()
        self._tail.drain()
        ended = exit_status(code, wrapped=self._wrapped, output=self.output)
        self.exit = self._explain(ended)
        self._ended.set()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _close_status(self) -> None:
        if self._status_fd >= 0:
            self._loop.remove_reader(self._status_fd)
            os.close(self._status_fd)
            self._status_fd = -1


def exit_status(code: int, *, wrapped: bool, output: str) -> ExitStatus:
    """How the kernel ended, from the exit code of the process that was started.

    bubblewrap reports a kernel killed by signal n as exit code 128 + n.
    """
    detail = fatal_line(output) if code else ""
    if code < 0:
        return ExitStatus(signal=-code, detail=detail)
    if wrapped and 128 < code <= 128 + signal.NSIG:
        return ExitStatus(signal=code - 128, detail=detail)
    return ExitStatus(code=code, detail=detail)


def fatal_line(output: str) -> str:
    """The line of the output that says most about a crash, or an empty text."""
    marks = ("Fatal Python error", "terminate called", "free(): ", "malloc(): ", "double free")
    lines = output.splitlines()
    return next((line[:200] for line in lines if line.startswith(marks)), "")
