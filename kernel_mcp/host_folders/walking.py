"""The walk through a mounted folder that finds what has to be covered, and keeps count of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field

from kernel_mcp.host_folders.secrets import (
    FILE,
    FIXED,
    FOLDER,
    HIDING,
    KEPT,
    OF_AN_ENVIRONMENT,
    Parts,
    around,
    executed,
    executed_by_name,
    holds_credentials,
    judged_by_content,
    secret,
    secret_by_name,
)
from kernel_mcp.linux.safe_tree import open_beneath
from kernel_mcp.records import dataclass

MOST_COVERS = 1000
"""Below one mount; each takes the start of a kernel some 20 µs."""
_LONGEST = 4096
"""Characters of a path below a mount, as Linux takes no longer one: deeper folders are covered."""
_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
"""<linux/fcntl.h>, <linux/stat.h>."""
_libc = ctypes.CDLL(None, use_errno=True)
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY


@dataclass
class Found:
    """What a walk has found below a mount.

    covers   kinds of covers by path below it
    inodes   device and inode of every covered file and folder, with its birth (`born`)
    fresh    those found since somebody was told last; `gone` those that are another file's by now
    removed  what was fixed, and has gone since somebody was told last
    surplus  what hosts execute, beyond the covers that there may be
    unfixed  how many further names of what is fixed are not, as there are too many
    linked   whether a file among them has further names that nobody has looked for
    folders  how many were looked at
    """

    covers: dict[Parts, str] = field(default_factory=dict)
    inodes: dict[tuple[int, int], int] = field(default_factory=dict)
    fresh: list[tuple[int, int]] = field(default_factory=list)
    gone: list[tuple[int, int]] = field(default_factory=list)
    removed: list[Parts] = field(default_factory=list)
    surplus: list[Parts] = field(default_factory=list)
    unfixed: int = 0
    linked: bool = False
    folders: int = 0


class TooManySecrets(Exception):
    """More than `MOST_COVERS`."""


class Walk:
    """Looks through a mount whose folder is open as `root`; `visit` gets each folder and its fd.

    `above` is the path of the mount itself, as names are judged with those of folders around them.
    `own` are covers that the server wants besides, `inner` places of other mounts, by path. With
    `strict` what is judged by its content is covered whatever that is, as it may change. Walks may
    share `inodes`: what one has found another covers under its own names; and `twins`, files that
    are fixed and have further names, which are looked for until the walk is `done`.
    """

    def __init__(
        self,
        root: int,
        *,
        above: Parts = (),
        own: Mapping[Parts, str] | None = None,
        inner: Sequence[Parts] = (),
        writable: bool = False,
        strict: bool = False,
        visit: Callable[[Parts, int], None] = lambda _parts, _fd: None,
        inodes: dict[tuple[int, int], int] | None = None,
        twins: set[tuple[int, int]] | None = None,
    ) -> None:
        self._root = root
        self._writable = writable
        self._strict = strict
        self._above_all = above
        self._own = own or {}
        self._inner = frozenset(inner)
        self._visit = visit
        self._twins = set() if twins is None else twins
        self.done = False
        self.found = Found(inodes={} if inodes is None else inodes)
        self._touched: dict[Parts, None] = {}

    def all(self) -> Found:
        """Walk from the top. Raises OSError when that cannot be read, TooManySecrets."""
        for _ in self.below(()):
            pass
        self.linked()
        self.done = True
        return self.found

    def below(self, start: Parts) -> Iterator[list[Parts]]:
        """Walk a part of it; what has to be covered there, as it is found. Raises as `all`."""
        links: list[Parts] = []
        pending = [start]
        while pending:
            parts = pending.pop()
            if sum(map(len, parts)) + len(parts) > _LONGEST:
                self._cover(parts, FOLDER, None)
                continue
            try:
                fd = open_beneath(self._root, parts, _FOLDER_FLAGS)
            except FileNotFoundError:
                continue
            except OSError as reason:
                if not parts:
                    raise
                # a link by now, another file system, or closed to this user
                if reason.errno not in (errno.ELOOP, errno.ENOTDIR):
                    self._cover(parts, FOLDER, None)
                continue
            try:
                self.found.folders += 1
                self._visit(parts, fd)
                pending += self._entries(parts, fd, links)
            finally:
                os.close(fd)
            if self._touched:
                yield self._taken()
        for parts in links:
            self._led_to(parts)
        if self._touched:
            yield self._taken()

    def _taken(self) -> list[Parts]:
        touched, self._touched = self._touched, {}
        return list(touched)

    def left(self, parts: Parts) -> bool:
        """Note that an entry has gone from its place; whether something fixed has with it."""
        covers = self.found.covers
        if covers.get(parts) not in (FIXED, KEPT):
            return False
        gone = [path for path in covers if path[: len(parts)] == parts]
        removed = [path for path in gone if covers.pop(path) in (FIXED, KEPT)]
        fixed = around(dict.fromkeys((path for path in covers if covers[path] == FIXED), FIXED))
        for path in self._above(parts[:-1]):
            if path not in fixed and covers.get(path) == KEPT:
                del covers[path]
                removed.append(path)
        self.found.removed += removed
        return True

    def hides(self, parts: Parts) -> bool:
        """Whether a path is a secret's by its name, or in what is covered."""
        return secret_by_name(parts, self._above_all) or self._inside(parts)

    def _inside(self, parts: Parts) -> bool:
        covers = self.found.covers
        return any(covers.get(parts[:end]) in HIDING for end in range(1, len(parts)))

    def one(self, parts: Parts, *, hidden: bool = False) -> Iterator[list[Parts]]:
        """Look at one entry that is new or was changed; what has to be covered now.

        It is where it is `hidden`, as it had a secret's name before.
        """
        if self._inside(parts):
            self._know_below(parts)
            return
        try:
            fd = open_beneath(self._root, parts, os.O_PATH | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        except OSError as reason:
            if reason.errno not in (errno.ELOOP, errno.ENOTDIR):
                # another file system, or closed to this user
                self._cover(parts, FOLDER if self._is_folder(parts) else FILE, None)
                yield self._taken()
            return
        try:
            info = os.fstat(fd)
            known = self._known(fd, info)
        finally:
            os.close(fd)
        if self._makes_environment(parts):
            self._fix(parts[:-1])
        kind = self._kind(parts, info.st_mode)
        if kind not in HIDING and (known or hidden) and not stat.S_ISLNK(info.st_mode):
            kind = FOLDER if stat.S_ISDIR(info.st_mode) else FILE  # by another name
        if kind not in HIDING and self.found.covers.get(parts) in HIDING:
            kind = self.found.covers[parts]  # what a link of a secret's name leads to
        if kind == FIXED and stat.S_ISLNK(info.st_mode):
            self._cover(parts, kind, None)
        elif kind == FIXED:
            self._fix(parts)
        elif kind is not None and stat.S_ISLNK(info.st_mode):
            self._led_to(parts)
        elif kind is not None:
            self._cover(parts, kind, info)
        if self._touched:
            yield self._taken()
        if stat.S_ISDIR(info.st_mode) and kind not in HIDING:
            yield from self.below(parts)

    def closed(self) -> set[Parts]:
        """Folders that hold what is covered or another mount, at whatever depth."""
        return around(self.found.covers) | around(dict.fromkeys(self._inner, FOLDER))

    def shows(self, parts: Parts, fd: int, info: os.stat_result) -> str | None:
        """Whether an open entry is shown: None if not, else `FIXED` or empty."""
        if parts in self._inner or self._known(fd, info):
            return None
        known = self.found.covers.get(parts, "")
        kind = known if known in HIDING else self._kind(parts, info.st_mode)
        return None if kind in HIDING else FIXED if FIXED in (kind, known) else ""

    def _entries(self, parts: Parts, fd: int, links: list[Parts]) -> Iterator[Parts]:
        """Cover what has to be; the folders to walk, and into `links` what leads elsewhere."""
        twins = self._writable and not self.done
        fixed = twins and self._fixed(parts)
        with os.scandir(fd) as entries:
            for entry in entries:
                path = (*parts, entry.name)
                if path in self._inner:
                    continue
                link, folder = entry.is_symlink(), entry.is_dir(follow_symlinks=False)
                plain = entry.is_file(follow_symlinks=False)
                mode = stat.S_IFDIR if folder else stat.S_IFREG if plain else stat.S_IFSOCK
                mode = stat.S_IFLNK if link else mode
                if self._makes_environment(path):
                    self._fix(parts)
                kind = self._kind(path, mode)
                if kind == FIXED and link:
                    self._cover(path, FIXED, None)
                elif kind == FIXED:
                    self._fix(path)
                if plain and (fixed or (twins and kind == FIXED)):
                    self._note_twin(entry)
                if kind not in HIDING:
                    if folder:
                        yield path
                    continue
                if link:
                    links.append(path)
                else:
                    self._cover(path, kind, _status(entry))

    def _kind(self, parts: Parts, mode: int) -> str | None:
        path = (*self._above_all, *parts)
        kind = self._own.get(parts) or secret(path, mode)
        usual = stat.S_ISREG(mode) or stat.S_ISLNK(mode)
        if kind is None and usual and judged_by_content(path):
            kind = FILE if self._strict or holds_credentials(self._root, parts) else None
        if kind is None and self._writable:
            folder, link = stat.S_ISDIR(mode), stat.S_ISLNK(mode)
            if executed(parts, folder=folder) or (link and executed(parts, folder=True)):
                return FIXED
        return kind

    def _makes_environment(self, parts: Parts) -> bool:
        """Whether the folder that an entry is in is a virtual environment for it."""
        return parts[-1] == OF_AN_ENVIRONMENT and self._writable and len(parts) > 1

    def _fix(self, parts: Parts) -> None:
        """Keep it from being changed, and what it is in from being moved away."""
        for path in self._above(parts):
            known = self.found.covers.get(path, KEPT)
            self._cover(path, FIXED if path == parts else known, None)

    def _fixed(self, parts: Parts) -> bool:
        return any(self.found.covers.get(path) == FIXED for path in self._above(parts))

    def _note_twin(self, entry: os.DirEntry[str]) -> None:
        info = _status(entry)
        if info is not None and info.st_nlink > 1:
            self._twins.add((info.st_dev, info.st_ino))
            self.found.linked = True

    def _fix_twin(self, parts: Parts) -> None:
        """Keep another name of what is fixed from being changed, as far as there is room."""
        if self._fixed(parts):
            return
        if len(self.found.covers) < MOST_COVERS // 2:
            self._fix(parts)
        else:
            self.found.unfixed += 1

    @staticmethod
    def _above(parts: Parts) -> list[Parts]:
        return [parts[:end] for end in range(1, len(parts) + 1)]

    def _cover(self, parts: Parts, kind: str, info: os.stat_result | None) -> None:
        if info is not None:
            self._know(parts, info)
            if kind == FOLDER:
                self._know_below(parts)
        full = len(self.found.covers) >= MOST_COVERS
        if full and parts not in self.found.covers:
            self._forget_the_gone()
            if len(self.found.covers) >= MOST_COVERS:
                if not (self.done and (kind in (FIXED, KEPT) or executed_by_name(parts[-1:]))):
                    raise TooManySecrets
                if kind != KEPT:
                    self.found.surplus.append(parts)
                return
        self.found.covers[parts] = kind
        self._touched[parts] = None

    def _know(self, parts: Parts, info: os.stat_result) -> None:
        key = (info.st_dev, info.st_ino)
        known = key in self.found.inodes
        self.found.inodes[key] = self._birth(parts, info)
        self.found.fresh.append(key)
        if info.st_nlink > 1 and not (stat.S_ISDIR(info.st_mode) or known):
            self.found.linked = True

    def _know_below(self, start: Parts) -> None:
        """Know what is in a covered folder, or one file there, under other names."""
        pending = [start]
        while pending:
            parts = pending.pop()
            with contextlib.suppress(OSError):  # gone, a link, or closed to this user
                fd = open_beneath(self._root, parts, os.O_PATH | os.O_NOFOLLOW)
                try:
                    info = os.fstat(fd)
                finally:
                    os.close(fd)
                if stat.S_ISLNK(info.st_mode):
                    continue
                self._know(parts, info)
                if stat.S_ISDIR(info.st_mode):
                    fd = open_beneath(self._root, parts, _FOLDER_FLAGS)
                    try:
                        self._visit(parts, fd)
                        pending += [(*parts, name) for name in os.listdir(fd)]  # noqa: PTH208
                    finally:
                        os.close(fd)

    def _cover_link(self, parts: Parts, info: os.stat_result) -> None:
        with contextlib.suppress(OSError):
            fd = open_beneath(self._root, parts, os.O_PATH | os.O_NOFOLLOW)
            try:
                if self._known(fd, info):
                    self._cover(parts, FILE, info)
            finally:
                os.close(fd)

    def _known(self, fd: int, info: os.stat_result) -> bool:
        """Whether an open file is covered under another name; numbers of inodes are used again."""
        key = (info.st_dev, info.st_ino)
        before = self.found.inodes.get(key)
        if before is None or born(fd) in (before, 0):
            return before is not None
        del self.found.inodes[key]
        self.found.gone.append(key)
        return False

    def _birth(self, parts: Parts, info: os.stat_result) -> int:
        with contextlib.suppress(OSError):
            fd = open_beneath(self._root, parts, os.O_PATH | os.O_NOFOLLOW)
            try:
                found = os.fstat(fd)
                if (found.st_dev, found.st_ino) == (info.st_dev, info.st_ino):
                    return born(fd)
            finally:
                os.close(fd)
        return 0

    def _is_folder(self, parts: Parts) -> bool:
        return stat.S_ISDIR(self._mode("/".join((f"/proc/self/fd/{self._root}", *parts))))

    @staticmethod
    def _mode(path: str) -> int:
        try:
            return os.lstat(path).st_mode
        except OSError:
            return 0

    def _forget_the_gone(self) -> None:
        top = f"/proc/self/fd/{self._root}"
        for parts in list(self.found.covers):
            if not os.path.lexists("/".join((top, *parts))):
                del self.found.covers[parts]

    def _led_to(self, parts: Parts) -> None:
        """Cover what a symbolic link with a secret's name leads to, if that is below the mount."""
        top = os.path.realpath(f"/proc/self/fd/{self._root}")
        goal = os.path.realpath("/".join((top, *parts)))
        inside = tuple(os.path.relpath(goal, top).split("/"))
        if inside[0] in ("..", ".") or self.found.covers.get(inside) in HIDING:
            return
        try:
            info = os.lstat(goal)
        except OSError:
            return
        self._cover(inside, FOLDER if stat.S_ISDIR(info.st_mode) else FILE, info)

    def linked(self, *, anyway: bool = False) -> list[Parts]:
        """Cover other names of the files found last: a walk that asks for every file's inode."""
        if not (self.found.linked or anyway):
            return []
        self.found.linked = False
        pending: list[Parts] = [()]
        while pending:
            parts = pending.pop()
            try:
                fd = open_beneath(self._root, parts, _FOLDER_FLAGS)
            except OSError:
                continue
            try:
                with os.scandir(fd) as entries:
                    pending += self._other_names(parts, entries)
            finally:
                os.close(fd)
        return self._taken()

    def _other_names(self, parts: Parts, entries: Iterable[os.DirEntry[str]]) -> Iterator[Parts]:
        """Cover those in one folder; the folders to go on with."""
        for entry in entries:
            path = (*parts, entry.name)
            if path in self._inner or self.found.covers.get(path) in HIDING:
                continue
            if entry.is_dir(follow_symlinks=False):
                if not (self._own.get(path) or secret((*self._above_all, *path), stat.S_IFDIR)):
                    yield path
                continue
            info = _status(entry)
            if info and (info.st_dev, info.st_ino) in self.found.inodes:
                self._cover_link(path, info)
            elif info and (info.st_dev, info.st_ino) in self._twins and not self.done:
                self._fix_twin(path)


def born(fd: int) -> int:
    """When an open file was made, in nanoseconds (statx(2)); 0 where that is not known."""
    statx = getattr(_libc, "statx", None)
    content = ctypes.create_string_buffer(256)
    arguments = (ctypes.c_int(_AT_EMPTY_PATH), ctypes.c_uint(_STATX_BTIME), content)
    if statx is None or statx(ctypes.c_int(fd), b"", *arguments) != 0:
        return 0
    (filled,) = struct.unpack_from("=I", content)
    seconds, nanoseconds = struct.unpack_from("=qI", content, 80)
    return seconds * 10**9 + nanoseconds if filled & _STATX_BTIME else 0


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None
