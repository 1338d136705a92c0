"""The process that ends a node whose lease is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kernel_mcp.fleet.watchdog import below, boottime
from kernel_mcp.linux.process import bare_program

NODE = """
import subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in "12"]
print(*(child.pid for child in children), flush=True)
time.sleep(600)
"""
LONG_S = 600.0


@contextmanager
def watched(
    until: float,
) -> Iterator[tuple[subprocess.Popen[str], list[int], subprocess.Popen[str]]]:
    """A process with two children, and its watchdog."""
    node = subprocess.Popen([sys.executable, "-c", NODE], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    children = [int(each) for each in node.stdout.readline().split()]
    words = bare_program("kernel_mcp.fleet.watchdog", str(node.pid), str(until))
    watchdog = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield node, children, watchdog
    finally:
        for pid in (node.pid, watchdog.pid, *children):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (node, watchdog):
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def said(watchdog: subprocess.Popen[str]) -> str:
    assert watchdog.stdout is not None
    return watchdog.stdout.readline().strip()


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def until_looked(watchdog: subprocess.Popen[str], count: int) -> None:
    """Wait until the watchdog holds so many processes."""
    for _ in range(6000):
        links = []
        for fd in Path(f"/proc/{watchdog.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                links.append(str(fd.readlink()))
        if sum("pidfd" in each for each in links) >= count:
            return
        time.sleep(0.01)
    pytest.fail("the watchdog does not look")


@pytest.mark.parametrize("stop", [False, True], ids=["running", "stopped"])
def test_a_lease_that_is_over_ends_the_node_and_all_below_it(stop: bool) -> None:
    with watched(boottime() + 1.0) as (node, children, watchdog):
        if stop:
            for pid in (node.pid, *children):
                os.kill(pid, signal.SIGSTOP)
        assert said(watchdog) == "expired"
        assert all(map(gone, (node.pid, *children)))


def test_a_lease_that_goes_on_ends_nothing() -> None:
    with watched(boottime() + 2.0) as (node, children, watchdog):
        assert watchdog.stdin is not None
        watchdog.stdin.write(f"{boottime() + LONG_S}\n")
        watchdog.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            watchdog.wait(4.0)
        assert not any(map(gone, (node.pid, *children)))


def test_moments_that_are_none_or_earlier_change_nothing() -> None:
    with watched(boottime() + LONG_S) as (_, _, watchdog):
        assert watchdog.stdin is not None
        watchdog.stdin.write(f"nonsense\nnan\n{boottime() + LONG_S}\n{boottime() - 5}\n")
        watchdog.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            watchdog.wait(2.0)


def test_the_first_lease_counts_and_not_the_time_that_a_start_may_take() -> None:
    with watched(boottime() + LONG_S) as (node, children, watchdog):
        assert watchdog.stdin is not None
        watchdog.stdin.write(f"{boottime() + 0.5}\n")
        watchdog.stdin.flush()
        assert said(watchdog) == "expired"
        assert all(map(gone, (node.pid, *children)))


def test_what_a_node_has_left_when_it_was_killed_is_ended() -> None:
    with watched(boottime() + LONG_S) as (node, children, watchdog):
        until_looked(watchdog, 3)
        node.kill()
        assert said(watchdog) == "dead"
        assert all(map(gone, children))


def test_a_node_that_closes_its_pipe_is_ended() -> None:
    with watched(boottime() + LONG_S) as (node, children, watchdog):
        assert watchdog.stdin is not None
        watchdog.stdin.close()
        assert said(watchdog) == "left"
        assert all(map(gone, (node.pid, *children)))


def test_signals_that_end_others_do_not_end_it() -> None:
    with watched(boottime() + LONG_S) as (node, _, watchdog):
        until_looked(watchdog, 3)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            watchdog.send_signal(number)
        node.kill()
        assert said(watchdog) == "dead"


def test_what_is_below_a_process_is_found() -> None:
    with watched(boottime() + LONG_S) as (node, children, watchdog):
        assert sorted(below(node.pid)) == sorted(children)
        assert watchdog.pid in set(below(os.getpid()))
