"""ROUTER and XPUB sockets of a kernel, without a thread of their own."""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernel_specs.restricted.peers import Listener, Peer
from kernel_specs.restricted.zmtp import encode

BACKLOG = 64
LINGER_SECONDS = 1.0
"""How long the end of a kernel waits for a reader to take what is left."""
STALL_SECONDS = 30.0
"""A reader that takes nothing for this long is gone."""
BEHIND_SECONDS = 0.5
"""How long one reader may hold up another: a cell is interrupted within seconds, or killed."""


class Router:
    """A ROUTER socket: takes requests of any client and answers each."""

    def __init__(self, listening: socket.socket) -> None:
        """Take over a socket that listens."""
        self._listener = Listener(b"ROUTER", listening, self._introduce)
        self._named: dict[bytes, Peer] = {}
        self._unnamed = 0

    def fileno(self) -> int:
        """Readable when a message may have come."""
        return self._listener.fileno()

    def receive(self) -> list[bytes] | None:
        """The next message, the name of its sender first, or None; never waits."""
        found = self._listener.receive()
        if found is None:
            return None
        peer, message = found
        return [peer.name, *message]

    def send(self, frames: list[Any]) -> None:
        """Send to the client that the first frame names, if it is there; wait while it is slow."""
        peer = self._named.get(frames[0])
        if peer is None or peer.fileno() < 0 or peer.write(encode(frames[1:])):
            return
        if not peer.drained(STALL_SECONDS):
            self._listener.drop(peer)

    def close(self) -> None:
        """Close all connections."""
        self._listener.close()

    def _introduce(self, peer: Peer) -> None:
        """Give a new client its name; one that connects again keeps it."""
        if peer.name:
            return
        self._unnamed += 1
        peer.name = peer.identity or b"\0" + self._unnamed.to_bytes(4, "big")
        if (before := self._named.get(peer.name)) is not None:
            self._listener.drop(before)
        self._named = {name: each for name, each in self._named.items() if each.fileno() >= 0}
        self._named[peer.name] = peer


class Publisher:
    """An XPUB socket that drops nothing: a reader that has fallen behind makes it full."""

    def __init__(self, listening: socket.socket, high_water: int) -> None:
        """Take over a socket that listens; it is full at `high_water` bytes for one reader."""
        self._listener = Listener(b"XPUB", listening)
        self._high_water = high_water
        self._behind: dict[Peer, float] = {}
        """Since when readers have held up others."""

    def fileno(self) -> int:
        """Readable when `subscribed` or `flush` has something to do."""
        return self._listener.fileno()

    @property
    def waiting(self) -> int:
        """Bytes that readers have not taken yet."""
        return sum(peer.waiting for peer in self._readers())

    @property
    def full(self) -> bool:
        """Whether a reader has fallen so far behind that nothing more should be sent."""
        return any(peer.waiting >= self._high_water for peer in self._readers())

    def put(self, frames: list[Any]) -> None:
        """Have a message sent by the next `flush` to who has subscribed to its topic."""
        data = encode(frames)
        for peer in self._readers():
            if any(frames[0].startswith(topic) for topic in peer.subscriptions):
                peer.keep(data)

    def flush(self) -> None:
        """Send as much as goes at once."""
        for peer in self._readers():
            self._listener.flush(peer)

    def shed(self) -> None:
        """Hang up on readers that have held up another one for too long; they may come again."""
        readers = self._readers()
        held_up = any(not peer.waiting for peer in readers)
        since = {
            peer: self._behind.get(peer, time.monotonic())
            for peer in readers
            if held_up and peer.waiting >= self._high_water // (2 if peer in self._behind else 1)
        }
        self._behind = since
        for peer, began in since.items():
            if time.monotonic() - began > BEHIND_SECONDS:
                self._listener.drop(peer)

    def subscribed(self) -> list[bytes]:
        """The topics that have been subscribed to since the last call."""
        topics = []
        while (found := self._listener.receive()) is not None:
            peer, message = found
            word, topic = message[0][:1], message[0][1:]
            if word == b"\x01":
                peer.subscriptions.add(topic)
                topics.append(topic)
            elif word == b"\x00":
                peer.subscriptions.discard(topic)
        return topics

    def wait(self, seconds: float) -> None:
        """Return when a reader takes something again, at the latest after so long."""
        poller = select.poll()
        for peer in self._readers():
            if peer.waiting:
                with suppress(ValueError):  # it has just been hung up on
                    poller.register(peer, select.POLLOUT)
        poller.poll(seconds * 1000)

    def close(self) -> None:
        """Send what is left, as long as it is taken, and close all connections."""
        for peer in self._readers():
            peer.drained(LINGER_SECONDS)
        self._listener.close()

    def _readers(self) -> list[Peer]:
        return list(self._listener.peers.values())  # another thread may be greeting one


def listen(transport: str, ip: str, port: int) -> tuple[socket.socket, int]:
    """A socket that listens where a connection file says, and its port; 0 stands for a free one.

    Raises OSError.
    """
    if transport == "ipc":
        return _listen_at_path(ip, port)
    ip = "" if ip == "*" else ip
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    listening = socket.create_server((ip, port), family=family, backlog=BACKLOG)
    return listening, int(listening.getsockname()[1])


def _listen_at_path(prefix: str, port: int) -> tuple[socket.socket, int]:
    if port:
        Path(f"{prefix}-{port}").unlink(missing_ok=True)  # of the kernel before a restart
    else:
        port = 1
        while Path(f"{prefix}-{port}").exists():
            port += 1
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(f"{prefix}-{port}")
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening, port
