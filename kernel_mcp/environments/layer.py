"""`Layer`: the folder of one session's own packages.

Each `install` adds a generation, a folder named 1, 2, 3 …; the kernel puts them on sys.path, newest
first. It is staged, renamed when complete and never changed: imports from older ones go on working.
The server's note lies beside it, because packages choose the names inside.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_mcp.config.requirements import parse_entry
from kernel_mcp.environments.metadata import installed_modules, installed_versions, note_file
from kernel_mcp.linux.safe_tree import empty_tree, remove_tree
from kernel_mcp.linux.walk import everything
from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# Scripts of packages: their first line is rewritten to start the kernels' interpreter.
MAX_BYTES = 1024 * 1024
"""Largest script in bytes; larger ones are not entry points."""
_LINE_CHARS = 127
"""Most characters of a first line that Linux reads (BINPRM_BUF_SIZE)."""
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def retarget(folder: Path, *, base: Path, python: Path) -> None:
    """Rewrite scripts in `folder` that start `base`, so that they start `python`. Blocking.

    Links are not followed.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        content = _script(path)
        rest = None if content is None else _body(content, base)
        if rest is None:
            continue
        mode = stat.S_IMODE(path.lstat().st_mode)
        path.unlink()
        path.write_bytes(_head(python) + rest)
        path.chmod(mode)


def _script(path: Path) -> bytes | None:
    """Return the content of a file that begins with `#!`; None if it does not, or is too large."""
    try:
        fd = os.open(path, _OPEN)
    except OSError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            return None
        content = file.read(MAX_BYTES)
    return content if content.startswith(b"#!") else None


def _body(content: bytes, base: Path) -> bytes | None:
    """Return a script without the first lines, which start `base`; None if they do not start it.

    For paths that are long or have spaces uv writes lines for `/bin/sh` that are a string to
    Python.
    """
    first, _, rest = content.partition(b"\n")
    names = {str(base).encode(), shlex.quote(str(base)).encode()}
    if _interpreter(first[2:].strip(), names):
        return rest
    if first.strip() == b"#!/bin/sh":
        second, _, rest = rest.partition(b"\n")
        third, _, rest = rest.partition(b"\n")
        command = second.removeprefix(b"'''exec' ")
        if command != second and third == b"' '''" and _interpreter(command, names):
            return rest
    return None


def _interpreter(words: bytes, names: Sequence[bytes] | set[bytes]) -> bool:
    return any(words == name or words.startswith(name + b" ") for name in names)


def _head(python: Path) -> bytes:
    line = f"#!{python}"
    if len(line) <= _LINE_CHARS and " " not in line:
        return f"{line}\n".encode()
    return f"#!/bin/sh\n'''exec' {shlex.quote(str(python))} \"$0\" \"$@\"\n' '''\n".encode()


STAGING = ".next"
SCRIPTS = "bin"
"""The folder of a generation for the programs of its packages."""
_ASIDE = ".aside-"
_LEFTOVERS = (".lock",)
"""Leftovers of installers beside the packages, which no kernel needs."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The packages that one `install` added.

    requested  its requirements, also those already met
    packages   contents, as `name==version`
    modules    top-level modules by package
    permitted  modules that code may import from then on
    """

    requested: tuple[Requirement, ...]
    packages: tuple[str, ...] = ()
    modules: Mapping[str, Sequence[str]] | None = None
    permitted: tuple[str, ...] = ()


class Layer:
    """One session's packages on disk. All methods block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Create the folder, readable by every user."""
        self.folder.mkdir(mode=0o755, parents=True)
        self.folder.chmod(0o755)

    @property
    def empty(self) -> bool:
        """True if nothing is installed."""
        return not self._numbers()

    @property
    def next_name(self) -> str:
        """The number of the next generation."""
        return str(max(self._numbers(), default=0) + 1)

    def generations(self) -> list[Generation]:
        """Return all generations, newest first."""
        return [_load(self.folder / str(number)) for number in self._numbers()]

    def folders(self) -> list[Path]:
        """Return the folders of all generations, newest first."""
        return [self.folder / str(number) for number in self._numbers()]

    def packages(self) -> dict[str, str]:
        """Return versions by package; the newest generation counts."""
        found: dict[str, str] = {}
        for generation in reversed(self.generations()):
            found |= versions(generation.packages)
        return found

    def modules(self) -> dict[str, tuple[str, ...]]:
        """Return top-level modules by package."""
        found: dict[str, tuple[str, ...]] = {}
        for generation in reversed(self.generations()):
            found |= {name: tuple(names) for name, names in (generation.modules or {}).items()}
        return found

    def requested(self) -> tuple[Requirement, ...]:
        """Return all requirements so far; the last one for a package counts."""
        found: dict[str, Requirement] = {}
        for generation in reversed(self.generations()):
            found |= {each.name: each for each in generation.requested}
        return tuple(found.values())

    def permitted(self) -> frozenset[str]:
        """Return the modules that code may import because of installed packages."""
        return frozenset(name for each in self.generations() for name in each.permitted)

    def stage(self) -> Path:
        """Return an empty folder for the next generation; remove the remains of a failed one."""
        self.discard()
        staging = self.folder / STAGING
        staging.mkdir(mode=0o755)
        return staging

    def discard(self) -> None:
        """Remove the staged folder."""
        remove_tree(self.folder / STAGING)

    def describe(self, requested: tuple[Requirement, ...]) -> Generation:
        """Remove leftovers from the staged folder, seal it, and return its description."""
        staging = self.folder / STAGING
        for name in _LEFTOVERS:
            path = staging / name
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)
        _seal(staging)
        modules = {
            package: tuple(name for name in names if not name.startswith(f"{SCRIPTS}."))
            for package, names in installed_modules(staging).items()
        }
        return Generation(requested, installed_versions(staging), modules)

    def commit(self, generation: Generation) -> None:
        """Rename the staged folder into the layer."""
        staging = self.folder / STAGING
        requested = [str(each) for each in generation.requested]
        modules = dict(generation.modules or {})
        content = json.dumps({**asdict(generation), "requested": requested, "modules": modules})
        place = self.folder / self.next_name
        note_file(place).write_text(content, encoding="utf-8")
        staging.chmod(0o555)
        staging.rename(place)

    def set_aside(self) -> None:
        """Hide all generations from kernels that start from now on."""
        for number in self._numbers() if self.folder.exists() else ():
            (self.folder / str(number)).rename(self.folder / f"{_ASIDE}{number}")

    def take_back(self) -> None:
        """Undo `set_aside`, unless `clear` came first."""
        for entry in list(self.folder.iterdir()) if self.folder.exists() else ():
            if entry.name.startswith(_ASIDE):
                entry.rename(self.folder / entry.name.removeprefix(_ASIDE))

    def clear(self) -> None:
        """Remove everything; does nothing when the folder is missing."""
        with suppress(FileNotFoundError):
            empty_tree(self.folder)

    def _numbers(self) -> list[int]:
        try:
            names = [entry.name for entry in self.folder.iterdir()]
        except FileNotFoundError:  # removed from outside; the next kernel makes a new one
            return []
        return sorted(
            (int(name) for name in names if name.isascii() and name.isdigit()), reverse=True
        )


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return versions by name, from `name==version`."""
    pairs = (text.partition("==") for text in packages)
    return {name: version for name, _, version in pairs}


def _load(folder: Path) -> Generation:
    content = json.loads(note_file(folder).read_text(encoding="utf-8"))
    return Generation(
        requested=tuple(map(parse_entry, content["requested"])),
        packages=tuple(content["packages"]),
        modules=content["modules"],
        permitted=tuple(content["permitted"]),
    )


def _seal(folder: Path) -> None:
    """Make regular files and folders readable by all, writable by none; remove the rest."""
    for entry in everything(folder):
        mode = entry.stat(follow_symlinks=False).st_mode
        path = Path(entry)
        if stat.S_ISDIR(mode):
            path.chmod(0o555)
        elif stat.S_ISREG(mode):
            path.chmod(0o555 if mode & stat.S_IXUSR else 0o444)
        else:
            path.unlink()
