"""What a fork of this kernel would lack or share: looked for before one is made.

Threads end with a fork, and whoever waits for them waits for ever. Memory that is shared on purpose
goes on changing: as much as `MOST_SHARED_BYTES` of it is copied, and put back.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MOST_SHARED_BYTES = 4 * 1024 * 1024
OMP_PAUSE_HARD = 2  # omp_pause_resource_t of OpenMP 5.0
_OMP = re.compile(r"lib(gomp|omp|iomp5)\b")
_SURVIVES = re.compile(r"openblas|libarrow|jemalloc|duckdb|workqueue|libmkl")
"""Libraries that make their threads anew after a fork: tried, see docs/checkpoints.md."""
_JEMALLOC = "jemalloc_bg"
_NEVER = ("torch", "tensorflow", "jax", "polars", "cv2", "numba.np.ufunc.omppool")
"""Modules whose native threads do not come back. Those of polars have names of their own."""
_ALWAYS = ("torch", "tensorflow", "jax")
"""Modules that cannot be forked with or without threads that are known of."""
_MEMORY = re.compile(r"^(/dev/shm/|/dev/zero|/memfd:|/SYSV|.* \(deleted\)$|$)")
_OWN = "/memfd:output-ring"


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
    words = _python_threads({id(thread) for thread in own})
    words += [name for name in _ALWAYS if name in sys.modules]
    if not words:
        words = _native_threads({line[line.index("/") :] for line in maps if "/" in line})
    shared = [_range(line) for line in maps if line.split(" ", 2)[1].endswith("s")]
    wanted = [(start, size) for start, size in shared if size]
    total = sum(size for _, size in wanted)
    if total > MOST_SHARED_BYTES:
        words.append(f"{total / 1e6:.0f} MB of shared memory")
    if words:
        return Found(tuple(dict.fromkeys(words)))
    return Found(shared=tuple(Shared(at, ctypes.string_at(at, size)) for at, size in wanted))


def _end_monitors() -> None:
    """End the thread with which tqdm looks after slow bars; the next bar begins another."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    monitor = getattr(tqdm, "monitor", None)
    if tqdm is not None and isinstance(monitor, threading.Thread):
        monitor.exit()  # type: ignore[attr-defined]
        tqdm.monitor = None


def _python_threads(own: set[int]) -> list[str]:
    return [
        f"the thread {thread.name!r}"
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and id(thread) not in own
        and not isinstance(thread, threading._DummyThread)
    ]


def _native_threads(libraries: set[str]) -> list[str]:
    """Threads of libraries that a fork would end for good."""
    known = {str(thread.native_id) for thread in threading.enumerate()} | {str(os.getpid())}
    if len(os.listdir("/proc/self/task")) <= len(known):  # noqa: PTH208
        return []
    names = {Path(path).name for path in libraries}
    for path in libraries:
        if _OMP.search(Path(path).name):
            _pause(path)
    own = _name(str(os.getpid()))
    others = [_name(task) for task in os.listdir("/proc/self/task") if task not in known]  # noqa: PTH208
    strange = [name for name in others if name not in (own, "") and _JEMALLOC not in name]
    if not others:
        return []
    if loaded := [name for name in _NEVER if name in sys.modules]:
        return [f"threads of {name}" for name in loaded]
    if strange:
        return [f"threads of {name.rstrip('-0123456789') or name}" for name in strange]
    return [] if any(_SURVIVES.search(name) for name in names) else ["threads of a library"]


def _pause(path: str) -> None:
    """Have an OpenMP runtime end its threads; the next parallel region makes new ones."""
    try:
        ctypes.CDLL(path).omp_pause_resource_all(OMP_PAUSE_HARD)
    except (OSError, AttributeError):  # before OpenMP 5.0: its threads will be found
        return


def _name(task: str) -> str:
    try:
        return Path(f"/proc/self/task/{task}/comm").read_text().strip()
    except OSError:
        return ""


def _range(line: str) -> tuple[int, int]:
    """Where memory is that is shared, and its size; 0 for what is not to be kept."""
    where, access, _, _, _, *path = line.split(maxsplit=5)
    name = path[0] if path else ""
    if access != "rw-s" or name.startswith(_OWN) or not _MEMORY.match(name):
        return 0, 0
    start, end = (int(part, 16) for part in where.split("-"))
    return start, end - start
