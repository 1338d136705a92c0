"""ROUTER and XPUB sockets of a kernel and their peers, without a thread of their own."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernel_specs.restricted.wire.zmtp import GREETING, Decoder, ProtocolError, encode, ready

READ_BYTES = 64 * 1024
_FD = struct.Struct("i")
_ONE_FD = socket.CMSG_SPACE(_FD.size)
MAX_REQUEST_BYTES = 1 << 30
"""Upper bound that detects a broken length; no defence, as every client may run code."""


class ZmtpPeer:
    """One client, with data received from it, and data to be sent to it.

    For one thread at a time. A MemoryError loses nothing: the same call can be made again.
    """

    def __init__(
        self,
        connection: socket.socket,
        socket_type: bytes,
        given: list[int] | None = None,
    ) -> None:
        """`given` gets the last descriptor that was received; without it none is received."""
        connection.setblocking(False)
        self._given = given
        self.name = b""
        """The name of this peer in messages, set by a RouterSocket after the handshake."""
        self.slow = False
        """True if its ZmtpListener polls until the connection accepts more."""
        self.subscriptions: set[bytes] = set()
        self._socket = connection
        self._decoder = Decoder(MAX_REQUEST_BYTES, answers_pings=True)
        self._came = b""
        self._out = bytearray()
        self._sent: list[int] = []
        """Number of bytes of `_out` that were sent and not removed yet."""
        self.write(GREETING + ready(socket_type))

    @property
    def waiting(self) -> int:
        """Number of bytes that are not sent yet."""
        return len(self._out)

    @property
    def ready(self) -> bool:
        """Return True if the peer has completed the handshake."""
        return self._decoder.ready

    @property
    def identity(self) -> bytes:
        """Identity of its READY command; empty if it has none."""
        return self._decoder.identity

    def fileno(self) -> int:
        """Return the file descriptor of the connection; -1 if it is closed."""
        return self._socket.fileno()

    def read(self) -> bool:
        """Read and decode some received data; return False once the peer has closed."""
        try:
            if not self._came:
                self._came = self._receive()
                if not self._came:
                    return False
            self._decoder.feed(self._came)
            self._came = b""
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _receive(self) -> bytes:
        if self._given is None:
            return self._socket.recv(READ_BYTES)
        data, came, _, _ = self._socket.recvmsg(READ_BYTES, _ONE_FD, socket.MSG_CMSG_CLOEXEC)
        for level, kind, fds in came:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                while self._given:
                    os.close(self._given.pop())
                self._given += _FD.unpack(fds)
        return data

    def message(self) -> list[bytes] | None:
        """Return the next whole message that was read, or None. Raises ProtocolError."""
        found = self._decoder.message()
        if self._decoder.pongs:
            pongs, self._decoder.pongs = self._decoder.pongs, b""
            self.write(pongs)
        return found

    def write(self, data: bytes) -> bool:
        """Send as much as goes at once and keep the rest; return True if all was sent."""
        self.keep(data)
        return self.flush()

    def keep(self, data: bytes) -> None:
        """Append data for the next `flush` to send."""
        self._out += data

    def flush(self) -> bool:
        """Send as much of the waiting data as goes at once; return True if all was sent."""
        self._settle()
        if self._out:
            try:  # in one call: a signal handler that raises must not lose the count
                self._sent.extend(map(self._socket.send, (self._out,)))
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno is None:  # raised by a signal handler of user code
                    raise
                self._out.clear()  # the connection is broken: the next read reports it
            self._settle()
        return not self._out

    def drained(self, seconds: float) -> bool:
        """Wait until all was sent; return False if nothing can be sent for `seconds`."""
        poller = select.poll()
        poller.register(self, select.POLLOUT)
        while not self.flush():
            if not poller.poll(seconds * 1000):
                return False
        return True

    def close(self) -> None:
        """Close the connection; unsent data is dropped."""
        self._socket.close()
        self._out.clear()

    def leave(self) -> None:
        """Close the descriptor in a forked process: a thread that is gone may hold the buffer."""
        self._socket.close()

    def _settle(self) -> None:
        """Remove sent bytes; without a call in between, so that no signal handler can run."""
        if self._sent:
            del self._out[: self._sent[0]]
            self._sent = []


class ZmtpListener:
    """A listening socket and its peers, all behind one file descriptor to wait for."""

    def __init__(
        self,
        socket_type: bytes,
        listening: socket.socket | None,
        on_ready: Callable[[ZmtpPeer], None] = lambda peer: None,
        given: list[int] | None = None,
    ) -> None:
        """`on_ready` is called with each peer after its handshake.

        `given` gets the last descriptor that a peer has sent. Without `listening` only `take_in`
        adds peers.
        """
        unix = listening is None or listening.family == socket.AF_UNIX
        self._given = given if unix else None
        self.peers: dict[int, ZmtpPeer] = {}
        self._readable: list[ZmtpPeer] = []
        self._type = socket_type
        self._on_ready = on_ready
        self._listening = listening
        self._epoll = select.epoll()
        if listening is not None:
            listening.setblocking(False)
            self._epoll.register(listening, select.EPOLLIN)

    def take_in(self, connection: socket.socket) -> None:
        """Add a connected socket as a peer."""
        peer = ZmtpPeer(connection, self._type, self._given)
        self._epoll.register(connection, select.EPOLLIN)
        self.peers[connection.fileno()] = peer

    def leave(self) -> None:
        """Close all descriptors in a forked process; nothing is sent, and no poll set changes."""
        for peer in self.peers.values():
            peer.leave()
        self._epoll.close()
        if self._listening is not None:
            self._listening.close()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something to do."""
        return self._epoll.fileno()

    def receive(self) -> tuple[ZmtpPeer, list[bytes]] | None:
        """Return the next message and its sender, or None; accept new connections; never wait."""
        while True:
            while self._readable:
                peer = self._readable[-1]
                try:
                    message = peer.message()
                    if peer.ready:
                        self._on_ready(peer)
                except ProtocolError:
                    self.drop(peer)
                    message = None
                if message is not None:
                    return peer, message
                self._readable.pop()
            if not self._listen():
                return None

    def flush(self, peer: ZmtpPeer) -> None:
        """Send waiting data to a client; if some is left, poll until more can be sent."""
        if (peer.waiting or peer.slow) and peer.flush() == peer.slow:
            peer.slow = not peer.slow
            self._epoll.modify(peer, select.EPOLLIN | select.EPOLLOUT * peer.slow)

    def drop(self, peer: ZmtpPeer) -> None:
        """Close the connection of a peer."""
        if self.peers.pop(peer.fileno(), None) is not None:
            self._epoll.unregister(peer.fileno())
            peer.close()

    def close(self) -> None:
        """Close all connections and the listening socket."""
        for peer in list(self.peers.values()):
            self.drop(peer)
        self._epoll.close()
        if self._listening is not None:
            self._listening.close()

    def _listen(self) -> bool:
        """Read arrived data and accept connections; return True if there were any."""
        came = [fd for fd, events in self._epoll.poll(0) if events != select.EPOLLOUT]
        for fd in came:
            peer = self.peers.get(fd)
            if peer is None:
                if not self._accept() and len(came) == 1:
                    return False  # no descriptor is left: try again at the next event
            elif peer.read():
                self._readable.append(peer)
            else:
                self.drop(peer)
        return bool(came)

    def _accept(self) -> bool:
        with suppress(OSError):
            if self._listening is None:
                return False
            connection, _ = self._listening.accept()
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.take_in(connection)
            return True
        return False


BACKLOG = 64
LINGER_SECONDS = 1.0
"""Longest wait in seconds for a subscriber at the end of a kernel."""
STALL_SECONDS = 30.0
"""Seconds after which a client that reads nothing is dropped."""
BEHIND_SECONDS = 0.5
"""Longest time in seconds that one subscriber may keep others waiting."""


class RouterSocket:
    """A ROUTER socket: receives requests of any client and answers each."""

    def __init__(self, listening: socket.socket | None, *, takes_descriptors: bool = False) -> None:
        """Without `listening` only `take_in` adds clients."""
        self.given: list[int] = []
        """The last descriptor that came with a message and was not read yet."""
        given = self.given if takes_descriptors else None
        self._listener = ZmtpListener(b"ROUTER", listening, self._introduce, given)
        self.take_in, self.leave = self._listener.take_in, self._listener.leave
        self._named: dict[bytes, ZmtpPeer] = {}
        self._unnamed = 0

    def fileno(self) -> int:
        """Return a descriptor that is readable when a message may have come."""
        return self._listener.fileno()

    def receive(self) -> list[bytes] | None:
        """Return the next message, the name of its sender first, or None; never wait."""
        found = self._listener.receive()
        if found is None:
            return None
        peer, message = found
        return [peer.name, *message]

    def send(self, frames: list[Any]) -> None:
        """Send to the client that the first frame names, if connected; wait while it is slow."""
        peer = self._named.get(frames[0])
        if peer is None or peer.fileno() < 0 or peer.write(encode(frames[1:])):
            return
        if not peer.drained(STALL_SECONDS):
            self._listener.drop(peer)

    def close(self) -> None:
        """Close all connections."""
        self._listener.close()

    def _introduce(self, peer: ZmtpPeer) -> None:
        """Name a new client; its own identity replaces an earlier peer of that name."""
        if peer.name:
            return
        self._unnamed += 1
        peer.name = peer.identity or b"\0" + self._unnamed.to_bytes(4, "big")
        if (before := self._named.get(peer.name)) is not None:
            self._listener.drop(before)
        self._named = {name: each for name, each in self._named.items() if each.fileno() >= 0}
        self._named[peer.name] = peer


class XPubSocket:
    """An XPUB socket that drops no message: it is full while a subscriber is behind."""

    def __init__(self, listening: socket.socket | None, high_water: int) -> None:
        """It is full when `high_water` bytes wait for one subscriber."""
        self._listener = ZmtpListener(b"XPUB", listening)
        self.take_in, self.leave = self._listener.take_in, self._listener.leave
        self._high_water = high_water
        self._behind: dict[ZmtpPeer, float] = {}
        """Subscribers that keep others waiting, and since when (monotonic seconds)."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `subscribed` or `flush` has something to do."""
        return self._listener.fileno()

    @property
    def waiting(self) -> int:
        """Number of bytes that are not sent to subscribers yet."""
        return sum(peer.waiting for peer in self._subscribers())

    @property
    def full(self) -> bool:
        """Return True if a subscriber is so far behind that nothing more should be sent."""
        return any(peer.waiting >= self._high_water for peer in self._subscribers())

    def put(self, frames: list[Any]) -> None:
        """Queue a message for the next `flush`, to the subscribers of its topic."""
        data = encode(frames)
        for peer in self._subscribers():
            if any(frames[0].startswith(topic) for topic in peer.subscriptions):
                peer.keep(data)

    def flush(self) -> None:
        """Send what the connections accept without waiting."""
        for peer in self._subscribers():
            self._listener.flush(peer)

    def shed(self) -> None:
        """Disconnect subscribers that have kept others waiting for more than `BEHIND_SECONDS`."""
        readers = self._subscribers()
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
        """Return the topics of new subscriptions since the last call."""
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
        """Wait until more can be sent to a subscriber, for `seconds` at most."""
        poller = select.poll()
        for peer in self._subscribers():
            if peer.waiting:
                with suppress(ValueError):  # its connection has just been closed
                    poller.register(peer, select.POLLOUT)
        poller.poll(seconds * 1000)

    def close(self) -> None:
        """Send remaining data for at most `LINGER_SECONDS` each; close all connections."""
        for peer in self._subscribers():
            peer.drained(LINGER_SECONDS)
        self._listener.close()

    def _subscribers(self) -> list[ZmtpPeer]:
        return list(self._listener.peers.values())  # a copy: another thread may add a peer


def listen(transport: str, ip: str, port: int) -> tuple[socket.socket, int]:
    """Return a listening socket, as a connection file places it, and its port; 0 picks a free one.

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
