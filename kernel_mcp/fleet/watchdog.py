"""The process that ends a node whose lease is over, whatever the node itself is doing.

It has the standard library alone and does nothing but wait: the node may hang, be stopped or be
killed. It is no child of the node, as Ray kills those of a worker that ends. It ends when nothing
of the node runs any more, which is how others know. Lines on its stdin are the moments, by
CLOCK_BOOTTIME, until which the node may go on.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

LOOK_S = 1.0
"""How often the node's processes are looked at, as they are no longer its own after its death."""
DEPTH = 4
"""Levels below the node on which processes are held: what is below those ends with the init of its
pid namespace."""


def boottime() -> float:
    """Seconds that count on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Held:
    """Processes by pidfd: what is killed and waited for is never another of the same number."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}

    def hold(self, pid: int) -> bool:
        """Hold a process; False where there is none."""
        if pid not in self._fds:
            try:
                self._fds[pid] = os.pidfd_open(pid)
            except OSError:
                return False
        return True

    def drop_ended(self) -> None:
        """Let go of those that have ended."""
        for pid, fd in list(self._fds.items()):
            if select.select([fd], [], [], 0)[0]:
                os.close(self._fds.pop(pid))

    def send(self, number: int) -> None:
        """Send all of them a signal."""
        for fd in self._fds.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, number)

    def wait(self) -> None:
        """Wait until all have ended."""
        while self._fds:
            select.select(list(self._fds.values()), [], [], LOOK_S)
            self.drop_ended()


def below(pid: int, depth: int = DEPTH) -> Iterator[int]:
    """The processes below one, as /proc shows them; those that end meanwhile are left out."""
    if not depth:
        return
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in map(int, (thread / "children").read_text().split()):
                    yield child
                    yield from below(child, depth - 1)


class Watchdog:
    """Watches one process until it or its lease ends; see `main`."""

    def __init__(self, pid: int, until: float, lines: int) -> None:
        """`lines` is the descriptor that moments come from, `until` the first."""
        self._pid = pid
        self._until = until
        self._lines = lines
        self._node = Held()
        self._there = self._node.hold(pid)
        self._descendants = Held()
        self._rest = b""
        self._told = False
        """Whether the node has a lease: before that it only has some time to start."""

    def run(self) -> str:
        """Why it ended: `dead`, `left` or `expired`. Nothing of the node runs then."""
        reason = "dead" if not self._there else self._watch()
        if reason == "expired":
            self._node.send(signal.SIGSTOP)  # it starts nothing while its processes are counted
        self._look()
        self._node.send(signal.SIGKILL)
        self._descendants.send(signal.SIGKILL)
        self._node.wait()
        self._descendants.wait()
        return reason

    def _watch(self) -> str:
        while True:
            left = self._until - boottime()
            if left <= 0:
                return "expired"
            (fd,) = self._node._fds.values()
            ready = select.select([fd, self._lines], [], [], min(left, LOOK_S))[0]
            if fd in ready:
                return "dead"
            if self._lines in ready and not self._read():
                return "left"
            self._look()

    def _look(self) -> None:
        """Hold what is below the node now, whose parent is another one after its death."""
        self._descendants.drop_ended()
        for pid in below(self._pid):
            self._descendants.hold(pid)

    def _read(self) -> bool:
        """Take in what has come; False at its end, when the node has ended or closed it."""
        data = os.read(self._lines, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                moment = float(line)
                if moment == moment:  # no number is not
                    self._until = max(self._until, moment) if self._told else moment
                    self._told = True
        return bool(data)


def main(arguments: Sequence[str]) -> int:
    """Watch the process of the first argument until the moment of the second, or those of stdin.

    Another process does, whose number is the first line of stdout.
    """
    if pid := os.fork():
        print(pid, flush=True)
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with what it watches
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    pid, until = int(arguments[0]), float(arguments[1])
    reason = Watchdog(pid, until, sys.stdin.fileno()).run()
    with contextlib.suppress(OSError):  # nobody hears it but tests
        os.write(1, f"{reason}\n".encode())
    return 0
