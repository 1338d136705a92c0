"""Read and change folders by descriptor, while hostile code changes them too.

Nothing here follows a link or grows with the depth of a tree. Everything blocks and raises OSError.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

from kernel_mcp.barriers import reason_of
from kernel_mcp.config.values import close_to
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.linux.safe_tree import Opener, open_beneath
from kernel_mcp.output.text import one_line
from kernel_mcp.records import dataclass

MAX_LISTED = 1000
FOLDER = os.O_RDONLY | os.O_DIRECTORY
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """One thing in a folder; `path` is relative to the workspace, `modified` in Unix seconds."""

    path: str
    kind: Literal["file", "folder", "link", "other"]
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class Listing:
    """A folder's entries by name; `omitted` more were not listed."""

    path: str
    entries: tuple[FolderEntry, ...]
    omitted: int = 0


Chosen: TypeAlias = Callable[[str], bool]


def any_name(_name: str) -> bool:
    """Return True: the default of `listing_of`."""
    return True


def listing_of(path: str, fd: int, chosen: Chosen = any_name, offset: int = 0) -> Listing:
    """Return the entries of an open folder whose path is `path`, from number `offset` on.

    Only names for which `chosen` returns True count.
    """
    count = 0

    def names() -> Iterator[str]:
        nonlocal count
        with os.scandir(fd) as entries:
            for entry in entries:
                if chosen(entry.name):
                    count += 1
                    yield entry.name

    found = heapq.nsmallest(offset + MAX_LISTED, names())
    first = found[offset:]
    entries: list[FolderEntry] = []
    unknown = 0
    for name in first:
        try:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            continue
        except PermissionError:  # a folder that may be read and not entered
            unknown += 1
            continue
        entries.append(entry_of(f"{path}/{name}" if path else name, info))
    return Listing(path, tuple(entries), count - len(found) + unknown)


def entry_of(path: str, info: os.stat_result) -> FolderEntry:
    """Return the listing's entry for `path`, from its lstat `info`."""
    kind: Literal["file", "folder", "link", "other"] = "other"
    if stat.S_ISREG(info.st_mode):
        kind = "file"
    elif stat.S_ISDIR(info.st_mode):
        kind = "folder"
    elif stat.S_ISLNK(info.st_mode):
        kind = "link"
    return FolderEntry(
        one_line(path, 1000), kind, info.st_size if kind == "file" else 0, info.st_mtime
    )


def make_folders(
    root: int, parts: Sequence[str], owner: tuple[int, int], opener: Opener | None = None
) -> int:
    """Return a descriptor of the folder `parts` below `root`; missing folders are created."""
    current = open_beneath(root, (), FOLDER, opener=opener)
    try:
        for part in parts:
            deeper = _entered(current, part, owner, opener)
            os.close(current)
            current = deeper
    except OSError:
        os.close(current)
        raise
    return current


def _entered(folder: int, name: str, owner: tuple[int, int], opener: Opener | None) -> int:
    with contextlib.suppress(FileNotFoundError):
        return open_beneath(folder, (name,), FOLDER, opener=opener)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=folder)
    fd = open_beneath(folder, (name,), FOLDER, opener=opener)
    give(fd, owner)
    return fd


def owner_of(fd: int) -> tuple[int, int]:
    """Return user and group id of an open file. Raises OSError."""
    info = os.fstat(fd)
    return info.st_uid, info.st_gid


def give(fd: int, owner: tuple[int, int]) -> None:
    """Change the owner of an open file or folder to `owner`. Raises OSError."""
    if owner_of(fd) != owner:
        os.fchown(fd, *owner)


def temporary_name() -> str:
    """Return a random file name."""
    return f".{secrets.token_hex(8)}.tmp"


def mode_for(folder: int, name: str) -> int:
    """Return the mode for a file that replaces `name`. Raises OSError, with EISDIR for a folder."""
    with contextlib.suppress(FileNotFoundError):
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if stat.S_ISREG(info.st_mode):
            return stat.S_IMODE(info.st_mode) & 0o777 | 0o600
    return 0o644


def replace_file(folder: int, name: str, data: bytes, owner: tuple[int, int]) -> None:
    """Write a temporary file and put it in the place of `name`. Raises OSError."""
    mode = mode_for(folder, name)
    temporary = temporary_name()
    fd = os.open(temporary, CREATE, 0o600, dir_fd=folder)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            give(fd, owner)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


_SHORT = "the server is short of descriptors or memory just now. Try again"
_SHOWN = 20
"""Names that a message about a missing file lists."""


def not_found(path: str, folder: str, missing: str, listing: Listing) -> WorkspaceError:
    """Return the error for a path whose part `missing` is not in `folder`, which exists."""
    names = [entry.path for entry in listing.entries]
    text = f"There is no file {path!r} in the workspace. "
    if close := close_to(missing, names[:200], most=3):
        text += f"Did you mean {' or '.join(map(repr, close))}? "
    more = len(names) + listing.omitted - _SHOWN
    shown = ", ".join(map(repr, names[:_SHOWN])) + (f" and {more:,} more" if more > 0 else "")
    where = f"The folder {folder!r}" if folder else "The workspace"
    text += f"{where} holds {shown}." if names else f"{where} is empty."
    return WorkspaceError(text, errno.ENOENT)


def not_utf8(path: str, encodings: Sequence[str]) -> WorkspaceError:
    """Return the error for a file that is not UTF-8, with its likely encodings."""
    if "utf-8" in encodings:
        return WorkspaceError(
            f"{path!r} is UTF-8 with bytes that are not: it was cut within a character, or joined "
            f"from several encodings. Read it with code, for example open({path!r}, "
            "errors='backslashreplace'), or as base64."
        )
    first, *others = encodings or ["latin-1"]
    looks = f"; its encoding looks like {first}" if encodings else ""
    might = f", but is not certain (or {', '.join(others)})" if others else ""
    return WorkspaceError(
        f"{path!r} is not UTF-8 text{looks}{might}. Read it with read_file and "
        f"encoding={first!r}, with code, for example open({path!r}, encoding={first!r}), or as "
        "base64."
    )


def not_regular(path: str, mode: int) -> WorkspaceError:
    """Return the error for an entry that is not a regular file."""
    if stat.S_ISDIR(mode):
        text = f"{path!r} is a folder. Use list_files to see what it holds."
        return WorkspaceError(text, errno.EISDIR)
    kind = "named pipe" if stat.S_ISFIFO(mode) else "device or socket"
    return WorkspaceError(f"{path!r} is a {kind}, not a regular file.", errno.EACCES)


def unmeasured(error: OSError | MemoryError) -> WorkspaceError:
    """Return the error for a workspace whose disk space cannot be measured."""
    return WorkspaceError(
        "The server could not measure the workspace, so nothing was written: "
        f"{reason_of(error)}. Try again."
    )


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn OSError into WorkspaceError."""
    try:
        yield
    except OSError as error:
        raise explanation(error, path) from None


def explanation(error: OSError, path: str) -> WorkspaceError:
    """Return the error for a failed operation; `path` is empty for the workspace as a whole."""
    reasons = {
        errno.ELOOP: "it is a symbolic link, or leads through one, and the file tools follow none",
        errno.EXDEV: "it leads out of the workspace",
        errno.ENOTDIR: "a part of the path is no folder (files and symbolic links are not)",
        errno.EISDIR: "it is a folder",
        errno.ENOTEMPTY: "it is a folder that is not empty. Remove what it holds first",
        errno.ENXIO: "it is a socket or a device, not a regular file",
        errno.ENAMETOOLONG: "a name in it is too long (at most 255 bytes)",
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EACCES: "its permissions forbid it",
        errno.EPERM: "its permissions forbid it",
        errno.EMFILE: _SHORT,
        errno.ENFILE: _SHORT,
        errno.ENOMEM: _SHORT,
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    what = f"{path!r} cannot be used" if path else "The workspace cannot be changed"
    return WorkspaceError(f"{what}: {reason}.", error.errno or 0)
