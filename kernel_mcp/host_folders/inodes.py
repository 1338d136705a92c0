"""Recognise covered and read-only files under their other names (hard links)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import field

from kernel_mcp.host_folders.covers import MOST_COVERS
from kernel_mcp.host_folders.secrets import Parts
from kernel_mcp.linux.safe_tree import open_beneath, opened_beneath
from kernel_mcp.records import dataclass
from kernel_specs import linux

Inode = tuple[int, int]
"""Device and inode of a file."""


@dataclass
class SharedInodes:
    """Inodes that the walks of several mounts share: files may have names in each of them.

    hidden  inodes of all that is hidden, with birth times
    fixed   read-only files with several names, which are searched for until the first walks end
    """

    hidden: dict[Inode, int] = field(default_factory=dict)
    fixed: set[Inode] = field(default_factory=set)


class Inodes:
    """The inodes that one walk knows.

    `visit` is called with each folder that is hidden, and its descriptor.
    """

    def __init__(
        self, root: int, shared: SharedInodes, visit: Callable[[Parts, int], None]
    ) -> None:
        self._root = root
        self._visit = visit
        self.hidden = shared.hidden
        self.fixed = shared.fixed
        self.new: list[Inode] = []
        """Inodes hidden since the last report."""
        self.reused: list[Inode] = []
        """Inodes that another file has had since."""
        self.unsearched_links = False
        """True if a covered file has hard links that no walk has searched for."""
        self._replaced: dict[Inode, int] = {}
        """Birth times of files made read-only since the first walk."""

    def hide(self, parts: Parts, info: os.stat_result) -> None:
        """Record a file or folder that is hidden."""
        key = inode_of(info)
        known = key in self.hidden
        self.hidden[key] = self._birth(parts, info)
        self.new.append(key)
        if info.st_nlink > 1 and not (stat.S_ISDIR(info.st_mode) or known):
            self.unsearched_links = True

    def hide_below(self, start: Parts) -> None:
        """Record all in a hidden folder, or one file there."""
        pending = [start]
        while pending:
            parts = pending.pop()
            with suppress(OSError):  # gone, a symlink, or not readable
                with opened_beneath(self._root, parts) as fd:
                    info = os.fstat(fd)
                if stat.S_ISLNK(info.st_mode):
                    continue
                self.hide(parts, info)
                if stat.S_ISDIR(info.st_mode):
                    fd = open_beneath(self._root, parts, os.O_RDONLY | os.O_DIRECTORY)
                    try:
                        self._visit(parts, fd)
                        pending += [(*parts, name) for name in os.listdir(fd)]  # noqa: PTH208
                    finally:
                        os.close(fd)

    def is_hidden(self, fd: int, info: os.stat_result) -> bool:
        """Return True if an open file is hidden under another name.

        The birth time is compared as well, since inode numbers are reused.
        """
        key = inode_of(info)
        before = self.hidden.get(key)
        if before is None or born(fd) in (before, 0):
            return before is not None
        del self.hidden[key]
        self.reused.append(key)
        return False

    def note_fixed(self, info: os.stat_result | None) -> None:
        """Record a read-only file if it has several names."""
        if info is not None and info.st_nlink > 1:
            self.fixed.add(inode_of(info))
            self.unsearched_links = True

    def note_replaced(self, fd: int, info: os.stat_result, *, fixed: bool) -> bool:
        """Record a file that is read-only now, but of which code may have made a hard link before.

        Return True if the file, by this or another name, is read-only.
        """
        key = inode_of(info)
        if fixed:
            self._replaced.pop(key, None)
            if len(self._replaced) >= MOST_COVERS:
                del self._replaced[next(iter(self._replaced))]
            self._replaced[key] = born(fd)
            self.note_fixed(info)
        return fixed or (info.st_nlink > 1 and self._replaced.get(key) == born(fd))

    def _birth(self, parts: Parts, info: os.stat_result) -> int:
        with suppress(OSError), opened_beneath(self._root, parts) as fd:
            if inode_of(os.fstat(fd)) == inode_of(info):
                return born(fd)
        return 0


def inode_of(info: os.stat_result) -> Inode:
    """Return device and inode."""
    return info.st_dev, info.st_ino


def born(fd: int) -> int:
    """Return the birth time of an open file in nanoseconds; 0 if it is not known."""
    with suppress(OSError):
        return linux.birth_time(fd)
    return 0


def status_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the status of an entry; None if it is gone."""
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None
