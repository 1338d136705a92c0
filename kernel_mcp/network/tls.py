"""TLS: parsing of a ClientHello, and TLS connections of the proxy itself."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kernel_mcp.network.http import ByteStream

HELLO_BYTES = 16 * 1024
"""Longest ClientHello in bytes. With keys for post-quantum exchange it has 2 KiB."""
_SERVER_NAME, _ENCRYPTED_NAME, _OLD_ENCRYPTED_NAME = 0, 0xFE0D, 0xFFCE
"""TLS extensions: RFC 6066, RFC 9849, and a draft before that."""
UNRECOGNIZED_NAME, ACCESS_DENIED = 112, 49
"""TLS alerts (RFC 8446, 6.2)."""
_PIECE_BYTES = 64 * 1024

_Result = TypeVar("_Result")


class BadHello(Exception):
    """A client sent no acceptable ClientHello; `alert` is the TLS record to answer with."""

    def __init__(self, words: str, alert: int = ACCESS_DENIED) -> None:
        super().__init__(words)
        # an alert record: two bytes, level fatal
        self.alert = bytes((21, 3, 1, 0, 2, 2, alert))


class Hello:
    """Incremental parser of a ClientHello, in any division into pieces and records."""

    def __init__(self) -> None:
        self.raw = bytearray()
        """All bytes that were fed, to be forwarded."""
        self._position = 0
        self._message = bytearray()

    def feed(self, piece: bytes) -> str | None:
        """Parse a piece; return the server name (SNI), or None while the message is incomplete.

        The name is in lower case, and empty if the client sent none. Raises BadHello for other
        protocols, several names, and encrypted ones.
        """
        self.raw += piece
        if self.raw and self.raw[0] != 22:
            raise BadHello("it does not speak TLS")
        while len(self.raw) >= self._position + 5:
            kind, major, _, high, low = self.raw[self._position : self._position + 5]
            size = high << 8 | low
            if kind != 22 or major != 3 or not 0 < size <= 1 << 14:
                raise BadHello("it does not speak TLS")
            if len(self.raw) < self._position + 5 + size:
                break
            self._message += self.raw[self._position + 5 : self._position + 5 + size]
            self._position += 5 + size
            if self._message[0] != 1:
                raise BadHello("it does not begin TLS with a ClientHello")
            whole = 4 + int.from_bytes(self._message[1:4], "big")
            if len(self._message) >= 4 and len(self._message) >= whole:
                if len(self._message) > whole:
                    raise BadHello("more follows its first TLS message at once")
                return _server_name(bytes(self._message[4:]))
        if len(self.raw) > HELLO_BYTES:
            raise BadHello("its first TLS message is too long")
        return None


def _server_name(message: bytes) -> str:
    """Return the server name of a ClientHello; empty without one. Raises BadHello."""
    reader = _HelloReader(message)
    reader.take(2 + 32)  # version, random
    for size in (1, 2, 1):  # session, ciphers, compression
        reader.part(size)
    extensions = _HelloReader(reader.part(2) if reader.left else b"")
    if reader.left:
        raise BadHello("its first TLS message has bytes too many")
    found: dict[int, bytes] = {}
    while extensions.left:
        kind = int.from_bytes(extensions.take(2), "big")
        if kind in found:
            raise BadHello("its first TLS message has an extension twice")
        found[kind] = extensions.part(2)
    if _ENCRYPTED_NAME in found or _OLD_ENCRYPTED_NAME in found:
        raise BadHello("it hides the name of the server in TLS (ECH)")
    if _SERVER_NAME not in found:
        return ""
    outer = _HelloReader(found[_SERVER_NAME])
    names = _HelloReader(outer.part(2))
    usual = names.take(1) == b"\0"
    name = names.part(2)
    if not usual or not name or names.left or outer.left or not name.isascii():
        raise BadHello("it names its server in TLS (SNI) in no way that is known here")
    return name.decode("ascii").lower()


class _HelloReader:
    """Reader of the vectors of a TLS message. Raises BadHello if the message is too short."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._position

    def take(self, count: int) -> bytes:
        if self.left < count:
            raise BadHello("its first TLS message is cut short")
        start, self._position = self._position, self._position + count
        return self._data[start : self._position]

    def part(self, size: int) -> bytes:
        """Return a vector whose length is encoded in `size` bytes."""
        return self.take(int.from_bytes(self.take(size), "big"))


class Tls:
    """TLS over a stream, as a stream. It counts plaintext bytes. `ssl.SSLError` is an OSError."""

    def __init__(
        self,
        stream: ByteStream,
        context: ssl.SSLContext,
        name: str | None = None,
        first: bytes = b"",
    ) -> None:
        """Wrap `stream` as a client that verifies the host `name`, or, without `name`, as a server.

        `first` are bytes already read from the stream.
        """
        self.received = 0
        self.sent = 0
        self._stream = stream
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._in.write(first)
        self._tls = context.wrap_bio(
            self._in, self._out, server_side=name is None, server_hostname=name
        )
        self._sending = asyncio.Lock()

    async def begin(self) -> None:
        """Do the handshake. Raises OSError."""
        await self._done(self._tls.do_handshake)

    async def read(self) -> bytes:
        """Return the next bytes; empty at the end, even without a TLS closure alert.

        Raises OSError.
        """
        try:
            data = await self._done(self._read)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return b""
        self.received += len(data)
        return data

    def _read(self) -> bytes:
        """Return all that is decrypted, up to `_PIECE_BYTES`, so that tiny records are joined."""
        data = self._tls.read(_PIECE_BYTES)
        more = data
        while more and len(data) < _PIECE_BYTES and (self._tls.pending() or self._in.pending):
            try:
                more = self._tls.read(_PIECE_BYTES - len(data))
            except ssl.SSLError:  # it is raised again by the next read
                break
            data += more
        return data

    async def write(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError."""
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            self.sent += len(piece)
            await self._done(lambda piece=piece: self._tls.write(piece))  # type: ignore[misc]

    async def shut(self) -> None:
        """Send the closure alert, and close the sending side of the stream. Raises OSError."""
        with suppress(ssl.SSLError):  # the peer has not closed its side yet
            self._tls.unwrap()
        await self._flush()
        await self._stream.shut()

    @property
    def stale(self) -> bool:
        """True if an idle connection has ended, or has unread data, perhaps of the application."""
        return self._tls.pending() > 0 or self._in.pending > 0 or self._stream.stale

    def close(self) -> None:
        """Close the underlying stream."""
        self._stream.close()

    async def _done(self, step: Callable[[], _Result]) -> _Result:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                pass
            finally:
                await self._flush()
            data = await self._stream.read()
            if not data:  # the BIO gets no EOF: OpenSSL would send an alert
                raise ssl.SSLEOFError("the other side has closed")
            self._in.write(data)

    async def _flush(self) -> None:
        async with self._sending:
            while self._out.pending:
                await self._stream.write(self._out.read(_PIECE_BYTES))
