"""Measure the size of a folder while hostile code changes it.

Each file is opened by a descriptor of its folder and one name. So no link is followed, any depth
works, and few descriptors are open at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from kernel_mcp.linux.safe_tree import Opener, open_beneath
from kernel_mcp.records import dataclass


def everything(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all entries below a folder, parents first; follow no link, skip vanished entries."""
    waiting = [str(folder)]
    while waiting:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(waiting.pop()) as entries:
            for entry in list(entries):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                yield entry


BLOCK = 512
"""Unit of `st_blocks` in bytes, on every file system."""
LARGE = 1024 * 1024
"""Size in bytes from which files are reported one by one."""
MOST_STEPS = 2_000_000
"""Maximum number of path components that one walk resolves: some 2,000 nested folders."""
MOST_OPEN = 16
"""Maximum number of open folders on the way down; others are opened again on the way up."""
ATTEMPTS = 16
"""Maximum number of chmod calls on a folder whose rights hostile code keeps revoking."""
MOST_ENTRIES = 100_000
LEAST_ENTRIES = 10_000
BYTES_PER_ENTRY = 8 * 1024
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_HANDLE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_NEEDED = stat.S_IRUSR | stat.S_IXUSR
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV})
"""Errors for an entry that was moved or replaced, or is on another file system."""

File = tuple[int, int]
"""Device and inode."""


@dataclass(frozen=True, slots=True)
class TreeSize:
    """Bytes on disk and number of files and folders; not `complete` past a limit of the walk.

    `too_many_open_files` is True if processes have too many files open to examine. `unreadable`
    is the number of unreadable folders, which are not counted.
    """

    bytes: int = 0
    entries: int = 0
    complete: bool = True
    too_many_open_files: bool = False
    unreadable: int = 0


def entries_within(size: int) -> int:
    """Return the maximum number of entries for a folder with a limit of `size` bytes."""
    return min(max(size // BYTES_PER_ENTRY, LEAST_ENTRIES), MOST_ENTRIES)


def measure(
    root: int,
    *,
    most_entries: int,
    most_bytes: int,
    large: dict[File, int] | None = None,
    opener: Opener | None = None,
) -> TreeSize:
    """Measure the content of the open folder `root`; hard links of a file count once. Blocks.

    The walk ends early beyond either limit. Sizes of `LARGE` files are put into `large`. On folders
    of this user, missing rights of the owner are restored. Raises OSError and MemoryError for
    shortages of the server, such as of descriptors.
    """
    size = entries = 0
    seen: set[File] = set()
    walk = _Walk(root, opener)
    try:
        for info in walk.run():
            entries += 1
            held = info.st_blocks * BLOCK
            if held >= LARGE or (info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode)):
                key = (info.st_dev, info.st_ino)
                if key in seen:
                    continue  # another name of a file, or moved meanwhile
                seen.add(key)
                if large is not None and held >= LARGE:
                    large[key] = held
            size += held
            if entries > most_entries or size > most_bytes:
                raise _WalkLimitExceeded
    except _WalkLimitExceeded:
        return TreeSize(size, entries, complete=False, unreadable=walk.unseen)
    finally:
        walk.close()
    return TreeSize(size, entries, unreadable=walk.unseen)


class _WalkLimitExceeded(Exception):
    """The tree exceeds a limit of the walk, or code keeps interfering with it."""


@dataclass(slots=True)
class _Level:
    """A folder on the way from the root: `below` are its folders to visit; `fd` is -1 if closed."""

    name: str
    fd: int
    below: list[str] = field(default_factory=list)


class _Walk:
    """Visits each folder once, depth first; `unseen` counts unreadable folders."""

    def __init__(self, root: int, opener: Opener | None) -> None:
        self.unseen = 0
        self._root = root
        self._opener = opener
        self._levels: list[_Level] = []
        self._steps = 0
        self._seen: set[File] = set()

    def run(self) -> Iterator[os.stat_result]:
        """Yield the lstat of each entry below the root. Raises _WalkLimitExceeded, OSError."""
        with _moving():
            yield from self._visit(self._root, "")
        while self._levels:
            level = self._levels[-1]
            if not level.below:
                self._close(self._levels.pop())
                continue
            name = level.below.pop()
            with _moving():
                if level.fd < 0:
                    level.fd = self._again()
                yield from self._visit(level.fd, name)

    def close(self) -> None:
        """Close all open folders."""
        for level in self._levels:
            self._close(level)

    def _visit(self, parent: int, name: str) -> Iterator[os.stat_result]:
        """Yield the lstat of each entry of a folder, which becomes the last level."""
        if (fd := self._opened(parent, name)) < 0:
            self.unseen += 1
            return
        level = _Level(name, fd)
        self._levels.append(level)
        if len(self._levels) > MOST_OPEN:
            self._close(self._levels[-1 - MOST_OPEN])
        info = os.fstat(fd)
        if (info.st_dev, info.st_ino) in self._seen:
            return  # visited already, and moved here meanwhile
        self._seen.add((info.st_dev, info.st_ino))
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    found = _looked_at(fd, entry)
                except FileNotFoundError:
                    continue
                if found is None:
                    self.unseen += 1
                    return
                if stat.S_ISDIR(found.st_mode):
                    level.below.append(entry.name)
                yield found

    def _opened(self, parent: int, name: str) -> int:
        """Open a folder; return -1 if it is unreadable and owned by another user."""
        names = (name,) if name else ()
        self._spend(len(names))
        for _ in range(ATTEMPTS):
            with contextlib.suppress(PermissionError):
                return open_beneath(parent, names, _FOLDER, opener=self._opener)
            if not (_reclaimed(parent) and self._reclaim(parent, names)):
                return -1
        raise _WalkLimitExceeded

    def _again(self) -> int:
        """Open the last level once more from the root."""
        names = [level.name for level in self._levels[1:]]
        for _ in range(ATTEMPTS):
            self._spend(len(names))
            with contextlib.suppress(PermissionError):
                return open_beneath(self._root, names, _FOLDER, opener=self._opener)
            for depth in range(len(names) + 1):
                self._spend(depth)
                self._reclaim(self._root, names[:depth])
        raise _WalkLimitExceeded

    def _reclaim(self, parent: int, names: Sequence[str]) -> bool:
        """Restore the owner's rights on a folder; return False if another user owns it."""
        try:
            handle = open_beneath(parent, names, _HANDLE, opener=self._opener)
        except PermissionError:
            return True  # a folder above has lost its rights again
        try:
            return _reclaimed(handle)
        finally:
            os.close(handle)

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise _WalkLimitExceeded

    @staticmethod
    def _close(level: _Level) -> None:
        fd, level.fd = level.fd, -1
        if fd >= 0:
            os.close(fd)


@contextlib.contextmanager
def _moving() -> Iterator[None]:
    """Suppress errors about entries that are moved or replaced meanwhile."""
    try:
        yield
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _looked_at(folder: int, entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the lstat of an entry; None if the folder is unreadable and owned by another user."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(PermissionError):
            return entry.stat(follow_symlinks=False)
        if not _reclaimed(folder):
            return None
    raise _WalkLimitExceeded


def _reclaimed(folder: int) -> bool:
    """Add the owner's read and search bits to an open folder.

    Return False if it belongs to another user.
    """
    info = os.fstat(folder)
    if info.st_uid != os.geteuid():
        return False
    mode = stat.S_IMODE(info.st_mode)
    if mode & _NEEDED != _NEEDED:
        Path(f"/proc/self/fd/{folder}").chmod(mode | _NEEDED)
    return True
