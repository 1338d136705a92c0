"""ZMTP 3.0, the protocol below Jupyter's, as both ends of a kernel's sockets speak it. No I/O here.

libzmq bounds the parts of a message but not their number, and reads ahead by messages of any size.
So a hostile kernel could fill the memory of its client. Here a message is bounded as a whole, and
only the one that is arriving is held. In the kernel there is no thread between code and sockets
either: sent data is in the buffers of the operating system.

Source: https://rfc.zeromq.org/spec/23/
"""

from __future__ import annotations

from collections.abc import Sequence

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Signature, version 3.0, no authentication (the folder of the socket is private)."""
MAX_FRAMES = 64
MAX_COMMAND_BYTES = 8 * 1024
_MORE, _LONG, _COMMAND = 1, 2, 4
_KNOWN_FLAGS = _MORE | _LONG | _COMMAND
_READY = b"\x05READY"
_PING, _PONG = b"\x04PING", b"\x04PONG"
_PING_CONTEXT_BYTES = 16
"""Most bytes of a ZMTP 3.1 ping's context, after the two of its TTL; the pong returns them."""


class ProtocolError(ValueError):
    """The peer does not speak ZMTP, or sends more than it may."""


def ready(socket_type: bytes, identity: bytes = b"") -> bytes:
    """Return the command that ends the handshake for a socket of this type (DEALER, SUB).

    The other end chooses an `identity` if it is empty.
    """
    body = _READY + b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    if identity:
        body += b"\x08Identity" + len(identity).to_bytes(4, "big") + identity
    return bytes((_COMMAND, len(body))) + body


def opening(socket_type: bytes) -> bytes:
    """Return the whole handshake of a client of this type; SUB subscribes to every topic.

    It may be sent before the other end's greeting.
    """
    return GREETING + ready(socket_type) + (encode([b"\x01"]) if socket_type == b"SUB" else b"")


def encode(frames: Sequence[bytes | memoryview]) -> bytes:
    """Return the bytes of one message."""
    parts: list[bytes | memoryview] = []
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        flags = _MORE if number < last else 0
        size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        if size > 0xFF:
            parts += (bytes((flags | _LONG,)), size.to_bytes(8, "big"), frame)
        else:
            parts += (bytes((flags, size)), frame)
    return b"".join(parts)


class Decoder:
    """Decodes messages from bytes, each of at most `max_bytes` in all its frames.

    A MemoryError loses nothing: the same call can be made again.
    """

    def __init__(
        self, max_bytes: int, *, answers_pings: bool = False, leaves_out: bool = False
    ) -> None:
        """With `leaves_out`, a larger message is no error: it is skipped as it arrives."""
        self.left_out = 0
        """Size of the frames that the last message lacks, as they are too large."""
        self._leaves_out = leaves_out
        self._skipped = 0
        """Bytes to skip that have not arrived."""
        self.ready = False
        """True once the peer has completed its handshake: messages can be sent to it."""
        self.pongs = b""
        """Answers to pings, to be sent before anything else."""
        self.identity = b""
        """Identity that the peer has sent; empty without one."""
        self._answers_pings = answers_pings
        self._max_bytes = max_bytes
        self._greeted = False
        self._data = bytearray()
        self._at = 0
        self._frames: list[bytes] = []
        self._size = 0

    @property
    def waiting(self) -> int:
        """Number of bytes that were added and not decoded."""
        return len(self._data) - self._at

    def feed(self, data: bytes | memoryview) -> None:
        """Add received bytes."""
        if self._at:
            del self._data[: self._at]
            self._at = 0
        self._data += data

    def message(self) -> list[bytes] | None:
        """Return the next whole message, None until more bytes arrive. Raises ProtocolError."""
        if not self._frames:
            self.left_out = 0
        with memoryview(self._data) as view:
            found = self._next(view)
        if self._at and self._at == len(self._data):
            self._data.clear()
            self._at = 0
        return found

    def _next(self, view: memoryview) -> list[bytes] | None:
        if not self._greeted:
            if len(view) < len(GREETING):
                return None
            _check_greeting(bytes(view[: len(GREETING)]))
            self._greeted = True
            self._at = len(GREETING)
        while (frame := self._frame(view)) is not None:
            flags, body, end = frame
            if flags & _COMMAND:
                self._on_command(body)
                self._at = end
                continue
            if not self.ready:
                raise ProtocolError("a message came before the handshake had ended")
            if not flags & _MORE:
                found = [*self._frames, body]
                self._frames, self._size, self._at = [], 0, end
                return found
            self._frames.append(body)
            self._size += len(body)
            self._at = end
        return None

    def _frame(self, view: memoryview) -> tuple[int, bytes, int] | None:
        """Return flags, body and end of the next frame; None until it is whole."""
        step = min(self._skipped, len(view) - self._at)
        self._skipped -= step
        self._at += step
        at = self._at
        start = at + 2
        if len(view) < start:
            return None
        flags, size = view[at], view[at + 1]
        if flags & ~_KNOWN_FLAGS:
            raise ProtocolError("unknown flags in a frame")
        if flags & _LONG:
            start = at + 9
            if len(view) < start:
                return None
            size = int.from_bytes(view[at + 1 : start], "big")
        if self._leaves_out and not flags & _COMMAND and self._size + size > self._max_bytes:
            self.left_out += size
            self._skipped = size
            return flags, b"", start
        self._check(flags, size)
        end = start + size
        return (flags, bytes(view[start:end]), end) if len(view) >= end else None

    def _check(self, flags: int, size: int) -> None:
        if flags & _COMMAND:
            if size > MAX_COMMAND_BYTES:
                raise ProtocolError(f"a command of {size:,} bytes")
        elif self._size + size > self._max_bytes:
            raise ProtocolError(f"a message of more than {self._max_bytes:,} bytes")
        elif len(self._frames) >= MAX_FRAMES:
            raise ProtocolError(f"a message of more than {MAX_FRAMES} parts")

    def _on_command(self, body: bytes) -> None:
        if body.startswith(_READY):
            self.identity = _properties(body[len(_READY) :]).get(b"identity", b"")
            self.ready = True
        elif not self.ready:
            raise ProtocolError("the handshake was refused")
        elif self._answers_pings and body.startswith(_PING):
            context = body[len(_PING) + 2 :][:_PING_CONTEXT_BYTES]
            self.pongs += bytes((_COMMAND, len(_PONG) + len(context))) + _PONG + context


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Return the properties of a READY command, names in lower case, a truncated value as it is."""
    found = {}
    while data:
        name_end = 1 + data[0]
        value_start = name_end + 4
        value_end = value_start + int.from_bytes(data[name_end:value_start], "big")
        found[data[1:name_end].lower()] = data[value_start:value_end]
        data = data[value_end:]
    return found


def _check_greeting(greeting: bytes) -> None:
    if greeting[0] != GREETING[0] or greeting[9] != GREETING[9] or greeting[10] < GREETING[10]:
        raise ProtocolError("the greeting is not that of ZMTP 3")
    if greeting[12:32] != GREETING[12:32]:
        raise ProtocolError("the peer wants authentication")
