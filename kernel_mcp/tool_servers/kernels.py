"""The gateway's connections to one kernel, whose code is hostile.

The kernel listens and the gateway connects. One connection that has carried no request is always
ready in the kernel's backlog. A connection that the kernel closes cancels its call.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from kernel_mcp.barriers import Barrier
from kernel_mcp.tool_servers.frames import (
    MOST_VALUES,
    Frame,
    FrameError,
    TooManyValues,
    read_frame,
)
from kernel_mcp.tool_servers.policy import CALLS
from kernel_mcp.units import MIB

CONNECTIONS = 8
IN_FLIGHT_BYTES = 64 * MIB
"""Bytes of results of one kernel that it has not read yet."""
CANCEL_S = 2.0
"""Seconds for which a connection waits that its server is notified of a cancelled call."""
_BUFFER_BYTES = MIB
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.01, 1.0

Send: TypeAlias = Callable[[Frame], Awaitable[None]]
Handler: TypeAlias = "Callable[[KernelLink, Mapping[str, Any], Send], Awaitable[None]]"


class KernelLink:
    """One kernel: its socket, and what its session may use.

    servers     names of the servers that it may use
    always      tools that a person has allowed for its session
    calls_left  number of calls that the current cell may still make
    """

    def __init__(
        self,
        number: int,
        path: str,
        principal: str,
        servers: frozenset[str],
        always: set[str],
        handler: Handler,
    ) -> None:
        """`handler` answers one request, by sending frames."""
        self.number, self.principal = number, principal
        self.servers, self.always = servers, always
        self.calls_left = CALLS
        self.in_flight = 0
        self._path = path
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()
        self._fresh: asyncio.Task[None] | None = None
        """The task of the connection that has carried no request."""
        self._pause_s = 0.0
        self._closed = self._gone = False

    def dial_again(self) -> None:
        """Connect, as the kernel has asked for it."""
        self._gone, self._pause_s = False, 0.0
        self.dial()

    def dial(self) -> None:
        """Connect, unless a connection is ready, or too many are in use."""
        unwanted = self._closed or self._gone or self._fresh is not None
        if unwanted or len(self._tasks) >= CONNECTIONS:
            return
        self._fresh = asyncio.get_running_loop().create_task(self._serve())
        self._tasks.add(self._fresh)
        self._fresh.add_done_callback(self._ended)

    def cut(self) -> None:
        """Close the connections that carry a request, and cancel their calls."""
        for task in self._tasks - {self._fresh}:
            task.cancel()

    async def aclose(self) -> None:
        """Close all connections, and cancel their calls."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._fresh is task:
            self._fresh = None
        self.dial()

    async def _serve(self) -> None:
        with Barrier("serving a connection of a kernel"):
            await asyncio.sleep(self._pause_s)
            try:
                reader, writer = await self._connect()
            except OSError:  # it listens no more: it will say so when it listens again
                self._gone = True
                return
            try:
                await self._answer_all(reader, writer)
            except TooManyValues as reason:
                error = {"kind": "tool", "text": f"{reason}; send fewer at once"}
                writer.write(Frame({"error": error}).encoded()[0])
            except (FrameError, OSError):
                pass  # the kernel finds its connection closed
            finally:
                writer.transport.abort() if self._closed else writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the kernel's socket, never through a link. Raises OSError."""
        place = os.open(self._path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not stat.S_ISSOCK(os.fstat(place).st_mode):
                raise OSError("it is no socket")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.setblocking(False)
                sock.connect(f"/proc/self/fd/{place}")
                opened = sock.dup()
        finally:
            os.close(place)
        streams = await asyncio.open_unix_connection(sock=opened, limit=_BUFFER_BYTES)
        streams[1].transport.set_write_buffer_limits(high=0)
        return streams

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frame = await read_frame(reader, blob_bytes=0, most_values=MOST_VALUES)
        if frame is None:  # closed without a request
            self._pause_s = min(max(2 * self._pause_s, _LEAST_PAUSE_S), _MOST_PAUSE_S)
            return
        self._pause_s, self._fresh = 0.0, None
        self.dial()
        while frame is not None:
            first = await self._answer(frame, reader, writer)
            frame = await read_frame(reader, first, 0, most_values=MOST_VALUES)

    async def _answer(
        self, frame: Frame, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        """Answer a request, and return the first byte of the next one if it has come.

        Raises FrameError if the kernel closes the connection or sends another request before.
        """

        async def send(answer: Frame) -> None:
            parts = answer.encoded()
            size = sum(map(len, parts))
            if self.in_flight + size > IN_FLIGHT_BYTES and self.in_flight:
                raise FrameError("results are not read")
            self.in_flight += size
            try:
                for each in parts:  # `writelines` of Python 3.12 makes no `drain` wait
                    writer.write(each)
                await writer.drain()
            finally:
                self.in_flight -= size

        work = asyncio.ensure_future(self._handler(self, frame.header, send))
        watch = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise FrameError("a connection ended before its answer")
            work.result()
        finally:
            work.cancel()
            watch.cancel()
            await _ended(work, watch)
        if watch.cancelled():
            return b""
        with suppress(OSError):
            if first := watch.result():
                return first
        raise FrameError("a connection ended")


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    """Wait until cancelled tasks have ended: a further cancel must not cut what they send last."""
    waiting = asyncio.ensure_future(asyncio.wait(tasks, timeout=CANCEL_S))
    cancels = 0
    while not waiting.done():
        cancels += 1
        with suppress(asyncio.CancelledError):
            await asyncio.shield(waiting)
            cancels -= 1
    for each in tasks:
        if each.done() and not each.cancelled():
            each.exception()
    if cancels:
        raise asyncio.CancelledError
