"""A kernel's channels on the event loop: no thread, no polling, no reconnect.

A kernel that floods the server may use `BURST_S` of the loop's time at once. Then its messages are
not read for a while, so that its sockets fill up and block it. All flooding kernels together get
`SHARE` of the loop's time. Only processor time counts, not the time that the server waits for a
processor.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter, thread_time
from typing import Any, Literal, TypeAlias

import anyio

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.message_codec import (
    MAX_MESSAGE_BYTES,
    Message,
    MessageCodec,
    Overload,
    WireError,
)
from kernel_mcp.kernels.zmtp_client import ZmtpClient
from kernel_mcp.launch.base import ConnectionInfo
from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB, MIB
from kernel_specs.restricted.wire.zmtp import ProtocolError

Channel: TypeAlias = Literal["shell", "iopub", "control", "stdin"]

BURST_S = 0.003
"""Processor seconds for which a kernel's messages are read at once."""
SHARE = 1 / 3
"""Fraction of the event loop's time that all flooding kernels together get."""
LONGEST_READ_S = 1.0
"""Processor seconds for one read of each channel of a dead kernel."""
MOST_AHEAD_BYTES = 32 * MIB
"""Maximum bytes of a resting kernel's output that are received before they are decoded."""
AGAIN_S = 0.1
"""Seconds until the next attempt when the event loop refuses a reader."""
CLOSED_GRACE_S = 0.5
"""Seconds to wait for the exit of a kernel that closed a channel: its status is a better reason."""
OVERHEAD_BYTES = 64 * KIB
"""Maximum bytes of a message's frames besides its content."""


class Floods:
    """The flooding kernels of a server, which are not read for now."""

    def __init__(self) -> None:
        self._resting: set[object] = set()

    def add(self, one: object) -> None:
        """Add a kernel that is not read for now."""
        self._resting.add(one)

    def discard(self, one: object) -> None:
        """Remove a kernel that is read again or has ended."""
        self._resting.discard(one)

    def pays(self, one: object) -> float:
        """Return the fraction of elapsed time by which the debt of kernel `one` decreases.

        All flooding kernels together then get `SHARE` of the time.
        """
        return 1 / (len(self._resting | {one}) / SHARE - 1)


@dataclass(frozen=True, slots=True)
class ChannelListener:
    """Callbacks for the messages of a kernel.

    message  is called with each valid message, in order per channel
    refused  is called with the reason, for each message that was dropped to protect the server
    broken   is called with the reason, when the connection is lost
    """

    message: Callable[[Channel, Message], None]
    refused: Callable[[str], None]
    broken: Callable[[str], None]


class KernelChannels(ABC):
    """The shell, iopub and control channels of one kernel, however it is reached."""

    def __init__(self, wire: MessageCodec, listener: ChannelListener) -> None:
        self.wire = wire
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self.greeted = anyio.Event()
        """Set once the kernel has answered the subscription, or its connection is lost."""
        self._welcome = False
        self._reason = ""
        self._closed = False
        self.received = self.rests = 0
        """Number of messages so far, and of pauses in reading in favour of other kernels."""
        self.unread: set[Channel] = set()
        """Channels that the kernel closed with requests unread."""

    async def ready(self, timeout: float) -> None:
        """Wait until the kernel confirms the subscription, after which no output is lost.

        `timeout` is in seconds. Raises LaunchError.
        """
        with anyio.move_on_after(timeout):
            await self.greeted.wait()
        if self._welcome:
            return
        reason = self._reason or f"its channels did not answer within {timeout:g} s"
        raise LaunchError(f"The kernel started, but {reason}. Call reset to start a fresh one.")

    @abstractmethod
    def send(
        self,
        channel: Channel,
        kind: str,
        content: dict[str, Any],
        buffers: Sequence[bytes] = (),
        given: int | None = None,
    ) -> str:
        """Send a request, with the descriptor `given` if there is one, and return its id.

        Raises LaunchError if disconnected, or if too many requests are unread.
        """

    def interrupt(self) -> None:
        """Ask the kernel to interrupt its cell, by a message."""
        with suppress(LaunchError):  # the end of the kernel is noticed elsewhere
            self.send("control", "interrupt_request", {})

    @abstractmethod
    def taken(self, channel: Channel) -> bool:
        """Return True if the kernel has read all requests of a channel."""

    @property
    def resting(self) -> bool:
        """True while reading pauses in favour of other kernels: messages may be unread."""
        return False

    @abstractmethod
    async def drained(self, timeout: float) -> None:
        """Deliver the remaining messages of a dead kernel, for at most `timeout` seconds."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections; undelivered messages are dropped."""

    def call_later(self, delay: float, callback: Callable[[], object]) -> None:
        """Call `callback` after `delay` seconds, on the event loop."""
        self._loop.call_later(delay, callback)

    def _deliver(self, channel: Channel, frames: Sequence[bytes]) -> None:
        self.received += 1
        with Barrier("taking a message of a kernel") as barrier:
            self._take_in(channel, frames)
        if barrier.failure is not None:
            with Barrier("telling that a message was lost"):
                reason = reason_of(barrier.failure)
                self._listener.refused(f"the server could not take it in: {reason}")

    def _leave_out(self, size: int) -> None:
        self.received += 1
        with Barrier("telling that a message was lost"):
            self._listener.refused(f"an output of {size / 1e6:.1f} MB; write it to a file")

    def _take_in(self, channel: Channel, frames: Sequence[bytes]) -> None:
        try:
            message = self.wire.decode(frames)
            if message.kind == "iopub_welcome":
                self._welcome = True
                self.greeted.set()
            else:
                self._listener.message(channel, message)
        except Overload as error:
            self._listener.refused(str(error))
        except WireError:
            pass  # malformed messages are dropped

    def _break(self, reason: str) -> None:
        if not self._closed:
            self._reason = self._reason or reason
            self.greeted.set()
            self._listener.broken(reason)


class Channels(KernelChannels):
    """The channels of a kernel to whose sockets this process connects."""

    def __init__(
        self,
        connection: ConnectionInfo,
        listener: ChannelListener,
        *,
        ends: Sequence[socket.socket] = (),
        opened: bool = False,
        floods: Floods | None = None,
        wire: MessageCodec | None = None,
        reads_ahead: bool = False,
    ) -> None:
        """`ends` are connected sockets for shell, control, iopub and perhaps stdin; empty to
        connect by path, without stdin.

        If they are `opened`, the greeting and subscription were sent over them before. `floods` is
        shared by all kernels of the event loop. With `reads_ahead`, output is received during rests
        too: for kernels on a PUB socket, which drop what is not read in time. An output that is too
        large is then left out, and does not end the connection.
        """
        super().__init__(wire or MessageCodec(connection.key), listener)
        self._floods = floods or Floods()
        self._reads_ahead = reads_ahead
        self._ended = anyio.Event()
        self._lines: dict[Channel, ZmtpClient] = {}
        self._debt = 0.0
        self._settled = perf_counter()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        ports = (connection.shell_port, connection.control_port, connection.iopub_port)
        shell, control, iopub, *stdin = ends or map(connection.path, ports)
        # a kernel asks on stdin the client that has the identity of the cell's request
        self._identity = self.wire.name if stdin else b""
        self._open("shell", b"DEALER", shell, opened=opened)
        for end in stdin:
            self._open("stdin", b"DEALER", end, opened=opened)
        self._open("control", b"DEALER", control, opened=opened)
        self._open("iopub", b"SUB", iopub, opened=opened)

    def send(
        self,
        channel: Channel,
        kind: str,
        content: dict[str, Any],
        buffers: Sequence[bytes] = (),
        given: int | None = None,
    ) -> str:
        """See `KernelChannels`."""
        msg_id, frames = self.wire.request(kind, content)
        line = self._lines.get(channel)
        if line is None:
            raise LaunchError(f"The kernel's {channel} channel is closed. Call reset.")
        try:
            line.send([*frames, *buffers], given)
        except OSError as error:
            raise LaunchError(
                f"The kernel's {channel} channel takes no requests: {error}. Call reset."
            ) from error
        return msg_id

    def taken(self, channel: Channel) -> bool:
        """See `KernelChannels`."""
        line = self._lines.get(channel)
        return line is not None and line.taken

    @property
    def resting(self) -> bool:
        """See `KernelChannels`."""
        return "rest" in self._timers

    async def drained(self, timeout: float) -> None:
        """See `KernelChannels`.

        Everything that the kernel has sent can be read at once. Only if that takes longer than
        `LONGEST_READ_S`, wait for the end of iopub. Do not wait for children that still have the
        sockets.
        """
        if self.resting:
            self._timers.pop("rest").cancel()
            self._floods.discard(self)
            self._listen()
        self._debt = 0.0
        began = thread_time()
        for channel in list(self._lines):
            self._read(channel, rest=False)
        if thread_time() - began > LONGEST_READ_S:
            with anyio.move_on_after(timeout):
                await self._ended.wait()

    def close(self) -> None:
        """See `KernelChannels`."""
        self._closed = True
        self._floods.discard(self)
        for timer in self._timers.values():
            timer.cancel()
        for channel in list(self._lines):
            self._hang_up(channel)

    def _open(
        self, channel: Channel, kind: bytes, place: str | socket.socket, *, opened: bool
    ) -> None:
        limit = MAX_MESSAGE_BYTES + OVERHEAD_BYTES
        try:
            line = ZmtpClient(
                place,
                kind,
                max_bytes=limit,
                loop=self._loop,
                opened=opened,
                leaves_out=self._reads_ahead and channel == "iopub",
                identity=self._identity if channel in ("shell", "stdin") else b"",
            )
        except OSError as error:
            self._loop.call_soon(self._break, f"its {channel} channel cannot be opened: {error}")
            return
        self._lines[channel] = line
        self._loop.add_reader(line, self._read, channel)

    def _read(self, channel: Channel, *, rest: bool = True) -> None:
        """Deliver messages until there are none or the kernel's time is used up.

        Without `rest` the time is `LONGEST_READ_S`, and no pause follows.
        """
        now, began = perf_counter(), thread_time()
        self._debt = max(0.0, self._debt - (now - self._settled) * self._floods.pays(self))
        self._settled = now
        longest = BURST_S - self._debt if rest else LONGEST_READ_S
        if not self._take(channel, began + longest):
            return
        self._settled = perf_counter()
        self._debt += thread_time() - began
        if rest and self._debt > BURST_S:
            self._rest()

    def _take(self, channel: Channel, end: float) -> bool:
        line, more = self._lines.get(channel), True
        try:
            while line is not None:
                frames = line.message()
                if frames is not None and line.left_out:
                    self._leave_out(line.left_out)
                elif frames is not None:
                    self._deliver(channel, frames)
                    line = self._lines.get(channel)
                elif more:
                    more = line.read()
                else:
                    return True
                if thread_time() > end:
                    return True
        except EOFError:
            self._on_end(channel)
        except ProtocolError as error:
            self._hang_up(channel)
            self._break(f"it sent {error} on its {channel} channel")
        return False

    def _rest(self) -> None:
        for line in self._lines.values():
            self._loop.remove_reader(line)
        if self._reads_ahead and (output := self._lines.get("iopub")) is not None:
            self._loop.add_reader(output, self._read_ahead, output)
        self.rests += 1
        self._floods.add(self)
        pause = self._debt / self._floods.pays(self)
        self._timers["rest"] = self._loop.call_later(pause, self._resume)

    def _read_ahead(self, output: ZmtpClient) -> None:
        with suppress(EOFError):  # raised again by the next read
            output.read()
            if output.waiting < MOST_AHEAD_BYTES:
                return
        self._loop.remove_reader(output)

    def _resume(self) -> None:
        self._timers.pop("rest", None)
        self._floods.discard(self)
        with Barrier("listening to a kernel again") as barrier:
            self._listen()
        if barrier.failure is not None:
            self._timers["rest"] = self._loop.call_later(AGAIN_S, self._resume)
            return
        for channel in list(self._lines):
            if not self.resting:
                self._read(channel)

    def _listen(self) -> None:
        for channel, line in self._lines.items():
            self._loop.add_reader(line, self._read, channel)

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
