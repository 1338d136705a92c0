"""What a fork of this kernel would lack or share: looked for before one is made.

Threads end with a fork, and whoever waits for them waits for ever. Memory that is shared on purpose
goes on changing: as much as `MOST_SHARED_BYTES` of it is copied, and put back.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_SHARED_BYTES = 4 * 1024 * 1024
OMP_PAUSE_HARD = 2  # omp_pause_resource_t of OpenMP 5.0
_OMP = re.compile(r"lib(gomp|omp|iomp5)\b")
_SURVIVES = re.compile(r"openblas|libarrow|workqueue|libmkl")
"""Files whose threads are made anew after a fork: tried, see docs/checkpoints.md."""
_ALWAYS = ("torch", "tensorflow", "jax", "numba.np.ufunc.omppool")
"""Modules that cannot be forked, whether they have threads now or not."""
_GPU = re.compile(r"/dev/(nvidia|dxg|kfd|dri/renderD)")
"""Devices whose contexts a forked process cannot use."""
_MEMORY = re.compile(r"^(/dev/shm/|/dev/zero|/memfd:|/SYSV|.* \(deleted\)$|$)")
_OWN = "/memfd:output-ring"
_SYSTEM = re.compile(r"(lib(c|pthread|m|dl|rt|stdc\+\+|gcc_s)|ld-[\w-]+)[-.\d]*\.so\b|\[")
"""Files with the first frames of a thread of anybody."""
_PYTHON = re.compile(r"(lib)?python\d*(\.\d+)?\w?$|libpython\d")
STACK_BYTES = 16 * 1024
"""Of a thread that waits, where frames of its library are."""
SETTLE_S = 0.2
"""Threads go on for so long after their work, as those of OpenBLAS for 25 ms."""
LOOK_S = 0.005
UNKNOWN = "an unknown library"
"""Of a thread that does not wait, or has no frame of a file."""
UNSEEN = "threads of libraries that this sandbox does not let be looked at"
_SYSCALL_FIELDS = 3
"""Of /proc/pid/syscall where a thread waits; the last two are the stack pointer and the address."""


@dataclass(frozen=True)
class Shared:
    """A piece of memory that other processes can have, too, and its content."""

    address: int
    content: bytes

    def restore(self) -> None:
        """Put the content back."""
        ctypes.memmove(self.address, self.content, len(self.content))


@dataclass(frozen=True)
class Found:
    """`words` name what is in the way of a checkpoint; `shared` is memory to put back."""

    words: tuple[str, ...] = ()
    shared: tuple[Shared, ...] = ()


def look(own: Iterable[threading.Thread]) -> Found:
    """Look for hindrances, after the threads that can be done without have been ended.

    `own` are threads of the kernel itself.
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
        return Found(tuple(dict.fromkeys(words)))
    return Found(shared=tuple(Shared(at, ctypes.string_at(at, size)) for at, size in wanted))


def _uses_gpu(maps: Sequence[str]) -> bool:
    """Return True if a GPU's device is open or mapped."""
    opened = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the listing itself, or closed since
            opened.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115
    return any(map(_GPU.match, opened)) or any(_GPU.search(line) for line in maps)


def _end_monitors() -> None:
    """End the thread with which tqdm looks after slow bars; the next bar begins another."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    monitor = getattr(tqdm, "monitor", None)
    if tqdm is not None and isinstance(monitor, threading.Thread):
        monitor.exit()  # type: ignore[attr-defined]
        tqdm.monitor = None


def _python_threads(own: Iterable[threading.Thread]) -> list[str]:
    """Those of `threading`, and those without an object: of `_thread`, or of C code in Python."""
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
    """Threads of libraries that a fork would end for good."""
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
    """What a user calls a file such as `_polars_runtime.abi3.so`."""
    return f"threads of {re.sub(r'^(lib|_)', '', owner).partition('.')[0]}"


def _may_end(owner: str) -> bool:
    """Whether a thread may be about to end, or to wait."""
    return owner == UNKNOWN or bool(_OMP.search(owner))


class _Code:
    """Where the code of libraries lies."""

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
        """The file whose code a thread runs, by its stack; empty when it has ended."""
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
        """The file of the first frame of a stack that is not one of anybody's."""
        end = next((end for start, end in self._stacks if start <= pointer < end), pointer)
        count = min(end - pointer, STACK_BYTES) // ctypes.sizeof(ctypes.c_uint64)
        for word in reversed(memoryview(ctypes.string_at(pointer, count * 8)).cast("Q")):
            at = bisect.bisect_right(self._starts, word) - 1
            if at >= 0 and word < self._files[at][1]:
                return self._files[at][2]
        return UNKNOWN


def _count() -> int:
    """How many threads there are."""
    status = Path("/proc/self/status").read_text(errors="replace")
    return int(status.partition("\nThreads:")[2].split(maxsplit=1)[0])


def _tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))  # noqa: PTH208


def _pause(path: str) -> None:
    """Have an OpenMP runtime end its threads; the next parallel region makes new ones."""
    try:
        ctypes.CDLL(path).omp_pause_resource_all(OMP_PAUSE_HARD)
    except (OSError, AttributeError):  # before OpenMP 5.0: its threads will be found
        return


def _range(line: str) -> tuple[int, int]:
    """Where memory is that is shared, and its size; 0 for what is not to be kept."""
    where, access, _, _, _, *path = line.split(maxsplit=5)
    name = path[0] if path else ""
    if access != "rw-s" or name.startswith(_OWN) or not _MEMORY.match(name):
        return 0, 0
    start, end = (int(part, 16) for part in where.split("-"))
    return start, end - start
