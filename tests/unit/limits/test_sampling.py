"""What is read off /proc about the memory of processes."""

from __future__ import annotations

import subprocess
import sys

from kernel_mcp.limits.sampling import held_memory
from kernel_mcp.settings import MIB

HOLDER = "import sys; data = b'x' * (64 << 20); print(flush=True); sys.stdin.read()"


def test_the_private_memory_of_several_processes_adds_up() -> None:
    holders = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None
            holder.stdout.readline()
        pids = [holder.pid for holder in holders]
        for closely in (False, True):
            assert 128 * MIB < held_memory(pids, closely=closely) < 200 * MIB
        assert 64 * MIB < held_memory(pids[:1]) < 100 * MIB
    finally:
        for holder in holders:
            holder.communicate()


def test_processes_that_are_gone_hold_nothing() -> None:
    assert held_memory([]) == 0
    assert held_memory([2**22 + 1]) == 0
