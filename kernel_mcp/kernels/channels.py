"""A kernel's channels on the event loop: no thread, no polling, no reading ahead, no reconnect.

A kernel that floods gets `SHARE` of the loop's time and `BURST_S` of it at once, so that other
sessions keep their turn. Meanwhile nothing of it is read: its own sockets fill up and make it wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Literal, TypeAlias

import anyio

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.config.values import KIB
from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.connection import Connection
from kernel_mcp.kernels.wire import MAX_MESSAGE_BYTES, Message, Overload, Wire, WireError
from kernel_mcp.launch.base import ConnectionInfo
from kernel_specs.restricted.wire.zmtp import ProtocolError

Channel: TypeAlias = Literal["shell", "iopub", "control"]

BURST_S = 0.003
SHARE = 0.5
"""Of the time that passes, how much counts as paid for: a flood gets a third of the loop."""
AGAIN_S = 0.1
"""When to listen again after the system has refused it."""
CLOSED_GRACE_S = 0.5
"""How long a kernel that closed a channel may take to end by itself, which says more about it."""
OVERHEAD_BYTES = 64 * KIB
"""Of a message's frames besides its content."""


class Channels:
    """The shell, iopub and control channels of one kernel.

    `on_message(channel, message)` is called for every valid message, in order per channel;
    `on_refused(reason)` for each that is left out because it would take too long; and
    `on_broken(reason)` when the kernel can no longer be talked to.
    """

    def __init__(
        self,
        connection: ConnectionInfo,
        *,
        on_message: Callable[[Channel, Message], None],
        on_refused: Callable[[str], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._wire = Wire(connection.key)
        self._on_message = on_message
        self._on_refused = on_refused
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._greeted = anyio.Event()
        self._welcome = False
        self._ended = anyio.Event()
        self._reason = ""
        self._closed = False
        self._lines: dict[Channel, Connection] = {}
        self._debt = 0.0
        self._settled = perf_counter()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.received = self.malformed = 0
        self.unread: set[Channel] = set()
        """Channels that the kernel has closed before it had read all of them."""
        self._open("shell", b"DEALER", connection.path(connection.shell_port))
        self._open("control", b"DEALER", connection.path(connection.control_port))
        self._open("iopub", b"SUB", connection.path(connection.iopub_port))

    async def ready(self, timeout: float) -> None:
        """Wait until output of the kernel is sure to arrive here.

        Raises LaunchError after `timeout` seconds, or when the kernel cannot be talked to.
        """
        with anyio.move_on_after(timeout):
            await self._greeted.wait()
            if self._welcome:
                return
        reason = self._reason or f"its channels did not answer within {timeout:g} s"
        raise LaunchError(f"The kernel started, but {reason}. Call reset to start a fresh one.")

    def send(
        self, channel: Channel, kind: str, content: dict[str, Any], buffers: Sequence[bytes] = ()
    ) -> str:
        """Send a request and return its id.

        Raises LaunchError when the channel is gone or the kernel has stopped reading it.
        """
        msg_id, frames = self._wire.request(kind, content)
        line = self._lines.get(channel)
        if line is None:
            raise LaunchError(f"The kernel's {channel} channel is closed. Call reset.")
        try:
            line.send([*frames, *buffers])
        except OSError as error:
            raise LaunchError(
                f"The kernel's {channel} channel takes no requests: {error}. Call reset."
            ) from error
        return msg_id

    def taken(self, channel: Channel) -> bool:
        """Whether the kernel has read all requests that were sent on a channel."""
        line = self._lines.get(channel)
        return line is not None and line.taken

    async def drained(self, timeout: float) -> None:
        """Deliver what a dead kernel still sent, waiting at most `timeout` seconds for its end."""
        if "rest" in self._timers:
            self._timers.pop("rest").cancel()
            self._listen()
        self._debt = 0.0
        for channel in list(self._lines):
            self._read(channel, rest=False)
        with anyio.move_on_after(timeout):
            await self._ended.wait()

    def call_later(self, delay: float, callback: Callable[[], object]) -> None:
        """Run `callback` on the event loop after `delay` seconds."""
        self._loop.call_later(delay, callback)

    def close(self) -> None:
        """Close all connections; messages not yet delivered are dropped."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        for channel in list(self._lines):
            self._hang_up(channel)

    def _open(self, channel: Channel, kind: bytes, path: str) -> None:
        limit = MAX_MESSAGE_BYTES + OVERHEAD_BYTES
        try:
            line = Connection(path, kind, max_bytes=limit, loop=self._loop)
        except OSError as error:
            self._loop.call_soon(self._break, f"its {channel} channel cannot be opened: {error}")
            return
        self._lines[channel] = line
        self._loop.add_reader(line, self._read, channel)

    def _read(self, channel: Channel, *, rest: bool = True) -> None:
        """Take messages until there are none or the kernel's time is used up."""
        began = perf_counter()
        self._debt = max(0.0, self._debt - (began - self._settled) * SHARE)
        self._settled = began
        if not self._take(channel, began + BURST_S - self._debt if rest else began + 1.0):
            return
        self._settled = perf_counter()
        self._debt += self._settled - began
        if rest and self._debt > BURST_S:
            self._rest()

    def _take(self, channel: Channel, end: float) -> bool:
        """Whether the connection is still there."""
        line, more = self._lines.get(channel), True
        try:
            while line is not None:
                frames = line.message()
                if frames is not None:
                    self._deliver(channel, frames)
                    line = self._lines.get(channel)
                elif more:
                    more = line.read()
                else:
                    return True
                if perf_counter() > end:
                    return True
        except EOFError:
            self._on_end(channel)
        except ProtocolError as error:
            self._hang_up(channel)
            self._break(f"it sent {error} on its {channel} channel")
        return False

    def _rest(self) -> None:
        """Read nothing until the debt is paid."""
        for line in self._lines.values():
            self._loop.remove_reader(line)
        self._timers["rest"] = self._loop.call_later(self._debt / SHARE, self._resume)

    def _resume(self) -> None:
        self._timers.pop("rest", None)
        with Barrier("listening to a kernel again") as barrier:
            self._listen()
        if barrier.failure is not None:
            self._timers["rest"] = self._loop.call_later(AGAIN_S, self._resume)
            return
        for channel in list(self._lines):
            if "rest" not in self._timers:
                self._read(channel)

    def _listen(self) -> None:
        for channel, line in self._lines.items():
            self._loop.add_reader(line, self._read, channel)

    def _deliver(self, channel: Channel, frames: list[bytes]) -> None:
        self.received += 1
        with Barrier("taking a message of a kernel") as barrier:
            self._take_in(channel, frames)
        if barrier.failure is not None:
            with Barrier("telling that a message was lost"):
                reason = reason_of(barrier.failure)
                self._on_refused(f"the server could not take it in: {reason}")

    def _take_in(self, channel: Channel, frames: list[bytes]) -> None:
        try:
            message = self._wire.decode(frames)
            if message.kind == "iopub_welcome":
                self._welcome = True
                self._greeted.set()
            else:
                self._on_message(channel, message)
        except Overload as error:
            self._on_refused(str(error))
        except WireError:
            self.malformed += 1

    def _on_end(self, channel: Channel) -> None:
        self._hang_up(channel)
        if channel == "iopub":
            self._ended.set()
        if "end" not in self._timers and not self._closed:
            reason = f"it closed its {channel} channel"
            self._timers["end"] = self._loop.call_later(CLOSED_GRACE_S, self._break, reason)

    def _hang_up(self, channel: Channel) -> None:
        line = self._lines.pop(channel, None)
        if line is not None:
            if line.unread:
                self.unread.add(channel)
            self._loop.remove_reader(line)
            line.close()

    def _break(self, reason: str) -> None:
        if not self._closed:
            self._reason = self._reason or reason
            self._greeted.set()
            self._on_broken(reason)
