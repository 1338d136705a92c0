"""A running template: its process, its control socket, and the forks requested from it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import partial
from typing import Any

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import LaunchError
from kernel_mcp.launch import silence
from kernel_mcp.launch.readiness import StderrTail
from kernel_mcp.launch.silence import Silence
from kernel_mcp.launch.spawn import spawn
from kernel_mcp.linux.proc import ExitStatus, pid_of, tree
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import SandboxCommand
from kernel_mcp.sandbox.self_test import Check
from kernel_specs import linux
from kernel_specs.template import packets

BARE = 1
"""The stage with only the modules that every kernel needs."""
END_S = 0.5
"""Seconds to wait for the end of a template after a request, or of a discarded kernel."""


class TemplateError(LaunchError):
    """The template cannot fork a kernel; a cold start is still possible."""


class StageOver(TemplateError):
    """The template has left the requested stage; its new stage can fork after a self-test."""


@dataclass
class Fork:
    """A forked kernel: pidfds and pids of its sandbox's init and of itself, and its end.

    `stage` is the template's stage from which it was forked. `status` is the wait status, None
    while unknown. `over` is True once `on_end` was called. `on_release` must be called when no
    process of its sandbox is left.
    """

    init: int
    kernel: int
    stage: int
    pids: Sequence[int] = ()
    status: int | None = None
    over: bool = False
    on_end: Callable[[], None] = field(default=lambda: None)
    on_release: Callable[[], None] = field(default=lambda: None)

    def end(self, status: int | None) -> None:
        """Record the kernel's end with its wait status, None if unknown."""
        self.status, self.over = status, True
        self.on_end()


@dataclass
class _ForkAnswer:
    """A template's answer to a request: a kernel or an error, valid once `given` is set."""

    given: anyio.Event = field(default_factory=anyio.Event)
    fork: Fork | None = None
    error: TemplateError = field(default_factory=TemplateError)

    def give(self, *, fork: Fork | None = None, error: str = "", passed: bool = False) -> None:
        """Set the answer, unless there is one; `passed` means that the stage is over."""
        if not self.given.is_set():
            self.fork = fork
            self.error = StageOver("it was to be forked") if passed else TemplateError(error)
            self.given.set()


class SelfTestResult:
    """The result of a template's self-test; `lock` is held during the test.

    It is valid for one stage: in later stages, code of more packages has run in the template.
    `namespaces` are those of the template's processes.
    """

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        self.stage = 0
        self.checks: tuple[Check, ...] = ()
        self.namespaces: frozenset[str] = frozenset()

    def note(self, stage: int, checks: Iterable[Check], namespaces: frozenset[str]) -> None:
        """Record that this stage has passed."""
        self.stage, self.checks, self.namespaces = stage, tuple(checks), namespaces


class TemplateProcess:
    """One template. Must be made and used on the event loop's thread: it ends with that."""

    def __init__(
        self,
        command: Callable[[int], SandboxCommand],
        start: Mapping[str, Any],
        on_change: Callable[[TemplateProcess], None],
    ) -> None:
        """Start it; `command` is called with its end of the control socket. Raises LaunchError.

        `on_change` is called when it reaches a stage, when it stops forking and when it is gone.
        """
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._requests: dict[int, _ForkAnswer] = {}
        self._forks: dict[int, Fork] = {}
        self._can_fork, self._stocked, self._whole = (anyio.Event() for _ in range(3))
        self.usable = self._stopped = self._silent = False
        self._silence: Silence | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self.stage = 0
        """Number of the current stage: 0 before the template can fork, then more with each import.
        """
        self.missing: dict[str, str] = {}
        self.reason = ""
        """Reason why it stopped forking; empty while it forks, and after a request to stop."""
        self.gone = anyio.Event()
        self.self_test = SelfTestResult()
        kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
        self._control, theirs = socket.socketpair(socket.AF_UNIX, kind)
        self._control.setblocking(False)
        try:
            self._popen, output = spawn(_prepared(command, theirs.detach()))
        except BaseException:
            self._control.close()
            raise
        self._tail = StderrTail(output, self._loop)
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is reported next
            packets.send(self._control, start)
        self._loop.add_reader(self._control.fileno(), self._on_readable)
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._on_end)
        self._look_later()

    @property
    def output(self) -> str:
        """The last 16 KiB of its output, warnings of packages included."""
        return self._tail.text().strip()

    @property
    def alive(self) -> bool:
        """Return True if it runs and was not stopped: it can fork, or will be able to."""
        return not self.gone.is_set() and not self._stopped

    @property
    def whole(self) -> bool:
        """Return True if it can fork and has imported everything: this is the last stage."""
        return self.usable and self._whole.is_set()

    async def can_fork(self) -> bool:
        """Wait until it can fork the bare kernel or has failed; return True if it can fork."""
        await self._can_fork.wait()
        return self.usable

    async def stocked(self) -> None:
        """Wait until it has made its first imports for kernels, or has failed."""
        await self._stocked.wait()

    async def ready(self) -> bool:
        """Wait until everything is imported or it has failed; return True if it can fork."""
        await self._whole.wait()
        return self.usable

    async def fork(self, request: Mapping[str, Any], fds: Sequence[int], stage: int = 0) -> Fork:
        """Fork a kernel from the template; `stage` 0 means the current one.

        The caller keeps `fds` and owns the pidfds of the result. Raises TemplateError; StageOver if
        the template has left that stage.
        """
        if not self.usable:
            raise TemplateError("the template is not running")
        number = next(self._numbers)
        answer = self._requests[number] = _ForkAnswer()
        self._look_later()
        try:
            packets.send(
                self._control, {"op": "fork", "id": number, "stage": stage, **request}, fds
            )
            await self._answer(answer)
        except OSError as reason:
            raise TemplateError(f"the template could not be asked: {reason}") from reason
        finally:
            del self._requests[number]
        if answer.fork is None:
            raise answer.error
        return answer.fork

    async def _answer(self, answer: _ForkAnswer) -> None:
        """Wait for an answer; if cancelled, wait `END_S` more to discard a late kernel."""
        try:
            await answer.given.wait()
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(END_S):
                await answer.given.wait()
                if answer.fork is not None:
                    await self._discard(answer.fork)
            raise

    async def _discard(self, fork: Fork) -> None:
        ended = anyio.Event()
        fork.on_end = ended.set
        signal.pidfd_send_signal(fork.init, signal.SIGKILL)
        linux.close_all([fork.init, fork.kernel])
        if not fork.over:
            await ended.wait()
        fork.on_release()

    def stop_forking(self) -> None:
        """Stop forking; running kernels are kept, and the template ends with the last of them."""
        self._stop()
        if not self._forks:
            self._hang_up()

    async def aclose(self) -> None:
        """End the template and its remaining kernels."""
        with anyio.CancelScope(shield=True):
            self._stop()
            self._hang_up()
            with anyio.move_on_after(END_S):
                await self.gone.wait()
            if not self.gone.is_set():
                self._popen.kill()
                await self.gone.wait()

    def _stop(self) -> None:
        self.usable, self._stopped = False, True
        for event in (self._can_fork, self._stocked, self._whole):
            event.set()

    def _look_later(self) -> None:
        if self._look_timer is None:
            self._look_timer = self._loop.call_later(silence.LOOK_S, self._look)

    def _look(self) -> None:
        """Stop forking if the template is silent although it must import or fork."""
        self._look_timer = None
        if self._stopped or (self._can_fork.is_set() and not self._requests):
            self._silence = None
            return
        self._silence = self._silence or Silence(self._own_processes)
        if why := self._silence.look():
            self._silent = True
            self._stop_forking(why)
        else:
            self._look_later()

    def _own_processes(self) -> Iterable[int]:
        """Return the pids of the template without its kernels, which may be computing."""
        return tree(self._popen.pid, {pid for fork in self._forks.values() for pid in fork.pids})

    def _hang_up(self) -> None:
        """Close the control socket, which ends the template; kill a silent one."""
        if self._silent:
            self._popen.kill()
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()

    def _on_readable(self) -> None:
        try:
            while self._control.fileno() >= 0:
                try:
                    received = packets.receive(self._control, wait=False)
                except packets.DescriptorsLost as lost:
                    self._on_lost(lost.message)
                    continue
                if received is None:
                    self._loop.remove_reader(self._control.fileno())
                    return  # the end of the process is reported next
                self._on_message(*received)
        except BlockingIOError:
            return
        except (ValueError, KeyError, IndexError, TypeError) as malformed:
            # imported packages may send anything
            self._hang_up()
            self._stop_forking(f"it does not keep to the protocol: {malformed!r}")

    def _on_message(self, message: dict[str, Any], fds: list[int]) -> None:
        self._silence = None
        operation, number = message["op"], message.get("id", 0)
        answer = self._requests.get(number, _ForkAnswer())
        if operation == "forked":
            stage = int(message["stage"])
            fork = self._forks[number] = Fork(
                init=fds[0], kernel=fds[1], stage=stage, pids=[pid_of(fd) for fd in fds[:2]]
            )
            fork.on_release = partial(self._released, number)
            answer.give(fork=fork)
            if answer.fork is not fork or number not in self._requests:
                # too late: the request was cancelled
                signal.pidfd_send_signal(fork.init, signal.SIGKILL)
                linux.close_all(fds)
                del self._forks[number]
        elif operation == "failed":
            answer.give(error=str(message["error"]))
        elif operation == "passed":
            answer.give(passed=True)
        elif operation == "exit":
            self._on_exit(number, int(message["status"]))
        elif operation == "ready":
            self._on_stage(message)
        else:
            self._tail.drain()
            status = message.get("status")
            how = "" if status is None else f": {_end(os.waitstatus_to_exitcode(int(status)))}"
            self._stop_forking(f"the process of it that forks has ended{how}")

    def _on_stage(self, message: Mapping[str, Any]) -> None:
        self.stage, self.missing = int(message["stage"]), dict(message["missing"])
        self.usable = not self._stopped
        self._can_fork.set()
        if self.stage > BARE or not message["left"]:
            self._stocked.set()
        if not message["left"]:
            self._whole.set()
        self._on_change(self)

    def _on_lost(self, message: dict[str, Any]) -> None:
        """Fail a fork whose pidfds were lost for lack of descriptors, and end its kernel."""
        answer = self._requests.get(message.get("id", 0))
        if answer is not None:
            answer.give(error="the server has no file descriptors left for it")
            packets.send(self._control, {"op": "end", "id": message["id"]})

    def _on_exit(self, number: int, status: int) -> None:
        if (fork := self._forks.get(number)) is not None:
            fork.end(status)

    def _released(self, number: int) -> None:
        self._forks.pop(number, None)
        if not self.alive and not self._forks:
            self._hang_up()

    def _stop_forking(self, reason: str) -> None:
        if not self._stopped:
            self.reason = reason
        self._stop()
        for answer in self._requests.values():
            answer.give(error=f"the template forks no more: {reason}")
        if not self._forks:
            self._hang_up()
        self._on_change(self)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        for step in (
            partial(os.close, self._pidfd),
            self._popen.wait,
            self._on_readable,
            self._hang_up,
            self._tail.drain,
            self._tail.close,
        ):
            with Barrier("taking note of a template's end"):
                step()
        self.gone.set()
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._stop_forking(_end(self._popen.returncode))
        while self._forks:
            fork = self._forks.popitem()[1]
            if not fork.over:
                fork.end(None)


def _end(code: int) -> str:
    """Return a text about how a process ended; a negative `code` is that of a signal."""
    return (ExitStatus(signal=-code) if code < 0 else ExitStatus(code=code)).story("it")


def _prepared(command: Callable[[int], SandboxCommand], control: int) -> SandboxCommand:
    """Return the command that inherits the descriptor `control`; close that on an exception."""
    try:
        return command(control)
    except BaseException:
        os.close(control)
        raise
