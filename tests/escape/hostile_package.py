"""Code of a package that is imported in a template, and what it can reach from there.

It says so on standard error, which the server keeps as what the template has written.
"""

import ctypes
import json
import os
import platform
import sys
from collections.abc import Callable

REFUSED = {
    "x86_64": {"bpf": 321, "userfaultfd": 323, "ptrace": 101, "keyctl": 250, "io_uring_setup": 425},
    "aarch64": {
        "bpf": 280,
        "userfaultfd": 282,
        "ptrace": 117,
        "keyctl": 219,
        "io_uring_setup": 425,
    },
}
PTRACE_ATTACH = 16
_libc = ctypes.CDLL(None, use_errno=True)


def _attempt(reach: Callable[[], object]) -> str:
    try:
        return f"ESCAPED: {reach()}"
    except OSError as error:
        return f"held: {error}"


def _call(number: int, first: int, second: int) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), ctypes.c_long(first), ctypes.c_long(second))
    if result < 0:
        if ctypes.get_errno() != 1:  # EPERM
            return -ctypes.get_errno()
        raise PermissionError(1, "Operation not permitted")
    return result


def attacks(init: str) -> dict[str, str]:
    """On the process that sees the folders of all sessions, and on Linux."""
    found = {
        "folders": _attempt(lambda: os.open(f"/proc/{init}/root/sessions", os.O_RDONLY)),
        "root": _attempt(lambda: os.open(f"/proc/{init}/root", os.O_RDONLY)),
        "mounts": _attempt(lambda: os.open(f"/proc/{init}/ns/mnt", os.O_RDONLY)),
        "memory": _attempt(lambda: os.open(f"/proc/{init}/mem", os.O_RDWR)),
        "memory map": _attempt(lambda: os.open(f"/proc/{init}/maps", os.O_RDONLY)),
        "descriptors": _attempt(lambda: os.open(f"/proc/{init}/fd/0", os.O_RDONLY)),
        "environment": _attempt(lambda: os.open(f"/proc/{init}/environ", os.O_RDONLY)),
    }
    for name, number in REFUSED.get(platform.machine(), {}).items():
        first = PTRACE_ATTACH if name == "ptrace" else 0
        found[f"call {name}"] = _attempt(lambda: _call(number, first, int(init)))  # noqa: B023
    return found


if __name__ != "tests.escape.hostile_package":
    print("\nFOUND", json.dumps(attacks("1")), "FOUND", file=sys.stderr, flush=True)
