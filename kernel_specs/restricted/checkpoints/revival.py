"""What a process needs to be the kernel that it is a copy of: files, loops and random state."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import io
import os
import random
import selectors
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from kernel_specs.restricted.checkpoints.hindrances import Shared
from kernel_specs.restricted.checkpoints.parking import FIRST_FD

_MADE = os.O_CREAT | os.O_EXCL | os.O_TRUNC
_MEMORY = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")
TICK_S = 0.02
"""A file that is written to twice within a tick of Linux, of 10 ms at most, has the same time."""


@dataclass(frozen=True)
class File:
    """An open file: its descriptor, flags and offset, which it is, and what changes with it."""

    fd: int
    flags: int
    offset: int
    identity: tuple[int, int]
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, fd: int) -> File | None:
        """That of a descriptor, None where it is no regular file. Raises OSError."""
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return None
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            age_s = time.time() - max(found.st_mtime, found.st_ctime)
            if 0 <= age_s < TICK_S:
                time.sleep(TICK_S - age_s)
        offset = os.lseek(fd, 0, os.SEEK_CUR)
        return cls(fd, flags, offset, (found.st_dev, found.st_ino), _stamp(found))

    @property
    def there(self) -> bool:
        """Whether the descriptor still is that file: packages close some in a forked process."""
        try:
            found = os.fstat(self.fd)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.identity

    @property
    def name(self) -> str:
        """Its path; empty where it is memory."""
        path = os.readlink(f"/proc/self/fd/{self.fd}")  # noqa: PTH115
        return "" if path.startswith(_MEMORY) else path

    def doubtful(self, *, beside: bool) -> bool:
        """Whether it was written to since; `beside` others that go on doing so, it will be."""
        if self.flags & os.O_ACCMODE == os.O_RDONLY:
            return False
        return beside or _stamp(os.fstat(self.fd)) != self.stamp

    def close(self) -> None:
        """Have nothing be read, written or locked by this descriptor, which stays taken."""
        nothing = os.open("/", os.O_PATH | os.O_CLOEXEC)
        os.dup2(nothing, self.fd, inheritable=False)
        os.close(nothing)

    def reopen(self) -> None:
        """Open it at its descriptor for this process alone, where it was.

        A file that cannot be opened again shares its position with the kernels before.
        """
        try:
            fresh = os.open(f"/proc/self/fd/{self.fd}", self.flags & ~_MADE | os.O_CLOEXEC)
        except OSError:
            with contextlib.suppress(OSError):
                os.lseek(self.fd, self.offset, os.SEEK_SET)
            return
        try:
            os.lseek(fresh, self.offset, os.SEEK_SET)
            os.dup2(fresh, self.fd, inheritable=os.get_inheritable(self.fd))
        finally:
            os.close(fresh)


def open_files() -> list[File]:
    """The regular files that are open."""
    found = []
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        with contextlib.suppress(OSError):
            if fd >= FIRST_FD and (file := File.of(fd)) is not None:
                found.append(file)
    return found


def close_doubtful(files: Iterable[File], *, beside: bool) -> tuple[list[File], list[str]]:
    """The files that are as they were, and the paths of the others, which are closed.

    What a library such as that of a database knows of a file that has another content by now
    would be written over it. Python's own file objects know nothing but a position.
    """
    doubtful = {file.fd for file in files if file.name and file.doubtful(beside=beside)}
    if doubtful:
        streams = [each for each in gc.get_objects() if type(each) is io.FileIO]
        doubtful -= {each.fileno() for each in streams if not each.closed}
    closed = [file.name for file in files if file.fd in doubtful]
    for file in files:
        if file.fd in doubtful:
            file.close()
    return [file for file in files if file.fd not in doubtful], closed


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass(frozen=True)
class State:
    """What a fork changes, as it was before."""

    files: list[File]
    random_state: Any
    shared: tuple[Shared, ...]

    @classmethod
    def now(cls, shared: tuple[Shared, ...]) -> State:
        """Take note of it."""
        return cls(open_files(), random.getstate(), shared)

    def part_files(self) -> None:
        """Have files open for this process alone: whoever shares one holds its flock(2), too."""
        for file in self.files:
            if file.there:
                file.reopen()

    def restore(self, *, branch: bool) -> list[str]:
        """Have it again; a branch runs beside others, and draws other random numbers.

        The paths of files that were closed for that, see `close_doubtful`.
        """
        there = [file for file in self.files if file.there]
        same, closed = close_doubtful(there, beside=branch)
        for file in same:
            file.reopen()
        if branch:
            random.seed()
            if numpy_random := sys.modules.get("numpy.random"):
                numpy_random.seed()
        else:
            random.setstate(self.random_state)  # Python seeds it in every child
            for piece in self.shared:
                piece.restore()
        main = threading.main_thread()
        if hasattr(main, "_set_native_id"):
            main._set_native_id()
        lose_children()
        return closed


def vary(values: Iterable[Any]) -> None:
    """Seed the random generators among variables anew."""
    generator = getattr(sys.modules.get("numpy.random"), "Generator", None)
    old = getattr(sys.modules.get("numpy.random"), "RandomState", None)
    for value in values:
        if type(value) is random.Random:
            value.seed()
        elif generator is not None and type(value) is generator:
            kind = type(value.bit_generator)
            value.bit_generator.state = kind().state
        elif old is not None and type(value) is old:
            value.seed()


# Children of the kernel before: the host has killed them, and this process may not wait for them.


class _Lost:
    """Which processes are not children of this one: those that are older."""

    before = 0
    installed = False


def lose_children() -> None:
    """Have `Popen` objects of earlier processes say that those were killed, not that all went well.

    Python takes a child that it cannot wait for as one that has ended with 0.
    """
    _Lost.before = os.getpid()
    if _Lost.installed:
        return
    _Lost.installed = True
    poll, wait = subprocess.Popen._internal_poll, subprocess.Popen._try_wait  # type: ignore[attr-defined]

    def _internal_poll(self: Any, *args: Any, **options: Any) -> Any:
        if self.returncode is None and _is_lost(self.pid):
            self.returncode = -signal.SIGKILL
        return poll(self, *args, **options)

    def _try_wait(self: Any, flags: int) -> tuple[int, int]:
        if _is_lost(self.pid):
            return self.pid, int(signal.SIGKILL)
        found: tuple[int, int] = wait(self, flags)
        return found

    subprocess.Popen._internal_poll = _internal_poll  # type: ignore[attr-defined]
    subprocess.Popen._try_wait = _try_wait  # type: ignore[attr-defined]


def _is_lost(pid: int) -> bool:
    if not 0 < pid < _Lost.before:
        return False
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


# Event loops: a selector is an epoll(7) instance, which a fork shares, as it does the pair of
# sockets that wakes a loop.


class Loops:
    """The loops of this process that are not closed."""

    def __init__(self) -> None:
        """Take note of loops from now on."""
        self._made: WeakSet[Any] = WeakSet()
        kind: Any = asyncio.selector_events.BaseSelectorEventLoop
        make = kind._make_self_pipe

        def _make_self_pipe(loop: Any) -> None:
            make(loop)
            self._made.add(loop)

        kind._make_self_pipe = _make_self_pipe

    def renew(self, own: Iterable[Any]) -> None:
        """Give each loop a selector and sockets of its own, and those of `own`."""
        for loop in {*self._made, *own}:
            if not loop.is_closed():
                renew(loop)


def renew(loop: Any) -> None:
    """Give a loop a selector and a pair of sockets to wake it that no other process has."""
    old, woken = loop._selector, loop._ssock.fileno()
    keys = [key for key in old.get_map().values() if key.fd != woken]
    old.close()
    loop._ssock.close()
    loop._csock.close()
    loop._selector = type(old)() if isinstance(old, selectors.BaseSelector) else old
    loop._internal_fds -= 1
    loop._make_self_pipe()
    for key in keys:
        with contextlib.suppress(OSError, ValueError, KeyError):
            loop._selector.register(key.fileobj, key.events, key.data)


def close_loop(loop: Any) -> None:
    """Close a loop whose thread was not forked, without a word about its tasks."""
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop._selector.close()
    loop._ssock.close()
    loop._csock.close()
    loop._ready.clear()
    loop._scheduled.clear()
    loop._closed = True
