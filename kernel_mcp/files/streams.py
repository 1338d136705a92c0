"""Read and write files of any size in pieces; an upload becomes visible once it is complete.

Everything here blocks and belongs in a thread. Hostile code that changes the folders meanwhile
cannot redirect it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Sequence

from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files import folders
from kernel_mcp.files.folders import CREATE, FOLDER
from kernel_mcp.linux.safe_tree import Opener, open_beneath
from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB

Condition = Callable[[str], bool]
"""Returns True if a file with this `tag_of` may be replaced or removed; "" means no file."""
Room = Callable[[int, int], int]
"""Reserves disk space: at least the first number of bytes, up to the second if available.

A negative first number releases bytes. Returns the number of bytes reserved; raises WorkspaceError.
"""
STEP = 64 * MIB
"""Bytes that an upload of unknown size reserves at a time."""
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
"""Errors of open(2) on file systems without unnamed files (O_TMPFILE)."""


class Changed(WorkspaceError):
    """The file has changed since the caller read it."""


def tag_of(info: os.stat_result) -> str:
    """Return a tag of a file's state, which changes with each write that the clock can separate."""
    return f"{info.st_ino:x}-{info.st_size:x}-{info.st_mtime_ns:x}-{info.st_ctime_ns:x}"


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open regular file, with its stat at that time; `text` is True if it begins as UTF-8."""

    fd: int
    name: str
    mime: str
    info: os.stat_result
    text: bool

    def read(self, offset: int, count: int) -> bytes:
        """Return at most `count` bytes from `offset`; none at the end. Raises OSError."""
        return os.pread(self.fd, count, offset)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class Upload:
    """An unnamed file that is written first and then moved to its path. Not thread-safe.

    `size` counts the bytes written, `sha256` is their digest, `reserved_bytes` is its share of the
    quota.
    """

    def __init__(
        self,
        path: str,
        folder: int,
        size: int | None,
        room: Room | None,
        acting: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Create it in `folder`. Raises OSError, and WorkspaceError if `size` bytes do not fit."""
        self.path = path
        self.size = 0
        self.reserved_bytes = 0
        self._room = room
        self._acting = acting
        self._hash = hashlib.sha256()
        self._name = ""
        self._folder = -1
        if size is not None:
            free = os.fstatvfs(folder)
            if size > free.f_bavail * free.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if room is not None:
                self.reserved_bytes = room(size, size)
        try:
            self._fd = self._made(folder)
        except BaseException:
            self._release_space()
            raise

    def _made(self, folder: int) -> int:
        try:
            flags = os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC
            return os.open(".", flags, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
        name = folders.temporary_name()
        fd = os.open(name, CREATE, 0o600, dir_fd=folder)
        self._name, self._folder = name, os.dup(folder)
        return fd

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of the bytes written."""
        return self._hash.hexdigest()

    @property
    def tag(self) -> str:
        """The tag of its present state, see `tag_of`."""
        return tag_of(os.fstat(self._fd))

    def write(self, data: bytes) -> None:
        """Add bytes. Raises WorkspaceError."""
        missing = self.size + len(data) - self.reserved_bytes
        if self._room is not None and missing > 0:
            self.reserved_bytes += self._room(missing, STEP)
        with folders.explained(self.path):
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
        self.size += len(data)
        self._hash.update(data)

    def put(self, folder: int, name: str, owner: tuple[int, int]) -> None:
        """Set the owner and move the file to `name` in `folder`, in one step. Raises OSError."""
        mode = folders.mode_for(folder, name)
        folders.give(self._fd, owner)
        os.fchmod(self._fd, mode)
        if self._name:
            os.rename(self._name, name, src_dir_fd=self._folder, dst_dir_fd=folder)
            self._name = ""
            return
        temporary = folders.temporary_name()
        os.link(f"/proc/self/fd/{self._fd}", temporary, dst_dir_fd=folder)
        try:
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise

    def close(self) -> None:
        """Close it and release reserved space; a file that was not `put` is deleted."""
        self._release_space()
        if self._name:
            with contextlib.suppress(OSError), self._acting():
                os.unlink(self._name, dir_fd=self._folder)
        if self._folder >= 0:
            os.close(self._folder)
        os.close(self._fd)

    def _release_space(self) -> None:
        if self._room is not None and self.reserved_bytes:
            self._room(-self.reserved_bytes, 0)
            self.reserved_bytes = 0


@dataclass(frozen=True, slots=True)
class Nearest:
    """The lowest existing folder above a path, and the number of missing folders below it."""

    fd: int
    missing: int


def nearest(root: int, parts: Sequence[str], opener: Opener | None) -> Nearest:
    """Return the lowest existing folder of `parts` below `root`, open. Raises OSError."""
    current = open_beneath(root, (), FOLDER, opener=opener)
    for depth, part in enumerate(parts):
        try:
            deeper = open_beneath(current, (part,), FOLDER, opener=opener)
        except FileNotFoundError:
            return Nearest(current, len(parts) - depth)
        except OSError:
            os.close(current)
            raise
        os.close(current)
        current = deeper
    return Nearest(current, 0)


def check(folder: int, name: str, allowed: Condition) -> str:
    """Return the tag of the entry `name`, "" if missing. Raises Changed unless it is `allowed`."""
    found = ""
    with contextlib.suppress(FileNotFoundError):
        found = tag_of(os.stat(name, dir_fd=folder, follow_symlinks=False))
    require(allowed(found))
    return found


def require(allowed: bool) -> None:
    """Raise Changed unless `allowed`."""
    if not allowed:
        raise Changed("The file is not as the request expects it: nothing was done. Read it anew.")
