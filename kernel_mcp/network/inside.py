"""`inside NAMESPACE SOCKET PLACES`: listen in the network namespace of a kernel that has started.

Kernels that a template forks get their listening sockets from their init. A cold kernel's are made
by this program, started by `bare_program`, once it is ready and has run no code of a session.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence

from kernel_specs.template import linux

_NS_GET_USERNS = 0xB701  # <linux/nsfs.h>


def main(argv: Sequence[str]) -> int:
    """Enter the namespace that a descriptor holds; send what listens there over another."""
    namespace, way = int(argv[0]), int(argv[1])
    if os.geteuid() != 0:
        linux.setns(fcntl.ioctl(namespace, _NS_GET_USERNS), linux.CLONE_NEWUSER)
    linux.setns(namespace, linux.CLONE_NEWNET)
    linux.send_listeners(way, json.loads(argv[2]))
    return 0
