"""The iopub socket of an endpoint: messages are published in order, and collected for some ms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from kernel_mcp.barriers import Barrier
from kernel_mcp.endpoints.messages import Messages
from kernel_mcp.units import KIB

LATE_S = 0.005
"""Seconds that a message may wait for others: sending them together takes less time of the loop."""
MOST_TEXT = 64 * KIB
"""Characters of a message after which further text begins a new one."""
MOST_QUEUED = 10_000
"""Most messages that wait for a client which does not read; it misses later ones."""


class IOPub:
    """The publishing socket of an endpoint. Its methods do not block."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        messages: Messages,
        handle: str,
        on_subscription: Callable[[], None],
    ) -> None:
        """`on_subscription` is called when a client has subscribed. Raises ZMQError."""
        self._messages = messages
        self._handle = handle
        self._on_subscription = on_subscription
        self._waiting: list[tuple[str, dict[str, Any], Mapping[str, Any], Mapping[str, Any]]] = []
        self._topics: set[bytes] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.sndhwm = MOST_QUEUED
        self._socket.bind(address)
        self._reader = self._socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._reader, self._listen)

    def add(
        self,
        kind: str,
        content: dict[str, Any],
        parent: Mapping[str, Any],
        metadata: Mapping[str, Any],
    ) -> None:
        """Publish a message within `LATE_S` seconds; consecutive texts of a stream become one.

        Does nothing while no client has subscribed.
        """
        if not self._topics:
            return
        if kind == "stream" and self._waiting:
            before, said, of, _ = self._waiting[-1]
            if (
                before == kind
                and of is parent
                and said["name"] == content["name"]
                and len(said["text"]) < MOST_TEXT
            ):
                said["text"] += content["text"]
                return
        self._waiting.append((kind, content, parent, metadata))
        if self._timer is None:
            self._timer = self._loop.call_later(LATE_S, self.flush)

    def flush(self) -> None:
        """Publish all waiting messages now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for kind, content, parent, metadata in waiting:
            with self._barrier():
                topic = f"kernel.{self._handle}.{kind}".encode()
                self._send(kind, content, parent, metadata, topic)
        self._listen()

    def close(self, linger_ms: int) -> None:
        """Publish waiting messages and close; they have `linger_ms` milliseconds to be sent."""
        self.flush()
        if self._timer is not None:  # `flush` has published the state for a new subscriber
            self._timer.cancel()
        self._loop.remove_reader(self._reader)
        self._socket.close(linger=linger_ms)

    def _send(
        self,
        kind: str,
        content: dict[str, Any],
        parent: Mapping[str, Any],
        metadata: Mapping[str, Any],
        topic: bytes,
    ) -> None:
        frames = self._messages.write(kind, content, parent, [topic], metadata)
        self._socket.send_multipart(frames, flags=zmq.NOBLOCK)

    def _listen(self) -> None:
        """Read all subscriptions, and welcome new ones: the descriptor signals only once."""
        with self._barrier():
            while (topic := self._subscription()) is not None:
                if topic[:1] == b"\x00":
                    self._topics.discard(topic[1:])  # the last of its listeners has gone
                elif topic[:1] == b"\x01":
                    self._topics.add(topic[1:])
                    said = {"subscription": str(topic[1:], "utf-8", "replace")}
                    self._send("iopub_welcome", said, {}, {}, topic[1:])
                    self._on_subscription()

    def _subscription(self) -> bytes | None:
        try:
            return self._socket.recv(flags=zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _barrier(self) -> Barrier:
        return Barrier("publishing what a session puts out", self._handle)
