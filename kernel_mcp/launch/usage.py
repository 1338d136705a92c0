"""What a process and everything it started use, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kernel_mcp.launch.base import Usage

_TICKS = os.sysconf("SC_CLK_TCK")
_MEMORY = (b"RssAnon:", b"RssShmem:")
MAX_PROCESSES = 10_000


def tree_usage(root: int) -> Usage:
    """Processor seconds and resident memory of `root` and its descendants; zeros when it is gone.

    Children that have ended count once their parent has waited for them.
    """
    cpu_s, memory = 0.0, 0
    for pid in tree(root):
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            status = Path(f"/proc/{pid}/status").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # after the command name in parentheses: utime, stime, cutime, cstime are fields 14 to 17
        fields = stat.rpartition(b")")[2].split()
        cpu_s += sum(map(int, fields[11:15])) / _TICKS
        for line in status.splitlines():
            if line.startswith(_MEMORY):
                memory += int(line.split()[1]) * 1024
    return Usage(cpu_s, memory)


def tree(root: int) -> Iterator[int]:
    """`root` and its descendants, as far as they can be found while they come and go."""
    waiting = [root]
    for _ in range(MAX_PROCESSES):
        if not waiting:
            return
        pid = waiting.pop()
        yield pid
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_bytes().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
