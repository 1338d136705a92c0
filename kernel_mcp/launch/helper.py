"""A helper process of the server that serves all sessions: start, ask, ping and replace it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio

from kernel_mcp.barriers import log_failure, reason_of
from kernel_mcp.errors import LaunchError
from kernel_mcp.launch import silence
from kernel_mcp.launch.readiness import StderrTail
from kernel_mcp.launch.silence import Silence
from kernel_mcp.launch.spawn import spawn
from kernel_mcp.linux.proc import WatchedProcess
from kernel_mcp.sandbox.base import SandboxCommand
from kernel_specs import linux
from kernel_specs.template import packets

PING_LOOKS = 5
"""Number of checks, `silence.LOOK_S` apart, between two pings of a process without requests."""
PAUSE_S = 1.0
"""Seconds until a process is replaced; doubles each time, up to `LONGEST_PAUSE_S`."""
LONGEST_PAUSE_S = 60.0
END_S = 2.0
_ENDED = "it has ended"

logger = logging.getLogger(__name__)


class HelperProcess:
    """One process at a time, which receives and sends packets (JSON and descriptors).

    The process is replaced after a pause if it ends, is silent or sends a malformed message. Open
    requests then fail, and the reason is logged and reported. It answers `{"ping": n}` with
    `{"pong": n}`, and a request with the request's `id`.

    Templates do not use this class, only its test for silence: a replaced template runs beside the
    next one until the last of its kernels has ended.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], list[str]],
        *,
        on_start: Callable[[], None],
        on_message: Callable[[dict[str, Any], list[int]], None],
        on_end: Callable[[str], None],
    ) -> None:
        """`command` returns its command line, given the descriptor of its end of the socket.

        `on_start` sends the first messages.

        `on_message` owns the descriptors of its message; if it raises KeyError, TypeError or
        ValueError, the process is replaced. `on_end` is called with the reason.
        """
        self._name = name
        self._command = command
        self._on_start = on_start
        self._on_message = on_message
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._requests: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._control: socket.socket | None = None
        self._watched: WatchedProcess | None = None
        self._ending: list[WatchedProcess] = []
        self._tail: StderrTail | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = PAUSE_S
        self._quiet = 0
        self._silence: Silence | None = None
        """Test for silence while a request is open; None without one."""

    @property
    def running(self) -> bool:
        """Return True if a process runs; False before the first start and during a replacement."""
        return self._control is not None

    def start(self) -> None:
        """Start the process unless it runs, or a start is scheduled."""
        if self._control is None and self._timer is None:
            self._start()

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message if a process runs; replace a process that cannot receive it."""
        if self._control is None:
            return
        try:
            packets.send(self._control, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            self.replace(_ENDED)
        except OSError as reason:
            self.replace(f"it takes no messages: {reason.strerror}")

    async def ask(
        self, message: Mapping[str, Any], fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request; return its answer and the answer's descriptors.

        Raises LaunchError if there is no answer.
        """
        if self._control is None:
            raise LaunchError(f"{self._name} is being replaced: try again")
        number = next(self._numbers)
        answer: asyncio.Future[tuple[dict[str, Any], list[int]]]
        answer = self._requests[number] = asyncio.get_running_loop().create_future()
        try:
            self._watch_for_silence()
            self.send({**message, "id": number}, fds)
            return await answer
        finally:
            self._requests.pop(number, None)

    def replace(self, why: str) -> None:
        """Kill the process, and start another one after a pause."""
        output = self._stop(why)
        logger.error(
            "%s is replaced in %g s: %s%s",
            self._name,
            self._pause_s,
            why,
            f". It wrote:\n{output}" if output else "",
        )
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._start)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._on_end(why)

    async def aclose(self) -> None:
        """Kill the process and start no other."""
        self._stop("the server ends")
        with anyio.CancelScope(shield=True), anyio.move_on_after(END_S):
            for each in self._ending:
                await each.gone.wait()
        self._forget_ended()

    def _forget_ended(self) -> None:
        for each in self._ending:
            if each.gone.is_set():
                each.close()
        self._ending = [each for each in self._ending if not each.gone.is_set()]

    def _start(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.ExitStack() as undo:
                undo.callback(ours.close)
                ours.setblocking(False)
                fd = theirs.detach()
                popen, pipe = spawn(SandboxCommand(self._command(fd), [fd], {"LANG": "C.UTF-8"}))
                undo.callback(popen.wait)
                undo.callback(popen.kill)
                tail = StderrTail(pipe, loop)
                undo.callback(tail.close)
                self._watched = WatchedProcess(popen.pid, loop, _reaping(popen))
                self._tail = tail
                undo.pop_all()
        except (LaunchError, OSError) as reason:
            self.replace(f"it cannot be started: {reason_of(reason)}")
            return
        self._control = ours
        loop.add_reader(ours.fileno(), self._on_readable)
        self._timer = loop.call_later(silence.LOOK_S, self._look)
        self._on_start()

    def _stop(self, why: str) -> str:
        """Kill the process, fail its open requests, and return its last output."""
        output = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._watched is not None:
            self._forget_ended()
            self._ending.append(self._watched)
            self._watched.signal(signal.SIGKILL)
            self._watched = None
        if self._tail is not None:
            self._tail.drain()
            output = self._tail.text().strip()
            self._tail.close()
            self._tail = None
        self._silence, self._quiet = None, 0
        for answer in self._requests.values():
            if not answer.done():
                answer.set_exception(LaunchError(f"{self._name} is being replaced: {why}"))
        return output

    def _on_readable(self) -> None:
        while self._control is not None:
            try:
                received = packets.receive(self._control, wait=False)
            except BlockingIOError:
                return
            except packets.DescriptorsLost as lost:
                self._answer(lost.message, [], str(lost))
                continue
            except (OSError, ValueError) as reason:
                self.replace(f"it sent what is no message: {reason}")
                return
            if received is None:
                self.replace(_ENDED)
                return
            try:
                self._handle(*received)
            except (KeyError, TypeError, ValueError, IndexError) as reason:
                self.replace(f"it sent what is no message: {reason!r}")
            except Exception as error:  # noqa: BLE001  # a defect here: it must not go unhandled
                log_failure(error, f"handling a message of {self._name}")
                self.replace(f"a message of it could not be handled: {error!r}")

    def _handle(self, message: dict[str, Any], fds: list[int]) -> None:
        self._silence, self._quiet = None, 0
        if "pong" in message:
            linux.close_all(fds)
            self._pause_s = PAUSE_S
        elif "id" in message:
            self._answer(message, fds)
        else:
            self._on_message(message, fds)
        if any(not each.done() for each in self._requests.values()):
            self._watch_for_silence()

    def _answer(self, message: dict[str, Any], fds: list[int], failure: str = "") -> None:
        answer = self._requests.get(message.get("id", 0))
        if answer is None or answer.done():
            linux.close_all(fds)
        elif failure:
            answer.set_exception(LaunchError(f"{self._name}: {failure}"))
        else:
            answer.set_result((message, fds))

    def _watch_for_silence(self) -> None:
        """Start the test for silence, unless an open request has already done so."""
        if self._silence is None and self._watched is not None:
            pid = self._watched.pid
            self._silence = Silence(lambda: [pid])

    def _look(self) -> None:
        """Check the process each `LOOK_S`: ping it at intervals, replace it if it is silent."""
        self._timer = asyncio.get_running_loop().call_later(silence.LOOK_S, self._look)
        self._quiet += 1
        if self._silence is not None:
            if why := self._silence.look():
                self.replace(why)
        elif self._quiet >= PING_LOOKS:
            self._watch_for_silence()
            self.send({"ping": next(self._numbers)})


def _reaping(popen: subprocess.Popen[bytes]) -> Callable[[], None]:
    """Return a callback that reaps the process."""

    def reap() -> None:
        popen.wait()

    return reap
