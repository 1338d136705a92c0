"""Program `namespace_connections NAMESPACE SOCKET ADDRESSES`: connect to a starting kernel.

It waits until the kernel listens, so that no process stays between the kernel and the server.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Sequence
from typing import TypeAlias, overload

from kernel_specs import linux

Address: TypeAlias = "str | list[str | int]"

_NS_GET_USERNS = 0xB701  # <linux/nsfs.h>
PAUSE_S = 0.01
"""Seconds between attempts: nothing reports that another process listens."""
LAST_TRIES = 50
"""Attempts for the last address: that of stdin, which a kernel may lack."""


def main(argv: Sequence[str]) -> int:
    """Connect to all addresses, and send the connections over the socket `argv[1]`.

    `argv[2]` is a JSON list of addresses: paths, or pairs of host and port. For pairs the program
    enters the network namespace of descriptor `argv[0]`. It retries until it is killed; the last
    address, after the others, only `LAST_TRIES` times. It is left out if nobody listens there.
    Returns the exit status.
    """
    namespace, way = int(argv[0]), int(argv[1])
    *addresses, last = json.loads(argv[2])
    if namespace >= 0:
        if os.geteuid() != 0:
            linux.setns(fcntl.ioctl(namespace, _NS_GET_USERNS), linux.CLONE_NEWUSER)
        linux.setns(namespace, linux.CLONE_NEWNET)
    made = [_connected(each) for each in addresses]
    made += filter(None, [_connected(last, LAST_TRIES)])
    with socket.socket(fileno=os.dup(way)) as line:
        socket.send_fds(line, [b"connections"], [each.fileno() for each in made])
    return 0


def _connect_to_path(end: socket.socket, path: str) -> None:
    """Connect to a socket at a path whose last part code of a kernel may have made a link."""
    found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        end.connect(f"/proc/self/fd/{found}")
    finally:
        os.close(found)


@overload
def _connected(address: Address) -> socket.socket: ...
@overload
def _connected(address: Address, tries: int) -> socket.socket | None: ...
def _connected(address: Address, tries: float = math.inf) -> socket.socket | None:
    """Return a connected socket; None if nobody listens at any of so many attempts."""
    family, other = socket.AF_INET, address
    if isinstance(address, str):
        family, other = socket.AF_UNIX, ":".join(address.rsplit("-", 1))
    while True:
        end = socket.socket(family, socket.SOCK_STREAM)
        try:
            if isinstance(address, str):
                _connect_to_path(end, address)
            else:
                end.connect(tuple(address))
        except (ConnectionRefusedError, FileNotFoundError):
            end.close()
            address, other = other, address  # tslab names its sockets FOLDER/k:1, others k-1
            tries -= 1
            if tries <= 0:
                return None
            time.sleep(PAUSE_S)
        else:
            return end
