"""A ZMTP connection to one socket of a kernel, on the event loop."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress

from kernel_mcp.launch.base import take_no_descriptors
from kernel_mcp.units import MIB
from kernel_specs.restricted.wire.zmtp import GREETING, Decoder, encode, ready

READ_BYTES = 128 * 1024
MAX_WAITING_BYTES = 64 * MIB
"""Maximum bytes of requests that a kernel has not read yet; more are refused."""
_INT_BYTES = 4


class ZmtpClient:
    """A ZMTP client on a Unix socket, without reconnects. Raises OSError when connect(2) fails.

    `unread` is True if the kernel closed the socket before it had read all data, which Linux
    reports as ECONNRESET.
    """

    def __init__(
        self,
        place: str | socket.socket,
        socket_type: bytes,
        *,
        max_bytes: int,
        loop: asyncio.AbstractEventLoop,
        opened: bool = False,
        leaves_out: bool = False,
        identity: bytes = b"",
    ) -> None:
        """`place` is the path on which the kernel listens, or a socket that is connected to it.

        The socket is closed with the connection. `opened` means that the greeting and subscription
        were sent before. Messages are held until the handshake is complete, because some kernels
        disconnect a client that does not wait for it. `leaves_out` is that of `Decoder`,
        `identity` that of `ready`.
        """
        self.unread = False
        self._loop = loop
        self._decoder = Decoder(max_bytes, leaves_out=leaves_out)
        self._held: list[bytes] = []
        """Messages to send after the handshake; the first is the subscription to all topics."""
        if socket_type == b"SUB" and not opened:
            self._held.append(encode([b"\x01"]))
        self._out = bytearray()
        self._writing = False
        if isinstance(place, str):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        else:
            self._socket = place
        take_no_descriptors(self._socket)
        try:
            if isinstance(place, str):
                self._socket.connect(place)
            if not opened:
                self._write(GREETING + ready(socket_type, identity))
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    @property
    def taken(self) -> bool:
        """True if the kernel has read everything sent; False also if the ioctl fails."""
        if self._out or self._held:
            return False
        with suppress(OSError):
            left = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(_INT_BYTES))
            return int.from_bytes(left, sys.byteorder) == 0
        return False

    @property
    def waiting(self) -> int:
        """Number of bytes that were received and not decoded."""
        return self._decoder.waiting

    @property
    def left_out(self) -> int:
        """Number of bytes that the last message lacks, as it was too large."""
        return self._decoder.left_out

    def read(self) -> bool:
        """Receive some bytes; return True if there may be more. Raises EOFError at the end."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError as reason:
            self.unread = True
            raise EOFError(str(reason)) from reason
        except OSError as reason:
            raise EOFError(str(reason)) from reason
        if not data:
            raise EOFError("end of file")
        self._decoder.feed(data)
        return len(data) == READ_BYTES

    def message(self) -> list[bytes] | None:
        """Return the next complete message, None without one. Raises ProtocolError."""
        found = self._decoder.message()
        if self._held and self._decoder.ready:
            held, self._held = self._held, []
            self._write(b"".join(held))
        return found

    def send(self, frames: Sequence[bytes], given: int | None = None) -> None:
        """Send or queue a message. Raises OSError if disconnected or beyond MAX_WAITING_BYTES.

        A message with a descriptor `given` is never queued: BlockingIOError is raised instead.
        """
        data = encode(frames)
        waiting = len(self._out) + sum(map(len, self._held))
        if given is not None:
            if waiting or not self._decoder.ready:
                raise BlockingIOError("requests are waiting to be read")
            sent = socket.send_fds(self._socket, [data], [given])
            if sent < len(data):
                self._write(data[sent:])
        elif waiting and waiting + len(data) > MAX_WAITING_BYTES:
            raise BlockingIOError(f"{waiting:,} bytes are waiting to be read")
        elif self._decoder.ready:
            self._write(data)
        else:
            self._held.append(data)

    def close(self) -> None:
        """Close the socket; queued messages are dropped."""
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
            self._out.clear()  # recv reports the end
        if not self._out:
            self._loop.remove_writer(self._socket)
            self._writing = False
