"""A ROUTER socket on an asyncio loop: what ipykernel calls a stream."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from typing import Any

import zmq
from tornado.platform.asyncio import BaseAsyncIOLoop

from kernel_specs.restricted.sockets import Router


class Channel:
    """Receives messages one at a time and sends replies, without tasks of its own."""

    def __init__(self, router: Router, io_loop: BaseAsyncIOLoop, *, collects: bool = False) -> None:
        """Watch a socket from the given loop; when it `collects`, replies wait for `push`."""
        self.io_loop = io_loop
        self._collects = collects
        self.held: deque[list[bytes]] = deque()
        self._router = router
        self._replies: list[list[Any]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._lock = threading.RLock()
        """A thread of user code may wait for input while the loop runs."""
        self._always_readable = -1
        io_loop.asyncio_loop.add_reader(router, self._on_event)

    def fileno(self) -> int:
        """Readable when a message may have arrived."""
        if not self.held:
            return self._router.fileno()
        if self._always_readable < 0:
            self._always_readable = os.eventfd(1)
        return self._always_readable

    def receive(self) -> list[bytes] | None:
        """The next message, or None when there is none; first what `hold` took."""
        with self._lock:
            return self.held.popleft() if self.held else self._router.receive()

    def hold(self) -> None:
        """Take in all messages that have arrived by now."""
        while (message := self._router.receive()) is not None:
            self.held.append(message)

    async def readable(self) -> None:
        """Return when a message may have arrived, after `receive` found none."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[bytes]:
        """The next message, as ipykernel asks for input. Raises zmq.Again when there is none."""
        message = self.receive()
        if message is None:
            raise zmq.Again
        return message

    def send_multipart(
        self, parts: list[Any], flags: int = 0, copy: bool = True, track: bool = False
    ) -> None:
        """Send one reply."""
        self._replies.append(parts)
        if not self._collects:
            self.push()

    def push(self) -> None:
        """Send the replies that were collected."""
        while self._replies:
            self._router.send(self._replies[0])
            del self._replies[0]

    def flush(self, *_: Any) -> None:
        """Do nothing; ipykernel asks for it after each reply."""

    def _on_event(self) -> None:
        with contextlib.suppress(MemoryError), self._lock:  # whoever waits will see to it
            message = self._router.receive()
            if message is None:
                return
            self.held.append(message)
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            if not waiter.done():
                waiter.set_result(None)
