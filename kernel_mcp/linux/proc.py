"""Processes watched by pidfd; state, memory and CPU time of process trees from /proc."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import field
from itertools import chain
from pathlib import Path
from threading import Lock

import anyio

from kernel_mcp.barriers import ignore_missing
from kernel_mcp.records import dataclass

PIDFD_SIGNAL_PROCESS_GROUP = 1 << 2
"""<linux/pidfd.h>; Linux 6.9 and later."""
_STOPPED, _ENDED = (b"T", b"t"), (b"Z", b"X")


class WatchedProcess:
    """A process watched by pidfd, so that a reused pid is never mistaken for it."""

    def __init__(
        self,
        pid: int,
        loop: asyncio.AbstractEventLoop,
        on_end: Callable[[], None] | None,
        *,
        pidfd: int = -1,
    ) -> None:
        """Watch `pid`; own `pidfd` if it is given. Raises ProcessLookupError."""
        self.pid = pid
        self.gone = anyio.Event()
        self._loop = loop
        self._on_end = on_end
        self._fd = pidfd if pidfd >= 0 else os.pidfd_open(pid)
        loop.add_reader(self._fd, self._ended)

    @property
    def pidfd(self) -> int:
        """The pidfd, -1 after `close`."""
        return self._fd

    @property
    def stopped(self) -> bool:
        """True if a signal has stopped it, until SIGCONT."""
        try:
            return _stat(self.pid)[0] in _STOPPED
        except ProcessLookupError:
            return False

    def signal(self, number: int) -> None:
        """Send a signal; do nothing if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the group that the process leads, or to it alone if it leads none."""
        try:
            signal.pidfd_send_signal(self._fd, number, None, PIDFD_SIGNAL_PROCESS_GROUP)
        except ProcessLookupError:
            self.signal(number)
        except OSError:
            # before Linux 6.9, a pidfd cannot name a group
            if not self.gone.is_set():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, number)

    def continue_parent(self) -> None:
        """Send SIGCONT to its parent, the only process that can reap it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            parent = parent_of(self.pid)
            signal.pidfd_send_signal(self._fd, 0)  # raises if it was reaped and its pid reused
            os.kill(parent, signal.SIGCONT)

    def reap(self) -> None:
        """Reap the process if it is a child. As pid 1, the server is the parent of orphans."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)

    def close(self) -> None:
        """Stop watching and close the pidfd."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._loop.remove_reader(fd)
            os.close(fd)

    def _ended(self) -> None:
        self._loop.remove_reader(self._fd)
        self.gone.set()
        if self._on_end is not None:
            self._on_end()


def parent_of(pid: int) -> int:
    """Return the parent's pid of a process. Raises ProcessLookupError if it is gone."""
    return int(_stat(pid)[1])


def pid_of(pidfd: int) -> int:
    """Return the pid of a pidfd's process in this /proc; -1 if it has ended."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Pid":
            return int(value)
    return -1


_PIDFD_GET_INFO = 0xC040FF0B
"""_IOWR(0xFF, 11, struct pidfd_info) of <linux/pidfd.h>, with the 64 bytes of its first version."""
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("=QQ11Ii")


def wait_status(pidfd: int) -> int | None:
    """Return the wait(2) status of an ended process, which need not be a child.

    None before it is reaped, and before Linux 6.15.
    """
    content = bytearray(_PIDFD_INFO.size)
    struct.pack_into("=Q", content, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, content)
    except OSError:
        return None
    found = _PIDFD_INFO.unpack(content)
    return found[-1] if found[0] & _PIDFD_INFO_EXIT else None


def pids_of_namespace(name: str, among: Iterable[int] | None = None) -> list[int]:
    """Return the processes in the pid namespace `name`, given as the target of /proc/PID/ns/pid.

    Only those `among` are examined; None examines all.
    """
    found = []
    for pid in _all_pids() if among is None else among:
        with ignore_missing, contextlib.suppress(PermissionError):
            if namespace_of(pid) == name:
                found.append(pid)
    return found


def namespace_of(pid: int) -> str:
    """Return the name of a process's pid namespace. Raises OSError."""
    return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115  # called for each process


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def _read(path: str) -> bytes:
    """Return the content of a file in /proc, with half the system calls of a file object."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, _CHUNK):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name: state, parent and so on.

    Raises ProcessLookupError.
    """
    try:
        stat = _read(f"/proc/{pid}/stat")
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} has ended") from None
    return stat.rpartition(b")")[2].split()


def processor_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far, without its children.

    Raises ProcessLookupError.
    """
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


_CPUCLOCK_SCHED = 2
"""MAKE_PROCESS_CPUCLOCK of <linux/posix-timers.h>."""


def processor_ns(pid: int) -> int | None:
    """Return the CPU nanoseconds of a process so far, without its children; 0 is this process.

    None if it has been reaped, or if this system has no such clock. Opens no file.
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return None


def has_own_pids(pid: int) -> bool:
    """Return True if a process is in another pid namespace than this one; False if it is gone."""
    with ignore_missing:
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"NSpid:"):
                return len(line.split()) > 2
    return False


def waits_for_machine(pid: int) -> bool:
    """Return True if a process is runnable or in uninterruptible sleep (R, D in proc_pid_stat(5)).

    Raises ProcessLookupError.
    """
    return _stat(pid)[0] in (b"R", b"D")


def threads(pid: int) -> list[int]:
    """Return the thread ids of a process, the first thread first; empty if it is gone.

    If the first thread has ended, /proc shows memory and files only in the entries of the others.
    """
    with ignore_missing:
        found = map(int, os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208  # called for each process
        return sorted(found, key=lambda thread: thread != pid)
    return []


def threads_of_user(uid: int) -> int:
    """Return the number of a user's threads, from the link counts of /proc/PID/task."""
    count = 0
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    found = Path(entry.path, "task").stat()
                    count += found.st_nlink - 2 if found.st_uid == uid else 0
    return count


def thread_times(pid: int, *, besides: str = "") -> dict[int, int]:
    """Return CPU time in nanoseconds by thread id, without threads named `besides`.

    Empty if the process is gone or belongs to another user.
    """
    found = {}
    for thread in threads(pid):
        task = Path(f"/proc/{pid}/task/{thread}")
        with ignore_missing, contextlib.suppress(PermissionError):
            if not besides or (task / "comm").read_text().rstrip("\n") != besides:
                found[thread] = int((task / "schedstat").read_bytes().split()[0])
    return found


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """The exit code or killing signal of a kernel.

    `detail` is a line of its output, `cause` the reason known to the server. `words` describe an
    end without code and signal, such as `was restarted`.
    """

    code: int | None = None
    signal: int | None = None
    detail: str = field(default="", compare=False)
    cause: str = field(default="", compare=False)
    words: str = field(default="", compare=False)

    def story(self, what: str) -> str:
        """Return how `what` ended as a clause, for example `the kernel was killed by SIGKILL`."""
        if self.words:
            return f"{what} {self.words}"
        return f"{what} {'was ' if self.signal is not None else ''}{self.describe()}"

    def describe(self) -> str:
        """Return how it ended as a phrase, for example `killed by SIGKILL: out of memory`."""
        if self.words:
            return self.words
        if self.signal is not None:
            try:
                name = signal.Signals(self.signal).name
            except ValueError:
                name = f"signal {self.signal}"
            text = f"killed by {name}"
        elif self.code is not None:
            text = f"exited with code {self.code}"
        else:
            text = "ended for an unknown reason"
        text = f"{text} ({self.detail})" if self.detail else text
        return f"{text}: {self.cause}" if self.cause else text


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far and resident bytes now; older values if not `measured`."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    measured: bool = True


_TICKS = os.sysconf("SC_CLK_TCK")
_CHUNK = 16 * 1024
"""Bytes per read(2), more than most files in /proc have."""
_MEMORY = (b"RssAnon:", b"RssShmem:")
MAX_PROCESSES = 10_000


def resident_bytes() -> int:
    """Return the resident memory of this process, shared pages included. Raises OSError."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


Process = tuple[int, int]
"""Process id and start time in ticks: Linux reuses ids."""


class ProcessMeter:
    """Adds up the usage of processes, including CPU time of ended ones. Thread-safe.

    A parent that waits for a child is charged its CPU time. Linux drops the time of other ended
    processes, so their last figures are kept here.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._own: dict[Process, int] = {}
        self._waited: dict[Process, int] = {}
        self._lost = 0

    def usage(self, processes: Iterable[int]) -> Usage:
        """Return CPU seconds and resident memory of `processes` and those of earlier calls."""
        asked = set(processes)
        with self._lock:
            own: dict[Process, int] = {}
            waited: dict[Process, int] = {}
            memory = 0
            for pid in dict.fromkeys((*asked, *(pid for pid, _ in self._own))):
                with ignore_missing:
                    name, own_ticks, waited_ticks = _ticks(pid)
                    if pid in asked or name in self._own:
                        own[name], waited[name] = own_ticks, waited_ticks
                        memory += sum(memory_lines(pid, "status", _MEMORY).values())
            self._keep(own, waited)
            ticks = self._lost + sum(own.values()) + sum(waited.values())
            return Usage(ticks / _TICKS, memory)

    def _keep(self, own: dict[Process, int], waited: dict[Process, int]) -> None:
        ended = self._own.keys() - own.keys()
        gone = sum(self._own[name] + self._waited[name] for name in ended)
        taken = sum(ticks - self._waited.get(name, 0) for name, ticks in waited.items())
        self._lost += max(0, gone - max(0, taken))
        self._own, self._waited = own, waited


def _ticks(pid: int) -> tuple[Process, int, int]:
    """Return a process, its own ticks, and those of the children that it has waited for."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    # after the command name in parentheses: utime, stime, cutime, cstime are fields 14 to 17
    fields = stat.rpartition(b")")[2].split()
    own, waited = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
    return (pid, int(fields[19])), own, waited


def reset_peak_memory(pid: int) -> bool:
    """Let the peak of a process's memory begin at its present memory; return False if it cannot.

    Blocking, while the process changes its mappings.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_bytes(b"5")
        return True
    return False


def memory_lines(pid: int, file: str, names: Iterable[bytes]) -> dict[bytes, int]:
    """Return bytes by name from a memory file of the first thread that has them; else empty."""
    wanted = tuple(names)
    if found := _lines(pid, file, wanted):
        return found
    for thread in threads(pid)[1:]:
        if found := _lines(thread, file, wanted):
            return found
    return {}


def _lines(thread: int, file: str, names: tuple[bytes, ...]) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    with ignore_missing:
        for line in _read(f"/proc/{thread}/{file}").splitlines():
            if line.startswith(names):
                name, size, *_ = line.split()
                found[name] = int(size) * 1024
    return found


def available_memory() -> int:
    """Return the bytes available to programs without swapping. Raises OSError."""
    with open("/proc/meminfo", "rb") as table:
        for line in table:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def family(roots: Iterable[int], *, contained: bool) -> Iterator[int]:
    """Yield `roots`, their descendants, and the orphans of their sessions, each once.

    If `contained` in a pid namespace of their own, orphans are descendants of its first process.
    """
    roots = list(roots)
    seen: set[int] = set()
    for top in chain(roots, () if contained else orphans(roots)):
        for pid in tree(top) if top not in seen else ():
            if pid not in seen:
                seen.add(pid)
                yield pid


def tree(root: int, but: Container[int] = ()) -> Iterator[int]:
    """Yield `root` and its descendants, as far as they are found while they start and end.

    The processes in `but` are left out, with their descendants.
    """
    waiting = [root]
    for _ in range(MAX_PROCESSES):
        if not waiting:
            return
        pid = waiting.pop()
        yield pid
        waiting += (child for child in children(pid) if child not in but)


def orphans(roots: Iterable[int]) -> Iterator[int]:
    """Yield the orphans in sessions led by `roots`: now children of an ancestor of `roots`."""
    leaders = {root for root in roots if _session(root) == root}
    if not leaders:
        return
    above = {pid for root in leaders for pid in _ancestors(root)}
    for pid in above:
        for child in children(pid):
            if child not in leaders and _session(child) in leaders:
                yield child


def children(pid: int) -> Iterator[int]:
    """Yield the ids of a process's children, including orphans that it adopted."""
    for thread in threads(pid):
        with ignore_missing:
            yield from map(int, _read(f"/proc/{pid}/task/{thread}/children").split())


def _session(pid: int) -> int:
    with ignore_missing:
        return os.getsid(pid)
    return 0


def _ancestors(pid: int) -> Iterator[int]:
    with ignore_missing:
        while pid > 1:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            pid = int(stat.rpartition(b")")[2].split()[1])
            if pid:
                yield pid


def private_bytes(pid: int) -> int:
    """Return the bytes of private resident memory of a process. Raises OSError if it has ended."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_bytes().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def is_zombie(pid: int) -> bool:
    """Return True if a process has ended; its first thread may end before the others."""
    with ignore_missing:
        return _stat(pid)[0] in _ENDED and len(threads(pid)) < 2
    return True


def set_oom_score(pid: int, pidfd: int, score: int) -> None:
    """Set oom_score_adj of a process: the highest is killed first. Raises OSError."""
    fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    try:
        signal.pidfd_send_signal(pidfd, 0)  # raises if the pid was reused meanwhile
        os.write(fd, str(score).encode())
    finally:
        os.close(fd)
