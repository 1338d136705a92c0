"""Files of any size, piece by piece: one that is read, and one that is there once it is whole.

Everything here blocks and belongs in a thread; what hostile code does meanwhile leads nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Sequence

from kernel_mcp.config.values import MIB
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files import folders
from kernel_mcp.files.folders import CREATE, FOLDER
from kernel_mcp.linux.safe_tree import Opener, open_beneath
from kernel_mcp.records import dataclass

Condition = Callable[[str], bool]
"""Whether a file with this `tag_of` may be replaced or removed; an empty one stands for no file."""
Room = Callable[[int, int], int]
"""Sets aside as many bytes as the first number says, up to the second if there are, or gives a
negative first back; how many. Raises WorkspaceError.
"""
STEP = 64 * MIB
"""What an upload of unknown size sets aside at a time."""
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
"""What open(2) says where there are no files without a name."""


class Changed(WorkspaceError):
    """A file is not as the caller knows it."""


def tag_of(info: os.stat_result) -> str:
    """What tells one state of a file from all others, as far as the clock of the system does."""
    return f"{info.st_ino:x}-{info.st_size:x}-{info.st_mtime_ns:x}-{info.st_ctime_ns:x}"


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A regular file that is open; `info` is as it was then, `text` whether it begins as UTF-8."""

    fd: int
    name: str
    mime: str
    info: os.stat_result
    text: bool

    def read(self, offset: int, count: int) -> bytes:
        """At most `count` bytes; none at the end. Raises OSError."""
        return os.pread(self.fd, count, offset)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)


class Upload:
    """A file without a name, which is written and then put in a place. One thread at a time.

    `size` counts the bytes written, `sha256` is theirs, `promised` were set aside for it.
    """

    def __init__(
        self,
        path: str,
        folder: int,
        size: int | None,
        room: Room | None,
        acting: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Make it in `folder`. Raises OSError, and WorkspaceError where `size` bytes do not fit."""
        self.path = path
        self.size = 0
        self.promised = 0
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
                self.promised = room(size, size)
        try:
            self._fd = self._made(folder)
        except BaseException:
            self._give_back()
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
        """Of what was written."""
        return self._hash.hexdigest()

    @property
    def tag(self) -> str:
        """Its `tag_of`."""
        return tag_of(os.fstat(self._fd))

    def write(self, data: bytes) -> None:
        """Add bytes. Raises WorkspaceError."""
        missing = self.size + len(data) - self.promised
        if self._room is not None and missing > 0:
            self.promised += self._room(missing, STEP)
        with folders.explained(self.path):
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
        self.size += len(data)
        self._hash.update(data)

    def put(self, folder: int, name: str, owner: tuple[int, int]) -> None:
        """Give it to `owner`, and its place. Raises OSError."""
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
        """Let go of it; without a place it is gone."""
        self._give_back()
        if self._name:
            with contextlib.suppress(OSError), self._acting():
                os.unlink(self._name, dir_fd=self._folder)
        if self._folder >= 0:
            os.close(self._folder)
        os.close(self._fd)

    def _give_back(self) -> None:
        if self._room is not None and self.promised:
            self._room(-self.promised, 0)
            self.promised = 0


@dataclass(frozen=True, slots=True)
class Nearest:
    """The folder that exists on the way to another, and how many below it do not."""

    fd: int
    missing: int


def nearest(root: int, parts: Sequence[str], opener: Opener | None) -> Nearest:
    """The lowest folder of `parts` below `root` that is there. Raises OSError."""
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
    """The `tag_of` what is there, or an empty one. Raises Changed unless `allowed`."""
    found = ""
    with contextlib.suppress(FileNotFoundError):
        found = tag_of(os.stat(name, dir_fd=folder, follow_symlinks=False))
    require(allowed(found))
    return found


def require(allowed: bool) -> None:
    """Raise Changed unless it is."""
    if not allowed:
        raise Changed("The file is not as the request expects it: nothing was done. Read it anew.")
