"""The process that ends a node whose lease is over."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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


@dataclass
class Dog:
    """A watchdog, which is no child of who has started it."""

    pid: int
    stdin: IO[str]
    stdout: IO[str]

    def says(self, *lines: object) -> None:
        self.stdin.write("".join(f"{each}\n" for each in lines))
        self.stdin.flush()

    @property
    def reason(self) -> str:
        """Why it has ended, once it has."""
        return self.stdout.readline().strip()

    def watches_for(self, seconds: float) -> bool:
        return not select.select([self.stdout], [], [], seconds)[0]


@contextmanager
def watched(until: float) -> Iterator[tuple[subprocess.Popen[str], list[int], Dog]]:
    """A process with two children, and its watchdog."""
    node = subprocess.Popen([sys.executable, "-c", NODE], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    children = [int(each) for each in node.stdout.readline().split()]
    words = bare_program("kernel_mcp.fleet.watchdog", str(node.pid), str(until))
    started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdin is not None
    assert started.stdout is not None
    watchdog = Dog(int(started.stdout.readline()), started.stdin, started.stdout)
    assert started.wait() == 0
    try:
        yield node, children, watchdog
    finally:
        for pid in (node.pid, watchdog.pid, *children):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()
        for pipe in (node.stdout, watchdog.stdin, watchdog.stdout):
            pipe.close()


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def until_looked(watchdog: Dog, count: int) -> None:
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
    with watched(boottime() + LONG_S) as (node, children, watchdog):
        if stop:
            for pid in (node.pid, *children):
                os.kill(pid, signal.SIGSTOP)
        watchdog.says(boottime() + 0.5)
        assert watchdog.reason == "expired"
        assert all(map(gone, (node.pid, *children)))


def test_a_lease_that_goes_on_ends_nothing() -> None:
    with watched(boottime() + LONG_S) as (node, children, watchdog):
        watchdog.says(boottime() + 2.0, boottime() + LONG_S)
        assert watchdog.watches_for(4.0)
        assert not any(map(gone, (node.pid, *children)))


def test_moments_that_are_none_or_earlier_change_nothing() -> None:
    with watched(boottime() + LONG_S) as (_, _, watchdog):
        watchdog.says("nonsense", "nan", boottime() + LONG_S, boottime() - 5)
        assert watchdog.watches_for(2.0)


def test_a_node_that_never_has_a_lease_is_ended_when_its_time_to_start_is_over() -> None:
    with watched(boottime() + 1.0) as (node, children, watchdog):
        assert watchdog.reason == "expired"
        assert all(map(gone, (node.pid, *children)))


def test_what_a_node_has_left_when_it_was_killed_is_ended() -> None:
    with watched(boottime() + LONG_S) as (node, children, watchdog):
        until_looked(watchdog, 3)
        node.kill()
        assert watchdog.reason == "dead"
        assert all(map(gone, children))


def test_a_node_that_closes_its_pipe_is_ended() -> None:
    with watched(boottime() + LONG_S) as (node, children, watchdog):
        watchdog.stdin.close()
        assert watchdog.reason == "left"
        assert all(map(gone, (node.pid, *children)))


def test_signals_that_end_others_do_not_end_it() -> None:
    with watched(boottime() + LONG_S) as (node, _, watchdog):
        until_looked(watchdog, 3)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(watchdog.pid, number)
        node.kill()
        assert watchdog.reason == "dead"


def test_what_is_below_a_process_is_found() -> None:
    with watched(boottime() + LONG_S) as (node, children, _):
        assert sorted(below(node.pid)) == sorted(children)


def test_a_watchdog_is_no_child_of_who_has_started_it() -> None:
    with watched(boottime() + LONG_S) as (node, _, watchdog):
        found = set(below(os.getpid(), 1))
        assert node.pid in found
        assert watchdog.pid not in found
