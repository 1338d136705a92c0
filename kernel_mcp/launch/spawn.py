"""Start a sandboxed command as a child of the server, and watch its processes by pidfd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from contextlib import ExitStack

import anyio

from kernel_mcp.barriers import shortage
from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.process import OnEnd
from kernel_mcp.launch.readiness import StderrTail
from kernel_mcp.linux.proc import WatchedProcess, parent_of
from kernel_mcp.sandbox.base import SandboxCommand


def spawn(command: SandboxCommand) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command and close `pass_fds`; return its process and output pipe.

    Raises LaunchError.
    """
    try:
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                command.argv,
                env=command.env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                pass_fds=command.pass_fds,
                start_new_session=True,
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
    except OSError as reason:
        why = shortage(reason) or reason
        raise LaunchError(f"cannot start {command.argv[0]}: {why}") from reason
    finally:
        command.close_passed()
    return process, read


STATUS_WAIT_S = 1.0
"""Seconds to wait for the report of the sandbox's first process, known some ms after the start."""


class Spawned:
    """A running `SandboxCommand`: the started process, the sandbox's first process, the kernel.

    Without a sandbox of its own these are one process. A detached sandbox keeps running without the
    started process, and its connection reports the end. The constructor raises LaunchError.
    """

    def __init__(self, command: SandboxCommand) -> None:
        self._loop = asyncio.get_running_loop()
        self._status_fd = command.status_fd
        self.wrapped = command.status_fd >= 0
        self._detached = command.detached
        self._link: socket.socket | None = None
        self._first: WatchedProcess | None = None
        self.kernel: WatchedProcess | None = None
        self._status = b""
        self._status_known = anyio.Event()
        self._code: int | None = None
        self._on_end: OnEnd = lambda _code: None
        with ExitStack() as undo:
            if self.wrapped:
                undo.callback(self._close_status)
            self._popen, read = spawn(command)
            undo.callback(self._popen.wait)
            undo.callback(self._popen.kill)
            self.tail = StderrTail(read, self._loop)
            undo.callback(self.tail.close)
            self._outer = WatchedProcess(self._popen.pid, self._loop, self._on_outer_end)
            undo.pop_all()
        if self.wrapped:
            self._loop.add_reader(self._status_fd, self._on_status)

    @property
    def pids(self) -> list[int]:
        """Known process ids: the process that was started first, the kernel last."""
        known = (None if self._link else self._outer, self._first, self.kernel)
        return [watched.pid for watched in known if watched is not None]

    def begin(self, on_end: OnEnd) -> None:
        """Call `on_end` when the started process ends; immediately if it has ended."""
        self._on_end = on_end
        if self._code is not None:
            on_end(self._code)

    def adopt(self, pid: int) -> None:
        """Register `pid` as the kernel. Raises LaunchError if it is not of this tree."""
        try:
            self.kernel = WatchedProcess(pid, self._loop, None)
            # after opening the pidfd: the pid cannot be reused unnoticed
            parent = parent_of(pid)
        except ProcessLookupError:
            raise LaunchError("the kernel ended right after it had become ready") from None
        if self.wrapped:
            belongs = self._first is not None and parent == self._first.pid
        else:
            belongs = pid == self._popen.pid
        if not belongs:
            raise LaunchError(
                f"the kernel's readiness came from process {pid}, which is not the one that was "
                "started; report this as a defect"
            )

    def kill(self) -> None:
        """Send SIGKILL to all; continue the started process, which reports the end."""
        if self._first is not None:
            self._first.signal(signal.SIGKILL)
            self._outer.signal(signal.SIGCONT)
        elif self._code is None:
            if not self._detached:  # also kills bubblewrap's child, which would wait for it forever
                self._kill_group()
            self._outer.signal(signal.SIGKILL)

    async def settled(self) -> None:
        """Wait until the sandbox has reported its first process, `STATUS_WAIT_S` at most."""
        if self.wrapped:
            with anyio.move_on_after(STATUS_WAIT_S):
                await self._status_known.wait()

    async def gone(self) -> None:
        """Wait until the started process and the sandbox's first process are gone."""
        await self._outer.gone.wait()
        if self._first is not None:
            await self._first.gone.wait()

    def close(self) -> None:
        """Close every descriptor."""
        if self._first is not None:
            self._first.reap()
        for watched in (self._outer, self._first, self.kernel):
            if watched is not None:
                watched.close()
        if self._link is not None:
            self._loop.remove_reader(self._link)
            self._link.close()
        self.tail.close()
        self._close_status()

    def _on_status(self) -> None:
        """Read the report, which may arrive in pieces, until the first process's id is known."""
        try:
            piece = self._receive() if self._detached else os.read(self._status_fd, 4096)
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

    def _receive(self) -> bytes:
        status = socket.socket(fileno=self._status_fd)
        try:
            piece, given, _, _ = socket.recv_fds(status, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        finally:
            status.detach()
        if given:
            self._link = socket.socket(fileno=given[0])
            self._link.setblocking(False)
            self._loop.add_reader(self._link, self._on_link)
        return piece

    def _on_link(self) -> None:
        assert self._link is not None
        self._loop.remove_reader(self._link)
        try:
            code = self._link.recv(64)
        except OSError:
            code = b""
        # no message: the first process was killed, and with it all others
        self._end(int(code or 128 + signal.SIGKILL))

    def _watch_first(self, pid: int) -> None:
        """Watch the sandbox's first process. Raises ProcessLookupError if it is gone."""
        with ExitStack() as undo:
            found = WatchedProcess(pid, self._loop, None)
            undo.callback(found.close)
            # for a detached sandbox, `adopt` checks that it is the kernel's parent
            if self._detached or parent_of(pid) == self._popen.pid:
                self._first = found
                undo.pop_all()

    def _on_outer_end(self) -> None:
        # kill what the kernel left behind, before the wait releases the number of the group
        if self._first is None and not self.wrapped:
            self._kill_group()
        if self._detached and not self._status_known.is_set():
            self._on_status()
        code = self._popen.wait()
        if code or self._link is None:
            self._end(code)

    def _end(self, code: int) -> None:
        if self._code is None:
            self._code = code
            self._on_end(code)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _close_status(self) -> None:
        if self._status_fd >= 0:
            fd, self._status_fd = self._status_fd, -1
            self._loop.remove_reader(fd)
            os.close(fd)
