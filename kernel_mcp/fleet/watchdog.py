"""Watchdog: the process that kills a node whose lease is over, also one that hangs or is stopped.

It uses only the standard library. It is not a child of the node, as Ray kills the children of a
worker that ends. Its exit shows others that no process of the node is left. Each line on its stdin
is the time, by CLOCK_BOOTTIME, until which the node may run.
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
"""Seconds between scans for the node's descendants, which are reparented after its death."""
DEPTH = 4
"""Levels of descendants that are tracked; deeper ones end with the init of their pid namespace."""


def boottime() -> float:
    """Return CLOCK_BOOTTIME in seconds, which counts on during suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class PidfdSet:
    """Processes held by pidfd, so that a reused process id is never killed or awaited."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}

    def hold(self, pid: int) -> bool:
        """Add a process. Return False if there is none."""
        if pid not in self._fds:
            try:
                self._fds[pid] = os.pidfd_open(pid)
            except OSError:
                return False
        return True

    def drop_ended(self) -> None:
        """Remove processes that have ended."""
        for pid, fd in list(self._fds.items()):
            if select.select([fd], [], [], 0)[0]:
                os.close(self._fds.pop(pid))

    def send(self, number: int) -> None:
        """Send a signal to all processes."""
        for fd in self._fds.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, number)

    def wait(self) -> None:
        """Wait until all processes have ended."""
        while self._fds:
            select.select(list(self._fds.values()), [], [], LOOK_S)
            self.drop_ended()


def below(pid: int, depth: int = DEPTH) -> Iterator[int]:
    """Yield the ids of a process's descendants down to `depth`, from /proc.

    Processes that end meanwhile are left out.
    """
    if not depth:
        return
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in map(int, (thread / "children").read_text().split()):
                    yield child
                    yield from below(child, depth - 1)


class LeaseWatchdog:
    """Watches one process until it or its lease ends; see `main`."""

    def __init__(self, pid: int, until: float, deadlines: int) -> None:
        """`until` is the first deadline; later ones are read from the descriptor `deadlines`."""
        self._pid = pid
        self._until = until
        self._deadlines = deadlines
        self._node = PidfdSet()
        self._node_found = self._node.hold(pid)
        self._descendants = PidfdSet()
        self._rest = b""
        self._deadline_read = False
        """True once a deadline was read. The first one replaces `until`, which is for the start."""

    def run(self) -> str:
        """Watch until the node ends; then kill all its processes and wait for their end.

        Returns the reason: `dead` if it had ended, `left` if it closed the pipe, or `expired`.
        """
        reason = "dead" if not self._node_found else self._watch()
        if reason == "expired":
            self._node.send(signal.SIGSTOP)  # it starts no processes while they are counted
        self._track_descendants()
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
            ready = select.select([fd, self._deadlines], [], [], min(left, LOOK_S))[0]
            if fd in ready:
                return "dead"
            if self._deadlines in ready and not self._read():
                return "left"
            self._track_descendants()

    def _track_descendants(self) -> None:
        """Track the current descendants of the node, as they are reparented after its death."""
        self._descendants.drop_ended()
        for pid in below(self._pid):
            self._descendants.hold(pid)

    def _read(self) -> bool:
        """Read deadlines. Return False at the end of the pipe: the node has ended or closed it."""
        data = os.read(self._deadlines, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                moment = float(line)
                if moment == moment:  # not NaN
                    self._until = max(self._until, moment) if self._deadline_read else moment
                    self._deadline_read = True
        return bool(data)


def main(arguments: Sequence[str]) -> int:
    """Start watching the process `arguments[0]` until `arguments[1]`, or the times on stdin.

    A forked child watches. Its process id is the first line on stdout, and the reason for its end
    the second. Returns the exit status.
    """
    if pid := os.fork():
        print(pid, flush=True)
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends only after the node
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    pid, until = int(arguments[0]), float(arguments[1])
    reason = LeaseWatchdog(pid, until, sys.stdin.fileno()).run()
    with contextlib.suppress(OSError):  # only tests read it
        os.write(1, f"{reason}\n".encode())
    return 0
