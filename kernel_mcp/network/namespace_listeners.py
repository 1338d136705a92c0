"""Program `namespace_listeners NAMESPACE SOCKET ADDRESSES`: create listeners for a running kernel.

The listeners are in the kernel's network namespace. Kernels forked from a template get theirs from
their init. For a kernel that was started cold this program creates them. `bare_program` starts it
when the kernel is ready and has not run code of a session yet.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence

from kernel_specs import linux

_NS_GET_USERNS = 0xB701  # <linux/nsfs.h>


def main(argv: Sequence[str]) -> int:
    """Enter the namespace of descriptor `argv[0]`; send new listeners over the socket `argv[1]`.

    `argv[2]` is the JSON list of addresses to listen on. Returns the exit status.
    """
    namespace, way = int(argv[0]), int(argv[1])
    if os.geteuid() != 0:
        linux.setns(fcntl.ioctl(namespace, _NS_GET_USERNS), linux.CLONE_NEWUSER)
    linux.setns(namespace, linux.CLONE_NEWNET)
    linux.send_listeners(way, json.loads(argv[2]))
    return 0
