"""A ROUTER socket on an asyncio loop: what ipykernel calls a stream."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import zmq
from tornado.platform.asyncio import BaseAsyncIOLoop


class Channel:
    """Receives messages one at a time and sends replies, without queues or tasks of its own."""

    def __init__(self, socket: Any, io_loop: BaseAsyncIOLoop) -> None:
        """Watch a bound socket from the given loop."""
        self.socket = socket
        self.io_loop = io_loop
        self.held: deque[list[bytes]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        io_loop.asyncio_loop.add_reader(socket.getsockopt(zmq.FD), self._on_event)

    def receive(self) -> list[bytes] | None:
        """The next message, or None when there is none; first what `hold` took."""
        if self.held:
            return self.held.popleft()
        return self._next()

    def hold(self) -> None:
        """Take in all messages that have arrived by now."""
        while (message := self._next()) is not None:
            self.held.append(message)

    async def readable(self) -> None:
        """Return when a message may have arrived, after `receive` found none."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def send_multipart(
        self, parts: list[Any], flags: int = 0, copy: bool = True, track: bool = False
    ) -> None:
        """Send one reply."""
        self.socket.send_multipart(parts, flags, copy)

    def flush(self, *_: Any) -> None:
        """Nothing is ever held back; ipykernel asks for it after each reply."""

    def close(self) -> None:
        """Stop watching and close the socket."""
        self.io_loop.asyncio_loop.remove_reader(self.socket.getsockopt(zmq.FD))
        self.socket.close()

    def _on_event(self) -> None:
        # Reading EVENTS also settles the file descriptor, which else stays readable.
        if self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN and self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            if not waiter.done():
                waiter.set_result(None)

    def _next(self) -> list[bytes] | None:
        try:
            frames: list[bytes] = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return frames
