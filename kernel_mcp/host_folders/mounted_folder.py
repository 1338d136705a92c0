"""One mounted folder as the keeper sees it: its walk, its rules for Landlock, and its makers."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from kernel_mcp.host_folders import secrets
from kernel_mcp.host_folders.inodes import SharedInodes, born
from kernel_mcp.host_folders.makers import HOST, LIKELY, LOST, Makers, by_code
from kernel_mcp.host_folders.named_paths import MOST_NAMED
from kernel_mcp.host_folders.namespaces import Work
from kernel_mcp.host_folders.rights import Rights
from kernel_mcp.host_folders.secrets import Parts
from kernel_mcp.host_folders.signs import signs_in
from kernel_mcp.host_folders.walking import Walk, WalkRules
from kernel_mcp.linux.safe_tree import open_beneath, open_place, opened_beneath
from kernel_specs.landlock import calls

READ_DIR = 1 << 3
ON_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""<linux/landlock.h>: listing, and the rights that a rule about a file may hold."""


class Watcher(Protocol):
    """Watches folders and files for changes, and knows who made them."""

    makers: Makers

    def add(self, folder: MountedFolder, parts: Parts, fd: int) -> None:
        """Watch an open folder."""

    def add_file(self, folder: MountedFolder, parts: Parts, file: int) -> None:
        """Watch the content of an open file."""


class MountedFolder:
    """One mounted folder: its descriptor, its walk, and where sandboxes see it."""

    def __init__(
        self,
        number: int,
        data: dict[str, Any],
        watches: Watcher,
        shared: SharedInodes,
    ) -> None:
        self.number = number
        self.host, self.guest = str(data["host"]), str(data["guest"])
        self.above = Path(self.host).parts[1:]
        self._rules = WalkRules(
            above=self.above,
            own={tuple(path): str(kind) for path, kind in data["own"]},
            inner=frozenset(tuple(path) for path in data["inner"]),
            writable=data["writable"] is True,
            strict=data["strict"] is True,
        )
        self.writable = self._rules.writable
        self.tells_makers = self.writable
        """True if the makers of its entries are known."""
        self._watches = watches
        self._shared = shared
        self._root = -1
        self.sources: set[Parts] = set()
        """Settings files below the mount from which the server has read paths."""
        self.rights_changed = False
        """True if the access rights of the folder itself may have changed."""
        self.obeyed: dict[Parts, bool] = {}
        """Paths that agents obey and that have changed since the last report to the server.

        The value is True if the file was written in place (IN_MODIFY), else False.
        """
        self._link_targets: set[Parts] = set()
        """Targets of links whose names agents obey."""
        self.named_by_server: list[Parts] = []
        """Last complete list of paths from the server; `named_next` collects the next one."""
        self.named_next: list[Parts] = []
        self.walk = self._open_walk()
        self.rights = Rights(self._root)
        self._began = time.time_ns()

    def _open_walk(self) -> Walk:
        if self._root >= 0:
            os.close(self._root)
        self._root = -1
        self._root = open_place(Path(self.host))
        return Walk(
            self._root,
            self._rules,
            visit=lambda parts, fd: self._watches.add(self, parts, fd),
            obeys=self.note_obeyed,
            shared=self._shared,
        )

    @property
    def mount_check(self) -> Work:
        """The check that a sandbox shows this folder: its path there, with device and inode."""
        info = os.fstat(self._root)
        return self.guest, (), f"{info.st_dev}:{info.st_ino}"

    def maker(self, parts: Parts) -> str:
        """Return the maker of an entry that programs of the host execute.

        Empty if that is unknown, or if the host does not execute the entry.
        """
        covers = self.walk.covers.kinds
        named = secrets.executed((*self.above, *parts))
        if not (self.tells_makers and (named or covers.get(parts) == secrets.FIXED)):
            return ""
        signs: list[str] = []
        if not (named or parts in self.walk.named_paths.all):
            signs = signs_in(self._root, parts)
        entries = [(*parts, name) for name in signs] or [parts]
        makers = [self._watches.makers.of(self._root, each) for each in entries]
        return min(makers, key=lambda maker: (not by_code(maker), maker != LIKELY, maker != HOST))

    def is_older(self, parts: Parts) -> bool:
        """Return True if the entry at a path is older than this object.

        An unknown birth time counts as older.
        """
        with suppress(OSError), opened_beneath(self._root, parts) as fd:
            return born(fd) < self._began
        return False

    def writer(self, parts: Parts, *, modified: bool) -> str:
        """Return the maker that last wrote, created or removed a file; empty if makers are unknown.

        For a file `modified` in place only a write of the last second counts. `LOST` if such a file
        has several names.
        """
        if not self.tells_makers:
            return ""
        if modified and self._has_names(parts):
            return LOST
        return self._watches.makers.writer(self._root, parts, recently=modified)

    def _has_names(self, parts: Parts) -> bool:
        with suppress(OSError), opened_beneath(self._root, parts) as fd:
            return os.fstat(fd).st_nlink > 1
        return False

    def obeys(self, parts: Parts) -> bool:
        """Return True if agents obey the file at a path, or a link with such a name leads to it."""
        return parts in self._link_targets or secrets.obeyed((*self.above[-1:], *parts))

    def note_obeyed(self, parts: Parts) -> None:
        """Watch a file that agents obey, or the target of a link with such a name.

        After the first walk the file counts as changed.
        """
        if self.walk.covers.done:
            self.obeyed.setdefault(parts, False)
        goal = self.walk.goal(parts)
        if goal is None or goal == () or len(self._link_targets) >= MOST_NAMED:
            return
        if goal != parts:
            self._link_targets.add(goal)
        # missing, or not accessible
        with suppress(OSError), opened_beneath(self._root, goal) as fd:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                self._watches.add_file(self, goal, fd)

    def reads(self, parts: Parts) -> bool:
        """Return True if covers depend on the content of a file."""
        return parts in self.sources or secrets.judged_by_content((*self.above, *parts))

    @property
    def is_folder(self) -> bool:
        """True if a folder is mounted, False for a single file."""
        return stat.S_ISDIR(os.fstat(self._root).st_mode)

    def reopen(self) -> None:
        """Open and walk the folder that is at the path now."""
        self.walk = self._open_walk()
        self.rights = Rights(self._root)
        if self.is_folder:
            self.walk.all()
            for _ in self.walk.fix(self.named_by_server):
                pass

    def allow(self, ruleset: int, read: int, write: int) -> None:
        """Add Landlock rules; where a folder holds a secret, one for each entry that is shown.

        Raises OSError.
        """
        access = write if self.writable else read
        closed = self.walk.closed() if self._rules.strict else set()
        if () not in closed:
            calls.allow(ruleset, self._root, access if self.is_folder else access & ON_FILES)
            return
        pending: list[tuple[Parts, int]] = [((), access)]
        while pending:
            parts, access = pending.pop()
            with suppress(OSError):  # gone or not readable: it gets no rule
                folder = open_beneath(self._root, parts, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    if read & READ_DIR:
                        calls.allow(ruleset, folder, READ_DIR)
                    for name in os.listdir(folder):  # noqa: PTH208  # an open folder
                        path = (*parts, name)
                        rights = self._allow_entry(ruleset, folder, path, (access, read), closed)
                        if rights:
                            pending.append((path, rights))
                finally:
                    os.close(folder)

    def _allow_entry(
        self,
        ruleset: int,
        folder: int,
        path: Parts,
        rights: tuple[int, int],
        closed: Collection[Parts],
    ) -> int:
        """Add the rule for one entry: `rights` are those to write and those to read only.

        Return 0, or the rights for the entries of a folder that contains covered paths.
        """
        try:
            place = os.open(path[-1], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return 0
        try:
            info = os.fstat(place)
            kind = None if stat.S_ISLNK(info.st_mode) else self.walk.shows(path, place, info)
            if kind is None:
                return 0
            access = rights[1 if kind == secrets.FIXED else 0]
            if not stat.S_ISDIR(info.st_mode):
                calls.allow(ruleset, place, access & ON_FILES)
            elif path in closed:
                return access
            else:
                calls.allow(ruleset, place, access)
            return 0
        finally:
            os.close(place)
