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
import sys, time
from kernel_mcp.linux.deadline import Deadline
deadline = Deadline()
for moment in map(float, sys.argv[1:]):
    deadline.set(moment)
print("set", flush=True)
while True: time.sleep(0.1)
"""


@contextmanager
def limited(*moments: float) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", SET, *map(str, moments)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "set\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("stop", [False, True], ids=["running", "stopped"])
def test_a_process_ends_at_its_deadline(stop: bool) -> None:
    moment = boottime() + 3.0
    with limited(moment) as process:
        if stop:
            os.kill(process.pid, signal.SIGSTOP)
        assert process.poll() is None
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert boottime() >= moment


def test_a_later_deadline_takes_the_place_of_the_one_before() -> None:
    with limited(boottime() + 1.5, boottime() + 600) as process:
        time.sleep(2.0)
        assert process.poll() is None


def test_a_deadline_that_is_over_ends_at_once() -> None:
    with pytest.raises(AssertionError), limited(boottime() - 5):
        pass
