"""One connection to a kernel's socket, which is read only when asked to."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress

from kernel_mcp.config.values import MIB
from kernel_mcp.launch.base import take_no_descriptors
from kernel_specs.restricted.wire.zmtp import GREETING, Decoder, encode, ready

READ_BYTES = 128 * 1024
MAX_WAITING_BYTES = 64 * MIB
"""Requests that a kernel has not taken yet; more are refused."""
_INT_BYTES = 4


class Connection:
    """A ZMTP client on a Unix socket; it never connects again.

    `unread` says that the other end went without having read all that was sent, which Linux tells
    by a reset. Raises OSError when nobody listens.
    """

    def __init__(
        self, path: str, socket_type: bytes, *, max_bytes: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.unread = False
        self._loop = loop
        self._decoder = Decoder(max_bytes)
        self._room = bytearray(READ_BYTES)
        self._held: list[bytes] = [encode([b"\x01"])] if socket_type == b"SUB" else []
        """Messages for after the handshake; first the subscription to everything."""
        self._out = bytearray()
        self._writing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        take_no_descriptors(self._socket)
        try:
            self._socket.connect(path)
            self._write(GREETING + ready(socket_type))
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        return self._socket.fileno()

    @property
    def taken(self) -> bool:
        """Whether the kernel has read all that was sent; False also where the system fails."""
        if self._out or self._held:
            return False
        with suppress(OSError):
            left = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(_INT_BYTES))
            return int.from_bytes(left, sys.byteorder) == 0
        return False

    def read(self) -> bool:
        """Take in some of what has arrived; whether there may be more.

        Raises EOFError when the kernel has closed its end.
        """
        try:
            size = self._socket.recv_into(self._room)
        except BlockingIOError:
            return False
        except ConnectionResetError as reason:
            self.unread = True
            raise EOFError(str(reason)) from reason
        except OSError as reason:
            raise EOFError(str(reason)) from reason
        if not size:
            raise EOFError("end of file")
        with memoryview(self._room) as view:
            self._decoder.feed(view[:size])
        return size == READ_BYTES

    def message(self) -> list[bytes] | None:
        """The next whole message of what was taken in. Raises ProtocolError."""
        found = self._decoder.message()
        if self._held and self._decoder.ready:
            held, self._held = self._held, []
            self._write(b"".join(held))
        return found

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message, now or when the kernel takes it.

        Raises OSError when the connection is gone or too much is waiting.
        """
        data = encode(frames)
        waiting = len(self._out) + sum(map(len, self._held))
        if waiting and waiting + len(data) > MAX_WAITING_BYTES:
            raise BlockingIOError(f"{waiting:,} bytes are waiting to be read")
        if self._decoder.ready:
            self._write(data)
        else:
            self._held.append(data)

    def close(self) -> None:
        """Close it; what was not sent is dropped."""
        if self._writing:
            self._loop.remove_writer(self._socket)
            self._writing = False
        self._socket.close()

    def _write(self, data: bytes) -> None:
        if not self._out:
            with suppress(BlockingIOError):
                data = data[self._socket.send(data) :]
        self._out += data
        if self._out and not self._writing:
            self._loop.add_writer(self._socket, self._flush)
            self._writing = True

    def _flush(self) -> None:
        try:
            del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except OSError:
            self.unread = True
            self._out.clear()  # the reader sees the end
        if not self._out:
            self._loop.remove_writer(self._socket)
            self._writing = False
