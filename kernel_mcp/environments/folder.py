"""The folder of one environment: its skeleton, what is noted about it beside it, and its end.

Packages write into the folder while they are unpacked, by names of their choice. So nothing in it
is believed: the skeleton is made before and again after, and the note lies outside.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
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

# Locks between processes that end with their last holder.
#
# The files stay: to remove one would let two processes lock two files of one name. Closing is the
POLL_S = 0.05
"""flock wakes nobody up, so waiting is asking again."""


@contextmanager
def exclusive_now(file: Path) -> Iterator[int | None]:
    """Hold the lock on `file` alone, if nobody holds it: yields its descriptor, or else None.

    A child that keeps the descriptor goes on holding the lock.
    """
    descriptor = _opened(file)
    try:
        yield descriptor if _locked(descriptor, fcntl.LOCK_EX) else None
    finally:
        os.close(descriptor)


class Lease:
    """A lock that many may hold at once, and nobody else alone meanwhile."""

    def __init__(self, descriptor: int) -> None:
        """Takes over a descriptor that holds the lock."""
        self._descriptor = descriptor

    @classmethod
    def taken(cls, file: Path) -> Lease | None:
        """A lease on `file`; None while somebody holds the lock alone. Raises OSError."""
        descriptor = _opened(file)
        if _locked(descriptor, fcntl.LOCK_SH):
            return cls(descriptor)
        os.close(descriptor)
        return None

    def close(self) -> None:
        """Give it back; does nothing the second time."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _opened(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PermissionError:  # a cache that only somebody else may write to
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


FORMAT = 2
_CONFIG = "pyvenv.cfg"
_LEFTOVERS = (".lock", "excludes.txt", f"bin/{_CONFIG}")
"""What installers leave and no kernel needs, and what Python would take for its own settings."""


@dataclass(frozen=True, slots=True)
class Note:
    """What is noted about a whole environment.

    `agent` says whether only agents have asked for it, `size` is bytes on disk.
    """

    version: str
    requested: tuple[str, ...]
    packages: tuple[str, ...]
    size: int
    agent: bool


def lay_out(folder: Path, interpreter: Interpreter) -> None:
    """Make the skeleton of a virtual environment, in place of what is there by its names; blocks.

    As `python -m venv` makes it, without starting the interpreter.
    """
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
        _clear(path)
        path.symlink_to(target)
    for name in _LEFTOVERS:
        _clear(folder / name)
    _clear(folder / _CONFIG)
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
    folder: Path, interpreter: Interpreter, requested: tuple[str, ...], *, agent: bool
) -> None:
    """Seal an environment and note that it is whole; blocks."""
    packages = site_packages(folder, interpreter)
    content = {
        "format": FORMAT,
        "interpreter": asdict(interpreter),
        "requested": requested,
        "packages": installed_versions(packages),
        "modules": installed_modules(packages),
        "size": tree_size(folder),
        "agent": agent,
    }
    _write(folder, content)


def tidy(folder: Path, interpreter: Interpreter) -> None:
    """Undo what packages have done beside their place, and let scripts start the kernels' Python.

    Links are removed, other than the skeleton's; afterwards nothing in the folder leads out of it,
    and nobody may write to it. Blocks.
    """
    for entry in everything(folder):
        if not entry.is_dir(follow_symlinks=False) and not entry.is_file(follow_symlinks=False):
            Path(entry).unlink()
    lay_out(folder, interpreter)
    base, python = Path(interpreter.executable), folder / "bin/python"
    retarget(folder / "bin", base=base, python=python)


def seal(folder: Path) -> None:
    """Everything below is readable by every user (kernels have ids of their own), writable by none.

    uv's cache may hold files in tighter modes; the copies here are our own to change. Blocks.
    """
    for entry in everything(folder):
        if not entry.is_symlink():
            mode = entry.stat(follow_symlinks=False).st_mode
            Path(entry).chmod(0o555 if mode & stat.S_IXUSR else 0o444)


def load(folder: Path, interpreter: Interpreter) -> KernelEnvironment | None:
    """The environment in a folder, None unless it is whole. Notes that it is used.

    Only words are taken from the note: what is run and made readable is the caller's finding.
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
    """What is noted about an environment, None when it is not whole."""
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
        )
    except (KeyError, TypeError, ValueError):
        return None


def belongs_to_operator(folder: Path) -> None:
    """Note that not only agents have asked for it."""
    content = _read(folder)
    if content is not None and content.get("agent"):
        with suppress(OSError):
            _write(folder, {**content, "agent": False})


def remove(folder: Path) -> None:
    """Delete an environment, whole or not; its note goes first. Blocks."""
    note_file(folder).unlink(missing_ok=True)
    remove_tree(folder)


def site_packages(folder: Path, interpreter: Interpreter) -> Path:
    """Where the interpreter looks for packages; those could bring folders of other versions."""
    major, minor = interpreter.version.split(".")[:2]
    threads = "t" if "t" in interpreter.implementation.removeprefix("cpython") else ""
    return folder / f"lib/python{major}.{minor}{threads}/site-packages"


def tree_size(folder: Path) -> int:
    """Bytes of all files below a folder; blocks."""
    total = 0
    for entry in everything(folder):
        with suppress(FileNotFoundError):
            if not entry.is_dir(follow_symlinks=False):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _real_folder(path: Path) -> Path:
    """A folder that is no link, made if need be."""
    if path.is_symlink() or not path.is_dir():
        _clear(path)
        path.mkdir(mode=0o755)
    return path


def _clear(path: Path) -> None:
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
"""A disk of today takes some hundred MiB in this time."""
REST = 4
"""So many times as long as a look at the folders took, they are left alone."""
_WRITTEN = b"wchar:"


class Spending:
    """Bounds what one operation puts on the disk, by all the installers that it runs.

    What is downloaded goes to a cache that others fill at the same time, and from there into
    `folders`. So the folders are measured, and what is not in them is what the processes have
    written besides; each of the two may be `most_bytes`, 0 for no limit. What was written in the
    last `LOOK_S` of a process is not seen.
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
        """A further folder that the operation fills."""
        self._folders.append(folder)

    def started(self, pid: int) -> None:
        """The next process of the operation runs."""
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
                # no more than this can be in order, wherever it went
                if await anyio.to_thread.run_sync(self._written) > 2 * self.most_bytes:
                    return
                await anyio.sleep(LOOK_S)

    def exceeded(self) -> bool:
        """Whether it has; blocks."""
        if not self.most_bytes:
            return False
        written = self._written()
        # Linux does not count every copy as written, so folders are looked at in any case
        held = sum(map(tree_size, self._folders))
        return held > self.most_bytes or written - held > self.most_bytes

    def _written(self) -> int:
        """Bytes that the processes have written so far, those that have ended included."""
        if self._pid:
            self._seen = max(self._seen, sum(map(_written_by, tree(self._pid))))
        return self._ended + self._seen


def _written_by(pid: int) -> int:
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/io").read_bytes().splitlines():
            if line.startswith(_WRITTEN):
                return int(line.split()[1])
    return 0
