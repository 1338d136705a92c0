"""The memory of processes, read from /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kernel_mcp.limits.meter import Memory, closely, files_in_memory, plainly, total
from kernel_mcp.linux.proc import tree
from kernel_mcp.units import MIB

HOLDER = "import sys; data = b'x' * (64 << 20); print(flush=True); sys.stdin.read()"
SHARERS = """
import os
data = b"x" * (64 << 20)
for _ in range(3):
    if not os.fork():
        os.read(0, 1)
        os._exit(0)
print(flush=True)
os.read(0, 1)
"""


@contextmanager
def running(code: str) -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            for pid in list(tree(process.pid)):
                os.kill(pid, signal.SIGKILL)


def held(pids: list[int], look: object = plainly) -> int:
    assert callable(look)
    return total(map(look, pids), files_in_memory(pids))


@pytest.mark.parametrize("look", [plainly, closely])
def test_the_private_memory_of_several_processes_adds_up(look: object) -> None:
    with running(HOLDER) as one, running(HOLDER) as other:
        assert 128 * MIB < held([one, other], look) < 200 * MIB
        assert 64 * MIB < held([one], look) < 100 * MIB


def test_what_processes_share_counts_once_on_a_close_look() -> None:
    with running(SHARERS) as parent:
        family = list(tree(parent))
        assert len(family) == 4
        assert held(family) > 4 * 64 * MIB
        assert 63 * MIB < held(family, closely) < 100 * MIB


def test_processes_that_are_gone_hold_nothing() -> None:
    assert held([]) == 0
    assert plainly(2**22 + 1) == closely(2**22 + 1) == Memory()
