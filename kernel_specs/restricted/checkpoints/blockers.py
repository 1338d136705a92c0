"""Search before a checkpoint for threads, GPUs and memory that a forked kernel would lack or share.

Threads do not survive a fork, and code that waits for one hangs. Shared memory goes on changing
after a fork: up to `MOST_SHARED_BYTES` of it are copied, and put back later.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_specs.restricted.originals import os, threading, time

MOST_SHARED_BYTES = 4 * 1024 * 1024
OMP_PAUSE_HARD = 2  # omp_pause_resource_t of OpenMP 5.0
_OMP = re.compile(r"lib(gomp|omp|iomp5)\b")
_SURVIVES = re.compile(r"openblas|libarrow|workqueue|libmkl")
"""Libraries that start their threads again after a fork: tested, see docs/checkpoints.md."""
_ALWAYS = ("torch", "tensorflow", "jax", "numba.np.ufunc.omppool")
"""Modules that cannot be forked, whether they have threads now or not."""
_GPU = re.compile(r"/dev/(nvidia|dxg|kfd|dri/renderD)")
"""Devices whose contexts a forked process cannot use."""
_MEMORY = re.compile(r"^(/dev/shm/|/dev/zero|/memfd:|/SYSV|.* \(deleted\)$|$)")
_OWN = "/memfd:output-ring"
_SYSTEM = re.compile(r"(lib(c|pthread|m|dl|rt|stdc\+\+|gcc_s)|ld-[\w-]+)[-.\d]*\.so\b|\[")
"""Files with the outermost frames of every thread, which do not identify its library."""
_PYTHON = re.compile(r"(lib)?python\d*(\.\d+)?\w?$|libpython\d")
STACK_BYTES = 16 * 1024
"""Bytes at the outer end of a waiting thread's stack that are searched for frames of a library."""
SETTLE_S = 0.2
"""Seconds to wait for threads that end or sleep after their work; those of OpenBLAS need 25 ms."""
LOOK_S = 0.005
UNKNOWN = "an unknown library"
"""Owner of a thread that does not wait, or whose stack has no frame of a known file."""
UNSEEN = "threads of libraries that this sandbox does not let be looked at"
_SYSCALL_FIELDS = 3
"""Least fields of /proc/PID/syscall for a waiting thread; the last two are stack pointer and
program counter."""


@dataclass(frozen=True)
class SharedMemory:
    """The address and content of memory that other processes may share."""

    address: int
    content: bytes

    def restore(self) -> None:
        """Put the content back."""
        ctypes.memmove(self.address, self.content, len(self.content))


@dataclass(frozen=True)
class HindranceReport:
    """Result of a search: `words` name the hindrances, `shared` is memory to put back."""

    words: tuple[str, ...] = ()
    shared: tuple[SharedMemory, ...] = ()


def look(own: Iterable[threading.Thread]) -> HindranceReport:
    """Return the hindrances to a checkpoint, or, if there are none, the shared memory to put back.

    Ends threads that libraries start again when needed. `own` are threads of the kernel itself.
    """
    maps = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    _end_monitors()
    service = list(own)
    words = _python_threads(service)
    words += [name for name in _ALWAYS if name in sys.modules]
    words += ["a GPU in use"] * _uses_gpu(maps)
    if not words:
        words = _native_threads({str(thread.native_id) for thread in service}, maps)
    shared = [_range(line) for line in maps if line.split(" ", 2)[1].endswith("s")]
    wanted = [(start, size) for start, size in shared if size]
    total = sum(size for _, size in wanted)
    if total > MOST_SHARED_BYTES:
        words.append(f"{total / 1e6:.0f} MB of shared memory")
    if words:
        return HindranceReport(tuple(dict.fromkeys(words)))
    return HindranceReport(
        shared=tuple(SharedMemory(at, ctypes.string_at(at, size)) for at, size in wanted)
    )


def _uses_gpu(maps: Sequence[str]) -> bool:
    """Return True if a GPU's device is open or mapped."""
    opened = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing itself, or closed since
            opened.append(os.readlink(f"/proc/self/fd/{name}"))
    return any(map(_GPU.match, opened)) or any(_GPU.search(line) for line in maps)


def _end_monitors() -> None:
    """Stop the monitor thread of tqdm; the next bar starts another."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    monitor = getattr(tqdm, "monitor", None)
    if tqdm is not None and isinstance(monitor, threading.Thread):
        monitor.exit()  # type: ignore[attr-defined]
        tqdm.monitor = None


def _python_threads(own: Iterable[threading.Thread]) -> list[str]:
    """Return words for Python threads except `own`, also those without a `threading` object."""
    at_work = set(sys._current_frames())
    named = {
        thread.ident: f"the thread {thread.name!r}"
        for thread in threading.enumerate()
        if thread.ident in at_work or not isinstance(thread, threading._DummyThread)
    }
    known = {thread.ident for thread in (*own, threading.main_thread())}
    words = [word for ident, word in named.items() if ident not in known]
    return words + ["a thread of the module '_thread'"] * bool(at_work - known - named.keys())


def _native_threads(own: set[str], maps: Sequence[str]) -> list[str]:
    """Return words for threads of libraries that would be missing after a fork."""
    known = own | {str(os.getpid())}
    if _count() <= len(known):
        return []
    for path in {line[line.index("/") :] for line in maps if "/" in line}:
        if _OMP.search(Path(path).name):
            _pause(path)
    try:
        _tasks()
    except PermissionError:  # under Landlock
        return [UNSEEN] if _count() > len(known) else []
    code = _Code(maps)
    until = time.monotonic() + SETTLE_S
    while True:
        found = [code.owner(task) for task in _tasks() - known]
        words = [_words(name) for name in found if name and not _SURVIVES.search(name)]
        if time.monotonic() > until or not any(map(_may_end, found)):
            return words
        time.sleep(LOOK_S)


def _words(owner: str) -> str:
    """Return words for the user about threads of a file: "threads of polars_runtime"."""
    return f"threads of {re.sub(r'^(lib|_)', '', owner).partition('.')[0]}"


def _may_end(owner: str) -> bool:
    """Return True if a thread of this owner may soon end or sleep: then check it again."""
    return owner == UNKNOWN or bool(_OMP.search(owner))


class _Code:
    """The memory ranges of library code and of possible stacks, from /proc/self/maps."""

    def __init__(self, maps: Sequence[str]) -> None:
        self._stacks: list[tuple[int, int]] = []
        self._files: list[tuple[int, int, str]] = []
        for line in maps:
            where, access, _, _, _, *path = line.split(maxsplit=5)
            start, end = (int(part, 16) for part in where.split("-"))
            if "x" in access and path and not _SYSTEM.match(name := Path(path[0]).name):
                self._files.append((start, end, name))
            elif access.startswith("rw"):
                self._stacks.append((start, end))
        self._files.sort()
        self._starts = [start for start, _, _ in self._files]

    def owner(self, task: str) -> str:
        """Return the name of the library that a thread belongs to, by its stack.

        "Python" for threads of the interpreter, `UNKNOWN` if no library is found, empty if the
        thread has ended.
        """
        try:
            state = Path(f"/proc/self/task/{task}/syscall").read_text().split()
        except FileNotFoundError:
            return ""
        except OSError:
            state = []
        if len(state) < _SYSCALL_FIELDS:
            return UNKNOWN
        name = self._outermost(int(state[-2], 16))
        return "Python" if _PYTHON.match(name) else name

    def _outermost(self, pointer: int) -> str:
        """Return the file of the outermost frame whose file is not in `_SYSTEM`, or `UNKNOWN`."""
        end = next((end for start, end in self._stacks if start <= pointer < end), pointer)
        count = min(end - pointer, STACK_BYTES) // ctypes.sizeof(ctypes.c_uint64)
        for word in reversed(memoryview(ctypes.string_at(pointer, count * 8)).cast("Q")):
            at = bisect.bisect_right(self._starts, word) - 1
            if at >= 0 and word < self._files[at][1]:
                return self._files[at][2]
        return UNKNOWN


def _count() -> int:
    """Return the number of threads of this process."""
    status = Path("/proc/self/status").read_text(errors="replace")
    return int(status.partition("\nThreads:")[2].split(maxsplit=1)[0])


def _tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _pause(path: str) -> None:
    """End the threads of an OpenMP runtime; the next parallel region makes new ones.

    Does nothing for a runtime before OpenMP 5.0.
    """
    try:
        ctypes.CDLL(path).omp_pause_resource_all(OMP_PAUSE_HARD)
    except (OSError, AttributeError):  # before OpenMP 5.0: its threads will be found
        return


def _range(line: str) -> tuple[int, int]:
    """Return address and size in bytes of a shared mapping; (0, 0) for one not to be put back."""
    where, access, _, _, _, *path = line.split(maxsplit=5)
    name = path[0] if path else ""
    if access != "rw-s" or name.startswith(_OWN) or not _MEMORY.match(name):
        return 0, 0
    start, end = (int(part, 16) for part in where.split("-"))
    return start, end - start
