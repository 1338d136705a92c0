"""System V shared memory of another namespace is counted while nobody has it attached."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kernel_mcp.config.values import MIB
from kernel_mcp.limits import segments
from kernel_mcp.limits.segments import Segments

HOLDER = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
segment = libc.shmget(0, 8 << 20, 0o1600)
address = libc.shmat(segment, None, 0)
ctypes.memset(address, 1, 8 << 20)
libc.shmdt(ctypes.c_void_p(address))
print(flush=True)
os.read(0, 1)
"""


@pytest.mark.parametrize("namespaces", [["--unshare-user", "--unshare-ipc"], ["--unshare-all"]])
def test_a_detached_segment_counts(namespaces: list[str]) -> None:
    with subprocess.Popen(
        ["bwrap", "--bind", "/", "/", *namespaces, sys.executable, "-I", "-S", "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = Segments()
        try:
            members = [process.pid, *_children(process.pid)]
            assert found.held(members) == 8 * MIB
            assert found.held(members) == 8 * MIB
        finally:
            found.close()
            process.kill()


def test_a_table_that_could_not_be_opened_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = os.memfd_create("table")
    os.write(table, b"key rss\n0 4096\n")
    failures: list[Exception] = [OSError("it has ended"), OSError(24, "Too many open files")]

    def opened(_member: int) -> int:
        if failures:
            raise failures.pop()
        return table

    monkeypatch.setattr(segments, "_opened", opened)
    monkeypatch.setattr(segments, "_member", lambda _processes: 1)
    monkeypatch.setattr(segments, "RETRY", 0)
    found = Segments()
    assert [found.held([1]) for _ in range(4)] == [0, 0, 4096, 4096]
    monkeypatch.setattr(segments, "RETRY", 1e9)
    found.close()
    assert found.held([1]) == 0


def test_without_a_namespace_of_its_own_nothing_counts() -> None:
    found = Segments()
    assert found.held([os.getpid(), 2**22 + 1]) == 0
    found.close()


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        below = [int(child) for child in file.read().split()]
    return below + [found for child in below for found in _children(child)]
