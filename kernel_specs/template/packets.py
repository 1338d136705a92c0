"""JSON messages with descriptors, over SOCK_SEQPACKET Unix sockets."""

from __future__ import annotations

import array
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_specs.linux import close_all

PACKET_BYTES = 128 * 1024
MAX_FDS = 64

_FD_BYTES = array.array("i").itemsize


def send(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message; the receiver gets copies of `fds`.

    Raises ValueError for a message of more than `PACKET_BYTES`, OSError.
    """
    content = json.dumps(message).encode()
    if len(content) > PACKET_BYTES:
        raise ValueError(f"a message has at most {PACKET_BYTES} bytes")
    extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([content], extra)


class DescriptorsLost(ValueError):
    """A message has lost its descriptors: this process has reached its limit of open files."""

    def __init__(self, message: dict[str, Any]) -> None:
        super().__init__("there is no room for the descriptors of a message")
        self.message = message


def receive(sock: socket.socket, *, wait: bool = True) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors (close-on-exec); None if the peer has closed.

    Raises ValueError for a malformed message, DescriptorsLost if there is no room for its
    descriptors, BlockingIOError if there is none and `wait` is False, OSError.
    """
    space = socket.CMSG_SPACE(MAX_FDS * _FD_BYTES)
    flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
    try:
        content, extra, state, _ = sock.recvmsg(PACKET_BYTES, space, flags)
    except ConnectionResetError:
        return None
    fds = array.array("i")
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    try:
        if not content:
            close_all(fds)
            return None
        if state & socket.MSG_TRUNC:
            raise ValueError("a message was cut")
        message = json.loads(content)
        if not isinstance(message, dict):
            raise ValueError("a message is not an object")
        if state & socket.MSG_CTRUNC:
            raise DescriptorsLost(message)
    except ValueError:
        close_all(fds)
        raise
    return message, list(fds)
