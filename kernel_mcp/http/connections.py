"""Connections of clients: how many there may be, how long one may be silent, which answers arrived.

uvicorn speaks HTTP; here stands what it leaves open: a bound on connections, and the end of those
on which no whole request comes or no answer goes.
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

from kernel_mcp.network.pieces import Pieces, TooManyBlanks

if TYPE_CHECKING:
    from collections.abc import Callable

SILENT_S = 75.0
"""A connection without a whole request for this long is closed: longer than proxies keep theirs."""
HEAD_S = 20.0
"""The same for one on which a request has begun, or that is new."""
STALLED_S = 60.0
"""One whose client takes not a byte of an answer for this long is closed, as nginx does."""
CHECK_S = 5.0
JOINED_BYTES = 64 * 1024
"""Bytes above which nothing more waits to be sent together but the end of a body."""
END_BYTES = 64


class Joined:
    """A transport that sends what is written in one turn of the loop as one piece.

    A client that hangs up when it has read the last event of an answer leaves nothing unread then:
    the end of the body has come with it. What it leaves unread would be a reset, by which an
    answer counts as lost. Call `dropped` when something cannot be sent, as the connection ends.
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
        """Send it before the loop waits again."""
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
        """Nothing more can be sent."""
        return self._closed or self._transport.is_closing()

    def close(self) -> None:
        """Send what waits, then the end: a client closes when it has read that, or resets."""
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
        """Send what waits, then close without waiting for the client."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if waiting and self._transport.is_closing():
            self._dropped()
        elif waiting:
            self._transport.write(b"".join(waiting))


class Connection:
    """One connection; `unread` takes back the answer that was sent last on it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.unread: Callable[[], None] | None = None
        self.alive = True
        """Nothing that was sent on it has been dropped, and more can be sent.

        A close by this side that follows the last byte of an answer leaves it so: the client reads
        the answer and then the end.
        """

    def ended(self) -> None:
        """Nothing more is sent on it."""
        self.alive = False

    def broke(self) -> None:
        """Take back what was sent last: a reset, or an end that came before it."""
        self.alive = False
        unread, self.unread = self.unread, None
        if unread is not None:
            unread()

    def close(self) -> None:
        """Cut the connection."""
        self._transport.abort()


class Wire(Protocol):
    """What carries requests; `patience_s` is how long it may be silent."""

    patience_s: float

    def unsent(self) -> int:
        """Bytes of answers that the client's side has not taken yet."""

    def end(self) -> None:
        """End it once what was sent on it is on its way."""

    def cut(self) -> None:
        """End it at once."""


class Connections:
    """All connections of a server, at most `most`: one more, and the longest silent one goes."""

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        self._most = most
        self._now = now
        self._silent: OrderedDict[Wire, float] = OrderedDict()
        """Those on which no request is being answered, the longest silent first."""
        self._open: set[Wire] = set()
        self._stalled: dict[Wire, tuple[int, float]] = {}
        """Those that take nothing of an answer: bytes that wait, and since when it is so many."""
        self._none = asyncio.Event()
        self._none.set()

    @property
    def count(self) -> int:
        """Open ones."""
        return len(self._open)

    async def gone(self) -> None:
        """Wait until there is none."""
        await self._none.wait()

    def opened(self, wire: Wire) -> None:
        """A client has connected."""
        self._open.add(wire)
        self._none.clear()
        self._silent[wire] = self._now()
        if len(self._open) > self._most:
            longest, _ = self._silent.popitem(last=False)
            longest.cut()

    def closed(self, wire: Wire) -> None:
        """A connection has ended."""
        self._open.discard(wire)
        if not self._open:
            self._none.set()
        self._silent.pop(wire, None)
        self._stalled.pop(wire, None)

    def end(self) -> None:
        """Close all once what was sent on them is on its way."""
        for each in list(self._open):
            each.end()

    def cut(self) -> None:
        """Close all at once."""
        for each in list(self._open):
            each.cut()

    def busy(self, wire: Wire) -> None:
        """A whole head has come in."""
        self._silent.pop(wire, None)

    def silent(self, wire: Wire) -> None:
        """A request has been answered."""
        self._silent[wire] = self._now()
        self._stalled.pop(wire, None)

    def sweep(self) -> None:
        """Cut those that have been silent for too long, or take nothing of their answer."""
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
    """HTTP/1.1 on one connection, which `connections` of the application's state know of."""

    patience_s: float = HEAD_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        self._here = Connection(transport)
        self._joined = Joined(transport, self._here.broke)
        super().connection_made(self._joined)  # type: ignore[arg-type]
        self._all: Connections = self.app_state["connections"]
        self._socket = transport.get_extra_info("socket")
        self._pieces = Pieces(self.conn)
        self.app_state = {**self.app_state, "connection": self._here}
        self._all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended; by a reset when the client had not read all."""
        super().connection_lost(exc)
        self._all.closed(self)
        if exc is None:
            self._here.ended()
        else:
            self._here.broke()

    def data_received(self, data: bytes) -> None:
        """Bytes have come in; behind the last answer nobody reads them."""
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
            self._all.busy(self)

    def _refuse_blanks(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response("A header is a long run of blanks.")
        else:  # an answer is on its way
            self.cut()

    def on_response_complete(self) -> None:
        """The answer to a request has been sent."""
        before = self.cycle
        self._all.silent(self)
        self.patience_s = SILENT_S
        super().on_response_complete()
        if self.cycle is not before:  # the next one had come in already
            self._all.busy(self)

    def unsent(self) -> int:
        """See `Wire`."""
        waiting = self.transport.get_write_buffer_size()
        with suppress(OSError, ValueError):  # it has just ended
            queued = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4))
            waiting += struct.unpack("i", queued)[0]
        return waiting

    def end(self) -> None:
        """See `Wire`."""
        self._joined.finish()

    def cut(self) -> None:
        """See `Wire`."""
        self.transport.abort()


def state_of(scope: Any) -> dict[str, Any]:
    """What is known of a request: its connection, its principal, the delivery of its answer."""
    found: dict[str, Any] = scope["state"]
    return found
