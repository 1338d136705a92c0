"""How much memory a server that a test has started takes, as Linux counts it."""

from __future__ import annotations

import os
from pathlib import Path


def server_pid() -> int:
    """The server that this process has started last, of those that it has not ended."""
    children = (
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    )
    servers = [
        int(child)
        for child in children
        if b"\0kernel_mcp\0" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return max(servers, key=_started)


def _started(pid: int) -> int:
    """Return when a process was started, in ticks of Linux."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


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
