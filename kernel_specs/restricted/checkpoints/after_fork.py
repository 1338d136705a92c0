"""Restore files, event loops and random state in a copy of a kernel that becomes the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import random
import selectors
import stat
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from kernel_specs.restricted.checkpoints.blockers import SharedMemory
from kernel_specs.restricted.checkpoints.suspended import FIRST_FD
from kernel_specs.restricted.originals import gc, io, os, signal, threading, time

_MADE = os.O_CREAT | os.O_EXCL | os.O_TRUNC
_getstate, _setstate, _seed = random.getstate, random.setstate, random.seed
"""The original functions: user code may replace them, and the kernel itself calls them."""
_MEMORY = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")
TICK_S = 0.02
"""Seconds until a further write changes a file's mtime for certain: Linux's tick is up to 10 ms."""


@dataclass(frozen=True)
class File:
    """An open regular file; `identity` is device and inode, `stamp` size, mtime and ctime (ns)."""

    fd: int
    flags: int
    offset: int
    identity: tuple[int, int]
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, fd: int) -> File | None:
        """Return the file of a descriptor, None if it is no regular file. Raises OSError.

        Waits up to `TICK_S` after a write, so that a later one changes the times.
        """
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
        """Return True if the descriptor is still this file: packages close some after a fork."""
        try:
            found = os.fstat(self.fd)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.identity

    @property
    def name(self) -> str:
        """Path of the file; empty for shared memory."""
        path = os.readlink(f"/proc/self/fd/{self.fd}")
        return "" if path.startswith(_MEMORY) else path

    def doubtful(self, *, beside: bool) -> bool:
        """Return True if the file is writable and has been written to since `of`.

        With `beside`, another kernel runs on and may write: every writable file counts.
        """
        if self.flags & os.O_ACCMODE == os.O_RDONLY:
            return False
        return beside or _stamp(os.fstat(self.fd)) != self.stamp

    def close(self) -> None:
        """Make the descriptor useless for reads, writes and locks; its number stays in use."""
        nothing = os.open("/", os.O_PATH | os.O_CLOEXEC)
        os.dup2(nothing, self.fd, inheritable=False)
        os.close(nothing)

    def reopen(self) -> None:
        """Open the file again at its descriptor and offset, for this process alone.

        A file that cannot be opened again shares its offset with earlier kernels.
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
    """Return the open regular files, standard streams excluded."""
    found = []
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        with contextlib.suppress(OSError):
            if fd >= FIRST_FD and (file := File.of(fd)) is not None:
                found.append(file)
    return found


def close_doubtful(files: Iterable[File], *, beside: bool) -> tuple[list[File], list[str]]:
    """Close writable files that have changed since the checkpoint; see `File.doubtful`.

    Return the other files, and the paths of those closed. A library, such as that of a database,
    could overwrite a changed file with outdated pages. Python's own file objects depend on nothing
    but an offset, so they stay open.
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
class ForkState:
    """The state before a fork that the fork changes: files, random state, shared memory."""

    files: list[File]
    random_state: Any
    shared: tuple[SharedMemory, ...]

    @classmethod
    def now(cls, shared: tuple[SharedMemory, ...]) -> ForkState:
        """Return the state of this process now."""
        return cls(open_files(), _getstate(), shared)

    def part_files(self) -> None:
        """Reopen files for this process alone: a shared open file shares its flock(2), too."""
        for file in self.files:
            if file.there:
                file.reopen()

    def restore(self, *, branch: bool) -> list[str]:
        """Restore the state; return the paths of files that `close_doubtful` has closed.

        A `branch` runs beside other kernels: its random numbers differ, shared memory stays.
        """
        there = [file for file in self.files if file.there]
        same, closed = close_doubtful(there, beside=branch)
        for file in same:
            file.reopen()
        if branch:
            _seed()
            if numpy_random := sys.modules.get("numpy.random"):
                numpy_random.seed()
        else:
            _setstate(self.random_state)  # Python reseeds `random` in every child
            for piece in self.shared:
                piece.restore()
        main = threading.main_thread()
        if hasattr(main, "_set_native_id"):
            main._set_native_id()
        lose_children()
        return closed


def vary(values: Iterable[Any]) -> None:
    """Reseed the random generators of `random` and numpy among these values."""
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


# Children of the earlier kernel: the host has killed them, and this process cannot wait for them.


class _Lost:
    """State of `lose_children`: pids below `before` may be those of an earlier kernel."""

    before = 0
    installed = False


def lose_children() -> None:
    """Make `Popen` objects report -SIGKILL for children of the earlier kernel, which were killed.

    By itself Python reports 0, success, for a child that it cannot wait for.
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


# Event loops: a fork shares a loop's epoll(7) instance, and the pair of sockets that wakes it.


class LoopRegistry:
    """Registry of the event loops of this process."""

    def __init__(self) -> None:
        """Register every loop that is made from now on."""
        self._made: WeakSet[Any] = WeakSet()
        kind: Any = asyncio.selector_events.BaseSelectorEventLoop
        make = kind._make_self_pipe

        def _make_self_pipe(loop: Any) -> None:
            make(loop)
            self._made.add(loop)

        kind._make_self_pipe = _make_self_pipe

    def renew(self, own: Iterable[Any]) -> None:
        """Call `renew` for each open loop, `own` included."""
        for loop in {*self._made, *own}:
            if not loop.is_closed():
                renew(loop)


def renew(loop: Any) -> None:
    """Replace a loop's selector and wake-up sockets by ones that no other process shares."""
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
    """Close a loop whose thread was not forked, without warnings about its pending tasks."""
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop._selector.close()
    loop._ssock.close()
    loop._csock.close()
    loop._ready.clear()
    loop._scheduled.clear()
    loop._closed = True
