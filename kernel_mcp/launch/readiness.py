"""The kernel's word that it is ready, and with it its process id on the host."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import anyio

from kernel_mcp.errors import LaunchError
from kernel_mcp.sandbox.sockets import take_no_descriptors

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid, as the receiver's namespaces number them."""
MESSAGE_BYTES = 64 * 1024


class ReadinessChannel:
    """A pair of connected sockets: one end for the kernel, one to wait on.

    The operating system adds the sender's process id, translated into this namespace.
    """

    def __init__(self) -> None:
        kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
        self._host, guest = socket.socketpair(socket.AF_UNIX, kind)
        self._host.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        take_no_descriptors(self._host)
        self._host.setblocking(False)
        self.guest_fd = guest.detach()
        """To be passed to the process and closed by whoever starts it."""
        self.said: dict[str, Any] = {}
        """All that came with the word."""

    async def wait(self) -> int:
        """Return the host's process id of the ready kernel.

        Raises LaunchError when it says that it failed or closes its end without a word.
        """
        await anyio.wait_readable(self._host)
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            packet, extra, _, _ = self._host.recvmsg(MESSAGE_BYTES, space)
        except ConnectionResetError:
            packet, extra = b"", []
        if not packet:
            raise LaunchError("the kernel ended before it was ready")
        said = _parse(packet)
        if said.get("ready") is not True:
            raise LaunchError(f"the kernel could not start: {str(said.get('error'))[:2000]}")
        for level, kind, data in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                self.said = said
                return int(_CREDENTIALS.unpack(data)[0])
        raise LaunchError("the kernel's readiness came without credentials")

    def close(self) -> None:
        """Close the host's end."""
        self._host.close()


def _parse(packet: bytes) -> dict[str, Any]:
    try:
        said = json.loads(packet)
    except (ValueError, RecursionError):
        said = None
    return said if isinstance(said, dict) else {"error": "its readiness message is not JSON"}
