"""The record of a cell: when it ran, and which files its code has opened.

It is made beside the request handler, where code cannot switch it off through IPython. Code of the
same process can still forge it: a record names causes, and decides no verdict.
"""

from __future__ import annotations

import stat
import sys
from typing import Any

from kernel_specs.restricted.config import BootConfig
from kernel_specs.restricted.originals import os, threading, time

MOST_FILES = 64
MOST_PATH_CHARS = 300
HASHED_BYTES = 8 * 1024 * 1024
"""Larger files are known by their size and the time of their last change."""
_FOREIGN = ("/usr/", "/proc/", "/sys/", "/dev/", "/tmp/", "/etc/", "/opt/", "/packages/", "/run/")
_EVENTS = ("open", "os.mkdir", "os.rename")
_WRITES = os.O_WRONLY | os.O_RDWR


def digest(fd: int) -> str:
    """Return a fingerprint of an open file's content, 16 hexadecimal digits. Raises OSError."""
    import hashlib

    info = os.fstat(fd)
    if info.st_size > HASHED_BYTES:
        about = f"{info.st_size} {info.st_mtime_ns}".encode()
        return hashlib.sha256(about).hexdigest()[:16]
    found = hashlib.sha256()
    while piece := os.read(fd, 1 << 20):
        found.update(piece)
    return found.hexdigest()[:16]


class Recorder:
    """Records the cells of a kernel, one after the other."""

    def __init__(self, boot: BootConfig) -> None:
        """Record files of the workspace and of mounts; in replays also the global generators."""
        self._workspace = f"{boot.workspace or os.getcwd()}/"
        self._foreign = (*_FOREIGN, *(f"{each}/" for each in boot.runtime if each != "/usr"))
        self._generators = bool(boot.shuffle or boot.seed)
        self._states: dict[str, Any] = {}
        self._files: dict[str, list[str]] = {}
        self._more = 0
        self._on = self._noting = False
        self._began = 0.0
        self._pid = os.getpid()
        self._seed = hash("kernel-mcp") & 0xFFFFFFFF
        sys.addaudithook(self._hear)

    def begin(self) -> None:
        """Begin the record of a cell."""
        self._files, self._more, self._began, self._on = {}, 0, time.time(), True
        if self._generators:
            self._states = _states()

    def end(self) -> dict[str, Any]:
        """Return the record of the cell that has ended, as JSON values."""
        self._on = False
        found: dict[str, Any] = {
            "time": self._began,
            "took": round(time.time() - self._began, 3),
            "pid": self._pid,
            "seed": self._seed,
            "threads": threading.active_count(),
        }
        if self._files:
            found["files"] = [[path, *about] for path, about in self._files.items()]
        if self._more:
            found["more_files"] = self._more
        if self._generators:
            now = _states()
            found["random"] = [name for name in now if now[name] != self._states.get(name, 0)]
        return found

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and self._on and not self._noting:
            self._noting = True
            try:
                if event == "open":
                    self._note(*arguments)
                else:  # a folder that is made, or the new name of a file
                    self._note(arguments[event == "os.rename"], event)
            except (OSError, TypeError, ValueError):
                pass  # it cannot be opened, or is no path
            finally:
                self._noting = False

    def _note(self, given: Any, mode: Any, flags: int = 0) -> None:
        if isinstance(given, int):
            return
        path = os.path.abspath(os.fsdecode(given))
        if path.startswith(self._foreign) and not path.startswith(self._workspace):
            return
        path = path.removeprefix(self._workspace)
        if path in self._files or len(path) > MOST_PATH_CHARS:
            return
        if len(self._files) >= MOST_FILES:
            self._more += 1
            return
        if mode in _EVENTS:
            self._files[path] = ["d" if mode == "os.mkdir" else "w", ""]
            return
        writes = bool(flags & _WRITES)
        how = "w" if writes and flags & (os.O_TRUNC | os.O_EXCL) else "rw" if writes else "r"
        there = how != "w" and os.path.exists(given)
        self._files[path] = [how, _digest_at(given) if there else ""]


def _digest_at(path: Any) -> str:
    """Return the fingerprint of a file before it is opened; empty if there is no such file."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        return ""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return digest(fd)
    finally:
        os.close(fd)


def _states() -> dict[str, Any]:
    """Return the states of the generators of `random` and numpy that are loaded."""
    found: dict[str, Any] = {}
    if random := sys.modules.get("random"):
        found["random"] = random.getstate()
    if numpy_random := sys.modules.get("numpy.random"):
        name, keys, *rest = numpy_random.get_state()
        found["numpy"] = (name, keys.tobytes(), *rest)
    return found
