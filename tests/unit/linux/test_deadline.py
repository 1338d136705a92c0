"""The moment at which Linux ends a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kernel_mcp.fleet.watchdog import boottime

PATIENCE_S = 60
SET = """
import os, signal, sys, time
from kernel_mcp.fleet.watchdog import boottime
from kernel_mcp.linux.deadline import Deadline
deadline, begin = Deadline(), boottime()
for seconds in map(float, sys.argv[2:]):
    deadline.set(begin + seconds)
print(begin + seconds, flush=True)
if sys.argv[1] == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
while True: time.sleep(0.1)
"""


@contextmanager
def limited(state: str, *seconds: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that sets itself deadlines, counted from when it sets them, and the last one."""
    words = [sys.executable, "-c", SET, state, *map(str, seconds)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_process_ends_at_its_deadline(state: str) -> None:
    with limited(state, 1.0) as (process, moment):
        if state == "stopped":
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert boottime() >= float(moment)


def test_a_later_deadline_takes_the_place_of_the_one_before() -> None:
    with limited("running", 1.5, 600) as (process, moment):
        time.sleep(max(0.0, float(moment) - 600 + 2.0 - boottime()))
        assert process.poll() is None


def test_a_deadline_that_is_over_ends_at_once() -> None:
    with limited("running", -5) as (process, moment):
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert moment == ""
