"""Connections of clients: their number, their timeouts, and detection of lost responses.

uvicorn speaks HTTP. This module adds what it lacks: a limit on connections, and the end of those
that send no complete request or do not read their response.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from uvicorn.protocols.http.h11_impl import H11Protocol

from kernel_mcp.network.h11_input import H11Input, TooManyBlanks

if TYPE_CHECKING:
    from collections.abc import Callable

SILENT_S = 75.0
"""Keep-alive timeout: longer than that of proxies."""
HEAD_S = 20.0
"""Timeout for the head of a request that has begun, and for the first one of a connection."""
STALLED_S = 60.0
"""A connection whose client accepts no byte of a response for this long is closed, as by nginx."""
CHECK_S = 5.0
JOINED_BYTES = 64 * 1024
"""Most bytes that are joined; the end of a body may exceed it."""
END_BYTES = 64


class CoalescingTransport:
    """A transport that sends everything written in one iteration of the loop as one piece.

    A client may close as soon as it has read the last event of a response. If the end of the body
    arrived separately, it would be unread data and cause a reset, by which the response would count
    as lost. `dropped` is called when something cannot be sent because the connection has ended.
    """

    def __init__(self, transport: asyncio.Transport, dropped: Callable[[], None]) -> None:
        self._transport = transport
        self._dropped = dropped
        self._soon = asyncio.get_running_loop().call_soon
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Queue data, to be sent before the loop waits again."""
        if self.is_closing():
            self._dropped()
            return
        if len(data) > END_BYTES and self._bytes + len(data) > JOINED_BYTES:
            self._flush()
        if not self._waiting:
            self._soon(self._flush)
        self._waiting.append(data)
        self._bytes += len(data)

    def is_closing(self) -> bool:
        """Return True if nothing more can be sent."""
        return self._closed or self._transport.is_closing()

    def close(self) -> None:
        """Send what is queued, then close the sending side; the client closes the connection."""
        self._flush()
        if self.is_closing():
            return
        if not self._transport.can_write_eof():  # TLS
            self._transport.close()
            return
        self._closed = True
        try:
            self._transport.write_eof()
        except OSError:  # reset meanwhile
            self._dropped()
            self._transport.abort()
            return
        self._transport.resume_reading()

    def finish(self) -> None:
        """Send what is queued, then close without waiting for the client."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if waiting and self._transport.is_closing():
            self._dropped()
        elif waiting:
            self._transport.write(b"".join(waiting))


class ClientConnection:
    """State of one connection; `unread` marks the last response on it as not delivered."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.unread: Callable[[], None] | None = None
        self.alive = True
        """True until the connection has ended or something could not be sent.

        It stays True when this side closes after the last byte of a response, as the client still
        reads that.
        """

    def closed_cleanly(self) -> None:
        """Note that the connection was closed in order."""
        self.alive = False

    def reset(self) -> None:
        """Note a reset, or an end before all was sent: the last response was not delivered."""
        self.alive = False
        unread, self.unread = self.unread, None
        if unread is not None:
            unread()

    def close(self) -> None:
        """Abort the connection."""
        self._transport.abort()


class TrackedConnection(Protocol):
    """A connection that carries requests; `patience_s` is how long it may be silent."""

    patience_s: float

    def unsent(self) -> int:
        """Return the bytes of responses that the client's system has not acknowledged yet."""

    def end(self) -> None:
        """Close after queued data was sent, without waiting for the client."""

    def cut(self) -> None:
        """Abort at once."""


class Connections:
    """All connections of a server. Beyond `most`, the longest silent one is closed."""

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        self._most = most
        self._now = now
        self._silent: OrderedDict[TrackedConnection, float] = OrderedDict()
        """Connections without a request, with the time since then; the longest silent one first."""
        self._open: set[TrackedConnection] = set()
        self._stalled: dict[TrackedConnection, tuple[int, float]] = {}
        """Connections with unsent bytes: number of bytes, and time of its last change."""
        self._none = asyncio.Event()
        self._none.set()

    @property
    def count(self) -> int:
        """Number of open connections."""
        return len(self._open)

    async def wait_closed(self) -> None:
        """Wait until no connection is open."""
        await self._none.wait()

    def opened(self, wire: TrackedConnection) -> None:
        """Add a connection; close the longest silent one if there are too many."""
        self._open.add(wire)
        self._none.clear()
        self._silent[wire] = self._now()
        if len(self._open) > self._most:
            longest, _ = self._silent.popitem(last=False)
            longest.cut()

    def closed(self, wire: TrackedConnection) -> None:
        """Remove a connection that has ended."""
        self._open.discard(wire)
        if not self._open:
            self._none.set()
        self._silent.pop(wire, None)
        self._stalled.pop(wire, None)

    def end(self) -> None:
        """Close all connections after queued data was sent."""
        for each in list(self._open):
            each.end()

    def cut(self) -> None:
        """Abort all connections."""
        for each in list(self._open):
            each.cut()

    def busy(self, wire: TrackedConnection) -> None:
        """Note that a complete head has arrived."""
        self._silent.pop(wire, None)

    def silent(self, wire: TrackedConnection) -> None:
        """Note that a request has been answered."""
        self._silent[wire] = self._now()
        self._stalled.pop(wire, None)

    def sweep(self) -> None:
        """Close connections that have been silent for too long, or do not read their response."""
        now = self._now()
        late = [each for each, since in self._silent.items() if now - since > each.patience_s]
        for wire in self._open.difference(self._silent):
            unsent = wire.unsent()
            before, since = self._stalled.get(wire, (0, now))
            if unsent != before:
                self._stalled[wire] = unsent, now
            elif unsent and now - since > STALLED_S:
                late.append(wire)
        for each in late:
            self._silent.pop(each, None)
            each.cut()


class HttpProtocol(H11Protocol):
    """HTTP/1.1 on one connection, registered in `connections` of the application's state."""

    patience_s: float = HEAD_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register a new connection."""
        self._client = ClientConnection(transport)
        self._joined = CoalescingTransport(transport, self._client.reset)
        super().connection_made(self._joined)  # type: ignore[arg-type]
        self._connections: Connections = self.app_state["connections"]
        self._socket = transport.get_extra_info("socket")
        self._pieces = H11Input(self.conn)
        self.app_state = {**self.app_state, "connection": self._client}
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection. `exc` is set after a reset: the client had not read everything."""
        super().connection_lost(exc)
        self._connections.closed(self)
        if exc is None:
            self._client.closed_cleanly()
        else:
            self._client.reset()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; they are discarded once this side has closed."""
        if self._joined.is_closing():
            return
        before = self.cycle
        self.patience_s = HEAD_S
        self._pieces.add(data)
        try:
            while piece := self._pieces.next():
                super().data_received(piece)
        except TooManyBlanks:
            self._refuse_blanks()
        if self.cycle is not before:
            self._connections.busy(self)

    def _refuse_blanks(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response("A header is a long run of blanks.")
        else:  # a response is in progress
            self.cut()

    def on_response_complete(self) -> None:
        """Note that a response has been sent; the next request may have arrived already."""
        before = self.cycle
        self._connections.silent(self)
        self.patience_s = SILENT_S
        super().on_response_complete()
        if self.cycle is not before:  # the next request had already arrived
            self._connections.busy(self)

    def unsent(self) -> int:
        """See `TrackedConnection`."""
        waiting = self.transport.get_write_buffer_size()
        with suppress(OSError, ValueError):  # it has just ended
            queued = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4))
            waiting += struct.unpack("i", queued)[0]
        return waiting

    def end(self) -> None:
        """See `TrackedConnection`."""
        self._joined.finish()

    def cut(self) -> None:
        """See `TrackedConnection`."""
        self.transport.abort()


def peer_of(scope: Any) -> str:
    """Return the address of the client: behind a trusted proxy that of the proxy's client."""
    return str(scope["client"][0]) if scope.get("client") else ""


def state_of(scope: Any) -> dict[str, Any]:
    """Return the state of a request: `connection`, `principal`, `delivery`, and others."""
    found: dict[str, Any] = scope["state"]
    return found
