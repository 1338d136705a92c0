"""Control groups of Linux, version 1, 2 or both: find, read, write, empty and remove them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from kernel_mcp.barriers import ignore_missing
from kernel_mcp.records import dataclass

MOST_BYTES = 64 * 1024
"""Maximum bytes read of a control file; memory.stat has some 2 KiB."""
ROUNDS = 8
"""Maximum passes over a group whose processes may start others meanwhile."""


def move_all(source: Path, target: Path) -> bool:
    """Move all processes of a group to another; return True if it is empty now."""
    for _ in range(ROUNDS):
        members = processes(source)
        if not members:
            return True
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                write(target / "cgroup.procs", pid)
    return not processes(source)


def remove_with_children(top: Path, keep: str = "") -> bool:
    """Remove a group and its children, killing their processes; return True if it is gone.

    With a child called `keep` only the other children are removed.
    """
    try:
        below = [entry for entry in top.iterdir() if entry.is_dir()]
    except OSError:
        return not top.exists()
    gone = [remove(folder) for folder in below if folder.name != keep]
    if any(folder.name == keep for folder in below):
        return all(gone)
    return all(gone) and remove(top)


def remove(folder: Path) -> bool:
    """Remove a group, killing its processes; return True if it is gone."""
    if _removed(folder):
        return True
    with contextlib.suppress(OSError):  # out of descriptors, for example: the caller may retry
        _kill(folder)
    return _removed(folder)


def _removed(folder: Path) -> bool:
    try:
        _unmake(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _kill(folder: Path) -> None:
    """Send SIGKILL to all processes of a group, unless this one is among them."""
    if os.getpid() in processes(folder):
        return
    with contextlib.suppress(OSError):
        write(folder / "cgroup.kill", 1)  # version 2, Linux 5.14
        return
    for pid in processes(folder):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def processes(folder: Path) -> list[int]:
    """Return the ids of the visible processes in a group; none if it is gone. Raises OSError."""
    with ignore_missing:
        return [pid for pid in map(int, (folder / "cgroup.procs").read_text().split()) if pid > 0]
    return []


def table(file: Path | str) -> dict[str, int]:
    """Return a file of lines with a name and a number as a dict. Raises OSError."""
    return dict(_rows(read(file)))


def read(file: Path | str) -> str:
    """Return the content of a control file; faster than a file object. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, MOST_BYTES).decode()
    finally:
        os.close(fd)


def _rows(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            yield name, int(value)


def make(folder: Path) -> None:
    """Make a group. Raises OSError."""
    folder.mkdir()


def _unmake(folder: Path) -> None:
    folder.rmdir()


def write(file: Path, value: int | str) -> None:
    """Write a control file in a single call, as Linux requires. Raises OSError."""
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


CONTROLLERS = frozenset({"memory", "pids", "cpu", "cpuacct"})
"""Controllers that are used here; version 2 counts CPU time without `cpuacct`."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted tree of groups; `own` is the folder of this process's group."""

    version: int
    own: Path
    controllers: frozenset[str]


def find_hierarchies(process: Path = Path("/proc/self")) -> tuple[Hierarchy, ...]:
    """Return the mounted trees that have one of `CONTROLLERS`; empty if there are none.

    `process` is a folder of /proc with the files `mountinfo` and `cgroup` (see cgroups(7)).
    """
    try:
        mounts = (process / "mountinfo").read_text()
        groups = (process / "cgroup").read_text()
    except OSError:
        return ()
    paths = dict(_paths(groups))
    found: dict[frozenset[str], Hierarchy] = {}
    for root, point, kind, options in _mounts(mounts):
        names = options & CONTROLLERS if kind == "cgroup" else frozenset({""})
        path = next((paths[name] for name in names if name in paths), None)
        if path is None or names in found or not (own := _within(path, root, point)):
            continue
        if kind == "cgroup":
            found[names] = Hierarchy(1, own, names)
        else:
            found[names] = Hierarchy(2, own, _words(own / "cgroup.controllers") & CONTROLLERS)
    return tuple(tree for tree in found.values() if tree.controllers)


def is_group(folder: Path, process: Path = Path("/proc/self")) -> bool:
    """Return True if a folder is a control group of a mounted tree, and its path has no symlink."""
    try:
        mounts = (process / "mountinfo").read_text()
        device = folder.lstat().st_dev
        return os.path.realpath(folder) == str(folder) and any(
            point in folder.parents and point.stat().st_dev == device
            for _, point, _, _ in _mounts(mounts)
        )
    except OSError:
        return False


def _paths(text: str) -> Iterator[tuple[str, str]]:
    """Yield controller and path of each group in /proc/self/cgroup; version 2 has an empty name."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            yield name, path


def _mounts(text: str) -> Iterator[tuple[str, Path, str, frozenset[str]]]:
    """Yield root, mount point, type and super options of each mounted tree of groups."""
    for line in text.splitlines():
        place, separator, device = line.partition(" - ")
        kind, _, options = (*device.split(" ", 2), "", "")[:3]
        if separator and kind in ("cgroup", "cgroup2"):
            fields = place.split(" ")
            yield _plain(fields[3]), Path(_plain(fields[4])), kind, frozenset(options.split(","))


def _plain(text: str) -> str:
    """Undo the octal escapes of /proc."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _within(path: str, root: str, point: Path) -> Path | None:
    """Return the folder of a group, or None if it is not visible in this mount."""
    relative = os.path.relpath(path, root)
    if relative.startswith(".."):
        return None
    own = point / relative
    return own if (own / "cgroup.procs").exists() else None


def _words(file: Path) -> frozenset[str]:
    try:
        return frozenset(file.read_text().split())
    except OSError:
        return frozenset()
