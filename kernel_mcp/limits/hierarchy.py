"""Where this process stands in the control groups of Linux: version 1, version 2 or both."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = frozenset({"memory", "pids", "cpu", "cpuacct"})
"""What is of use here; version 2 counts processor time without `cpuacct`."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted tree of groups: `own` is the folder of the group that this process is in."""

    version: int
    own: Path
    controllers: frozenset[str]


def find_hierarchies(process: Path = Path("/proc/self")) -> tuple[Hierarchy, ...]:
    """The trees whose controllers are of use; empty where there are none.

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
    """Whether a folder is a control group: below a mounted tree of them, by no link or detour."""
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
    """Controller and path of each group in /proc/self/cgroup; version 2 has an empty name."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            yield name, path


def _mounts(text: str) -> Iterator[tuple[str, Path, str, frozenset[str]]]:
    """Root, mount point, type and super options of each mounted tree of groups."""
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
    """The folder of a group, or None where this mount does not show it."""
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
