"""How much memory a server that a test has started takes, as Linux counts it."""

from __future__ import annotations

import os
from pathlib import Path


def server_pid() -> int:
    """The one server that this process has started and not ended."""
    children = (
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    )
    [pid] = [
        int(child)
        for child in children
        if b"\0kernel_mcp\0" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return pid


def status_bytes(pid: int, field: str) -> int:
    """A field of `/proc/PID/status` that counts kB, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def forget_peak(pid: int) -> None:
    """Let `VmHWM` of a process begin anew."""
    fd = os.open(f"/proc/{pid}/clear_refs", os.O_WRONLY)
    try:
        os.write(fd, b"5")
    finally:
        os.close(fd)
