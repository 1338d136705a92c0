"""The folder of one environment: locks, skeleton, note and size.

Packages unpack files under names of their choice, so nothing in the folder is trusted. The skeleton
is made before and again after, and the note lies outside.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.environments.interpreters import Interpreter
from kernel_mcp.environments.layer import retarget
from kernel_mcp.environments.metadata import installed_modules, installed_versions, note_file
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.linux.proc import tree
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.linux.walk import everything
from kernel_mcp.records import dataclass

# flock: a lock ends with its last descriptor. Lock files are never removed, or two processes could
# lock two files of one name.
POLL_S = 0.05
"""Seconds between attempts of a non-blocking flock."""


@contextmanager
def exclusive_now(file: Path) -> Iterator[int | None]:
    """Try to flock `file` exclusively; yield the descriptor, None if another holds a lock.

    A child that inherits the descriptor keeps the lock.
    """
    descriptor = _opened(file)
    try:
        yield descriptor if _locked(descriptor, fcntl.LOCK_EX) else None
    finally:
        os.close(descriptor)


class Lease:
    """A shared flock."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def taken(cls, file: Path) -> Lease | None:
        """Return a shared lock on `file`; None if it is locked exclusively. Raises OSError."""
        descriptor = _opened(file)
        if _locked(descriptor, fcntl.LOCK_SH):
            return cls(descriptor)
        os.close(descriptor)
        return None

    def close(self) -> None:
        """Release the lock; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _opened(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PermissionError:  # another user's cache
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


FORMAT = 2
_CONFIG = "pyvenv.cfg"
_LEFTOVERS = (".lock", "excludes.txt", "listed", f"bin/{_CONFIG}")
"""Leftovers of installers that no kernel needs, and a `bin/pyvenv.cfg`, which Python would read."""


@dataclass(frozen=True, slots=True)
class Note:
    """The note of a finished environment.

    `size` is in bytes. `agent` is True if only agents have requested the environment. `apart` is
    True if it has no packages that the kernel works with.
    """

    version: str
    requested: tuple[str, ...]
    packages: tuple[str, ...]
    size: int
    agent: bool
    apart: bool


def lay_out(folder: Path, interpreter: Interpreter) -> None:
    """Make the skeleton of a virtual environment, as `python -m venv` does; blocks."""
    folder.mkdir(mode=0o755, exist_ok=True)
    programs = _real_folder(folder / "bin")
    major, minor = interpreter.version.split(".")[:2]
    links = {
        programs / "python": interpreter.executable,
        programs / "python3": "python",
        programs / f"python{major}.{minor}": "python",
        folder / "lib64": "lib",
    }
    for path, target in links.items():
        discard(path)
        path.symlink_to(target)
    for name in _LEFTOVERS:
        discard(folder / name)
    discard(folder / _CONFIG)
    lines = {
        "home": Path(interpreter.executable).parent,
        "implementation": "CPython",
        "include-system-site-packages": "false",
        "version": interpreter.version,
        "executable": interpreter.executable,
    }
    text = "".join(f"{name} = {value}\n" for name, value in lines.items())
    (folder / _CONFIG).write_text(text, encoding="utf-8")


def finish(
    folder: Path,
    interpreter: Interpreter,
    requested: tuple[str, ...],
    *,
    agent: bool,
    apart: bool = False,
) -> None:
    """Write the note of a finished environment: packages, modules, bytes on disk; blocks."""
    packages = site_packages(folder, interpreter)
    content = {
        "format": FORMAT,
        "interpreter": asdict(interpreter),
        "requested": requested,
        "packages": installed_versions(packages),
        "modules": installed_modules(packages),
        "size": tree_size(folder),
        "agent": agent,
        "apart": apart,
    }
    _write(folder, content)


def tidy(folder: Path, interpreter: Interpreter) -> None:
    """Remove links other than the skeleton's and point scripts at the kernels' Python; blocks.

    Afterwards only the skeleton's links lead out of the folder.
    """
    for entry in everything(folder):
        if not entry.is_dir(follow_symlinks=False) and not entry.is_file(follow_symlinks=False):
            Path(entry).unlink()
    lay_out(folder, interpreter)
    base, python = Path(interpreter.executable), folder / "bin/python"
    retarget(folder / "bin", base=base, python=python)


def seal(folder: Path) -> None:
    """Make all files readable by every user (kernels have ids of their own), writable by none.

    Files are copies, so stricter modes in uv's cache stay. Blocks.
    """
    for entry in everything(folder):
        if not entry.is_symlink():
            mode = entry.stat(follow_symlinks=False).st_mode
            Path(entry).chmod(0o555 if mode & stat.S_IXUSR else 0o444)


def load(folder: Path, interpreter: Interpreter) -> KernelEnvironment | None:
    """Return the environment in a folder and update its time of use; None unless it is finished.

    The note supplies text only: paths to run and to expose come from the caller.
    """
    note = read_note(folder)
    if note is None or not (folder / "bin/python").exists():
        return None
    with suppress(OSError):  # another user's cache: it is only the date of last use
        os.utime(note_file(folder))
    return KernelEnvironment(
        python=folder / "bin/python",
        readonly=(folder, *interpreter.readonly),
        version=interpreter.version,
        packages=note.packages,
        base=Path(interpreter.executable),
    )


def read_note(folder: Path) -> Note | None:
    """Return the note of an environment; None unless it is finished."""
    content = _read(folder)
    if content is None or not isinstance(content.get("modules"), dict):
        return None
    try:
        return Note(
            version=str(content["interpreter"]["version"]),
            requested=_words(content["requested"]),
            packages=_words(content["packages"]),
            size=int(content["size"]),
            agent=bool(content["agent"]),
            apart=bool(content.get("apart")),
        )
    except (KeyError, TypeError, ValueError):
        return None


def belongs_to_operator(folder: Path) -> None:
    """Clear `agent` in the note: the operator has requested this environment, too."""
    content = _read(folder)
    if content is not None and content.get("agent"):
        with suppress(OSError):
            _write(folder, {**content, "agent": False})


def remove(folder: Path) -> None:
    """Delete an environment, finished or not; its note goes first. Blocks."""
    note_file(folder).unlink(missing_ok=True)
    remove_tree(folder)


def site_packages(folder: Path, interpreter: Interpreter) -> Path:
    """Return the interpreter's site-packages; packages may create folders of other versions."""
    major, minor = interpreter.version.split(".")[:2]
    threads = "t" if "t" in interpreter.implementation.removeprefix("cpython") else ""
    return folder / f"lib/python{major}.{minor}{threads}/site-packages"


def tree_size(folder: Path) -> int:
    total = 0
    for entry in everything(folder):
        with suppress(FileNotFoundError):
            if not entry.is_dir(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _real_folder(path: Path) -> Path:
    """Return a directory that is not a symlink, created if missing."""
    if path.is_symlink() or not path.is_dir():
        discard(path)
        path.mkdir(mode=0o755)
    return path


def discard(path: Path) -> None:
    """Remove a tree, a file or a link, if there is one. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(note_file(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None


def _write(folder: Path, content: dict[str, Any]) -> None:
    file = note_file(folder)
    draft = file.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
    draft.replace(file)


def _words(found: Any) -> tuple[str, ...]:
    return tuple(str(word) for word in found)


LOOK_S = 0.1
"""Seconds between measurements: a disk writes some hundred MiB in this time."""
REST = 4
"""Pause after a measurement, as a multiple of its duration."""
_WRITTEN = b"wchar:"


class Spending:
    """Bounds the bytes that the installers of one operation write to disk.

    Two amounts may be up to `most_bytes` each (0 for no limit). One is the size of `folders`. The
    other, for writes elsewhere such as uv's shared cache, is the processes' write count less that
    size. Writes of a process in its last `LOOK_S` may be missed.
    """

    def __init__(
        self,
        most_bytes: int,
        folders: Sequence[Path],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_bytes = most_bytes
        self._clock = clock
        self._folders = [*folders]
        self._pid = 0
        self._ended = 0
        self._seen = 0

    def watch(self, folder: Path) -> None:
        """Measure a further folder that the operation fills."""
        self._folders.append(folder)

    def started(self, pid: int) -> None:
        """Count the writes of a further process."""
        self._ended += self._seen
        self._pid, self._seen = pid, 0

    async def beyond(self) -> None:
        """Return when the operation has written too much."""
        if not self.most_bytes:
            await anyio.sleep_forever()
        while True:
            began = self._clock()
            if await anyio.to_thread.run_sync(self.exceeded):
                return
            rested = self._clock() + REST * (self._clock() - began)
            await anyio.sleep(LOOK_S)
            while self._clock() < rested:
                # beyond this sum one of both limits is exceeded, wherever the bytes are
                if await anyio.to_thread.run_sync(self._written) > 2 * self.most_bytes:
                    return
                await anyio.sleep(LOOK_S)

    def exceeded(self) -> bool:
        """Return True if the folders, or the writes elsewhere, exceed `most_bytes`. Blocks."""
        if not self.most_bytes:
            return False
        written = self._written()
        # Linux does not count every copy as written, so the folders are always measured
        held = sum(map(tree_size, self._folders))
        return held > self.most_bytes or written - held > self.most_bytes

    def _written(self) -> int:
        if self._pid:
            self._seen = max(self._seen, sum(map(_written_by, tree(self._pid))))
        return self._ended + self._seen


def _written_by(pid: int) -> int:
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/io").read_bytes().splitlines():
            if line.startswith(_WRITTEN):
                return int(line.split()[1])
    return 0
