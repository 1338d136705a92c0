"""ZMTP 3.0, the protocol below Jupyter's, as a client of one kernel speaks it. No I/O here.

libzmq bounds the parts of a message but not their number, and reads ahead by messages of any size,
so a hostile kernel could fill the memory of whoever listens to it. Here a message is bounded as a
whole, and nothing is held but the one that is arriving.

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


class ProtocolError(ValueError):
    """The peer does not speak ZMTP, or sends more than it may."""


def ready(socket_type: bytes) -> bytes:
    """The command that ends the handshake for a socket of this type (DEALER, SUB)."""
    body = b"\x05READY\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    return bytes((_COMMAND, len(body))) + body


def encode(frames: Sequence[bytes]) -> bytes:
    """The bytes of one message."""
    parts: list[bytes] = []
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        flags, size = _MORE if number < last else 0, len(frame)
        if size > 0xFF:
            parts += (bytes((flags | _LONG,)), size.to_bytes(8, "big"), frame)
        else:
            parts += (bytes((flags, size)), frame)
    return b"".join(parts)


class Decoder:
    """Messages from bytes, each of at most `max_bytes` in all its frames."""

    def __init__(self, max_bytes: int) -> None:
        self.ready = False
        """Whether the peer has ended its handshake and can be sent messages."""
        self._max_bytes = max_bytes
        self._greeted = False
        self._data = bytearray()
        self._frames: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes | memoryview) -> None:
        """Add bytes as they came."""
        self._data += data

    def message(self) -> list[bytes] | None:
        """The next whole message, or None before more bytes have come. Raises ProtocolError."""
        with memoryview(self._data) as view:
            found, at = self._next(view)
        del self._data[:at]
        return found

    def _next(self, view: memoryview) -> tuple[list[bytes] | None, int]:
        at = 0
        if not self._greeted:
            if len(view) < len(GREETING):
                return None, 0
            _check_greeting(bytes(view[: len(GREETING)]))
            self._greeted = True
            at = len(GREETING)
        while (frame := self._frame(view, at)) is not None:
            flags, body, at = frame
            if flags & _COMMAND:
                self._on_command(body)
                continue
            if not self.ready:
                raise ProtocolError("a message came before the handshake had ended")
            self._frames.append(body)
            self._size += len(body)
            if not flags & _MORE:
                frames, self._frames, self._size = self._frames, [], 0
                return frames, at
        return None, at

    def _frame(self, view: memoryview, at: int) -> tuple[int, bytes, int] | None:
        """Flags and body of the frame that begins at `at` and where it ends, when it is whole."""
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
        if body.startswith(b"\x05READY"):
            self.ready = True
        elif not self.ready:
            raise ProtocolError("the handshake was refused")


def _check_greeting(greeting: bytes) -> None:
    if greeting[0] != GREETING[0] or greeting[9] != GREETING[9] or greeting[10] < GREETING[10]:
        raise ProtocolError("the greeting is not that of ZMTP 3")
    if greeting[12:32] != GREETING[12:32]:
        raise ProtocolError("the peer wants authentication")
