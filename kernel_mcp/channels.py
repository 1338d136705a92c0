"""A kernel's ZMQ channels on the event loop: no polling, no thread, no reconnect.

One callback per socket drains what has arrived. A kernel that floods gets at most `SLICE_S` of
the loop at a time and then a pause, so that other sessions keep their turn; ZMQ's own high-water
marks push back on the kernel meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Literal, TypeAlias, cast

import anyio
import zmq
from zmq.utils.monitor import recv_monitor_message

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.base import ConnectionInfo
from kernel_mcp.wire import MAX_MESSAGE_BYTES, Message, Wire, WireError

Channel: TypeAlias = Literal["shell", "iopub", "control"]

SLICE_S = 0.005
PAUSE_S = 0.005
QUEUED_MESSAGES = 64
"""High-water mark in messages per socket; with 64 KiB stream messages some 4 MiB."""


class Channels:
    """The shell, iopub and control sockets of one kernel.

    `on_message(channel, message)` is called for every valid message, in order per channel;
    `on_broken(reason)` once when the kernel's end of a channel goes away.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        connection: ConnectionInfo,
        *,
        on_message: Callable[[Channel, Message], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._wire = Wire(connection.key)
        self._on_message = on_message
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._welcome = anyio.Event()
        self._broken = anyio.Event()
        self._closed = False
        self._sockets: dict[Channel, zmq.Socket[bytes]] = {}
        self._monitors: list[zmq.Socket[bytes]] = []
        self._paused: dict[Channel, asyncio.TimerHandle] = {}
        self.malformed = 0
        self._open("shell", context.socket(zmq.DEALER), connection.url(connection.shell_port))
        self._open("control", context.socket(zmq.DEALER), connection.url(connection.control_port))
        self._open("iopub", context.socket(zmq.SUB), connection.url(connection.iopub_port))

    def _open(self, channel: Channel, socket: zmq.Socket[bytes], url: str) -> None:
        socket.linger = 0
        socket.set(zmq.RECONNECT_IVL, -1)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RCVHWM, QUEUED_MESSAGES)
        if channel == "iopub":
            socket.set(zmq.SUBSCRIBE, b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._monitors.append(monitor)
        self._loop.add_reader(_fd(monitor), self._on_monitor, channel, monitor)
        socket.connect(url)
        self._sockets[channel] = socket
        self._loop.add_reader(_fd(socket), self._drain, channel)
        self._loop.call_soon(self._drain, channel)

    async def ready(self, timeout: float) -> None:
        """Wait until output of the kernel is sure to arrive here.

        Raises LaunchError after `timeout` seconds.
        """
        with anyio.move_on_after(timeout):
            await self._welcome.wait()
            return
        raise LaunchError(
            f"The kernel started but its channels did not answer within {timeout:g} s. "
            "Call reset to start a fresh one."
        )

    def send(
        self, channel: Channel, kind: str, content: dict[str, Any], buffers: Sequence[bytes] = ()
    ) -> str:
        """Send a request and return its id.

        Raises LaunchError when the channel is gone or the kernel has stopped reading it.
        """
        msg_id, frames = self._wire.request(kind, content)
        socket = self._sockets[channel]
        try:
            socket.send_multipart([*frames, *buffers], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise LaunchError(
                f"The kernel's {channel} channel takes no requests: {error}. Call reset."
            ) from error
        if _has_input(socket):
            self._loop.call_soon(self._drain, channel)
        return msg_id

    async def drained(self, timeout: float) -> None:
        """Deliver what a dead kernel still sent, waiting at most `timeout` seconds for its end."""
        with anyio.move_on_after(timeout):
            await self._broken.wait()
        if not self._closed:
            for channel in self._sockets:
                self._drain(channel, whole=True)

    def call_later(self, delay: float, callback: Callable[[], object]) -> None:
        """Run `callback` on the event loop after `delay` seconds."""
        self._loop.call_later(delay, callback)

    def close(self) -> None:
        """Close all sockets; messages not yet delivered are dropped."""
        if self._closed:
            return
        self._closed = True
        for timer in self._paused.values():
            timer.cancel()
        for socket in (*self._sockets.values(), *self._monitors):
            self._loop.remove_reader(_fd(socket))
        for channel_socket in self._sockets.values():
            channel_socket.disable_monitor()
        for socket in (*self._sockets.values(), *self._monitors):
            socket.close(linger=0)

    def _drain(self, channel: Channel, whole: bool = False) -> None:
        if self._closed or (channel in self._paused and not whole):
            return
        socket = self._sockets[channel]
        end = perf_counter() + SLICE_S
        while _has_input(socket):
            self._deliver(channel, socket.recv_multipart(zmq.NOBLOCK))
            if self._closed:
                return
            if perf_counter() > end and not whole:
                self._loop.remove_reader(_fd(socket))
                self._paused[channel] = self._loop.call_later(PAUSE_S, self._resume, channel)
                return

    def _resume(self, channel: Channel) -> None:
        del self._paused[channel]
        self._loop.add_reader(_fd(self._sockets[channel]), self._drain, channel)
        self._drain(channel)

    def _deliver(self, channel: Channel, frames: list[bytes]) -> None:
        try:
            message = self._wire.decode(frames)
            if message.kind == "iopub_welcome":
                self._welcome.set()
            else:
                self._on_message(channel, message)
        except WireError:
            self.malformed += 1

    def _on_monitor(self, channel: Channel, monitor: zmq.Socket[bytes]) -> None:
        while not self._closed and _has_input(monitor):
            with contextlib.suppress(zmq.Again):
                recv_monitor_message(monitor, zmq.NOBLOCK)
                if channel == "iopub":
                    self._broken.set()
                self._on_broken(f"the kernel's {channel} channel was closed")


def _fd(socket: zmq.Socket[bytes]) -> int:
    """The descriptor that wakes when the socket's state changes."""
    return cast(int, socket.get(zmq.FD))


def _has_input(socket: zmq.Socket[bytes]) -> bool:
    return bool(cast(int, socket.get(zmq.EVENTS)) & zmq.POLLIN)
