"""The use of processes is summed, and kept when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_mcp.linux import proc
from kernel_mcp.linux.proc import (
    Process,
    ProcessMeter,
    is_zombie,
    memory_lines,
    orphans,
    private_bytes,
    set_oom_score,
    tree,
)
from kernel_mcp.units import MIB

FIRST_THREAD_ENDS = """
import ctypes, os, threading
data = b"x" * (64 << 20)
def wait():
    print(flush=True)
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=wait).start()
ctypes.CDLL(None).syscall(60, 0)
"""
DAEMON = """
import os
if not os.fork():
    print(os.getpid(), flush=True)
    os.read(0, 1)
os._exit(0)
"""


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """Own time and that of waited children by process id, in ticks; others do not exist."""
    found: dict[int, tuple[int, int]] = {}

    def ticks(pid: int) -> tuple[Process, int, int]:
        if pid not in found:
            raise ProcessLookupError
        return (pid, 7), *found[pid]

    monkeypatch.setattr(proc, "_ticks", ticks)
    monkeypatch.setattr(proc, "_TICKS", 1)
    monkeypatch.setattr(proc, "memory_lines", lambda *_args: {})
    return found


def test_time_of_a_child_that_nobody_waits_for_stays(figures: dict[int, tuple[int, int]]) -> None:
    meter = ProcessMeter()
    figures |= {1: (10, 0), 2: (5, 0)}
    assert meter.usage([1, 2]).cpu_s == 15
    del figures[2]
    assert meter.usage([1]).cpu_s == 15
    figures[3] = (4, 0)
    assert meter.usage([1, 3]).cpu_s == 19
    del figures[3]
    assert meter.usage([1]).cpu_s == 19


def test_time_of_a_child_that_was_waited_for_counts_once(
    figures: dict[int, tuple[int, int]],
) -> None:
    meter = ProcessMeter()
    figures |= {1: (10, 0), 2: (5, 0)}
    meter.usage([1, 2])
    del figures[2]
    figures[1] = (10, 6)
    assert meter.usage([1]).cpu_s == 16


def test_a_process_that_is_missed_once_counts_once(figures: dict[int, tuple[int, int]]) -> None:
    meter = ProcessMeter()
    figures |= {1: (10, 0), 2: (5, 0)}
    meter.usage([1, 2])
    assert meter.usage([1]).cpu_s == 15
    assert meter.usage([1, 2]).cpu_s == 15


def test_the_time_of_real_processes_adds_up() -> None:
    meter = ProcessMeter()
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = meter.usage([process.pid]).cpu_s
        assert used >= 0.29
        process.kill()
    assert meter.usage([]).cpu_s == used


def test_memory_is_found_when_the_first_thread_has_ended() -> None:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", FIRST_THREAD_ENDS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while "(zombie)" not in (status := _status(process.pid)):
            assert status
        assert memory_lines(process.pid, "status", [b"RssAnon:"])[b"RssAnon:"] > 64 * MIB
        assert ProcessMeter().usage([process.pid]).memory_bytes > 64 * MIB
        process.kill()


def _status(pid: int) -> str:
    with open(f"/proc/{pid}/status") as file:
        return file.read()


def test_daemons_are_found_by_the_session_of_who_started_them() -> None:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", DAEMON],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        try:
            assert list(tree(process.pid)) == [process.pid]
            assert list(orphans([process.pid])) == [daemon]
            assert list(orphans([os.getpid()])) == []
        finally:
            os.kill(daemon, signal.SIGKILL)


def test_a_process_that_nobody_has_waited_for_is_a_zombie() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not is_zombie(child.pid)
    assert 0 < private_bytes(child.pid) < 64 * MIB
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_zombie(child.pid)
    child.communicate()
    assert is_zombie(child.pid)  # gone
    with pytest.raises(OSError, match="No such file"):
        private_bytes(child.pid)


def test_the_score_of_a_process_is_set_unless_its_pid_was_reused() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        pidfd = os.pidfd_open(child.pid)
        set_oom_score(child.pid, pidfd, 900)
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "900\n"
        child.kill()
        child.wait()
        with pytest.raises(ProcessLookupError):
            set_oom_score(os.getpid(), pidfd, 900)
        os.close(pidfd)
