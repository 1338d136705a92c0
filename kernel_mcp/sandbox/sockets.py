"""Sockets that lead to a kernel."""

from __future__ import annotations

import socket
from contextlib import suppress

_SO_PASSRIGHTS = 83
"""<asm-generic/socket.h> of Linux 6.16."""


def take_no_descriptors(end: socket.socket) -> None:
    """Refuse descriptors that are sent to this end of a Unix socket, where Linux can do that.

    Else a kernel could have the server be the last to close something whose end takes long. Before
    Linux 6.16 nothing but its system call filter keeps it from making such a thing.
    """
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
