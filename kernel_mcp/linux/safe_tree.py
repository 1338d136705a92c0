"""Create, remove and hand over file trees built by hostile code: any depth, links and modes.

No symlink is followed, and no path grows with the depth of the tree. The calls block.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from kernel_specs import linux

# Open below a folder that may change: one openat2(2), or one openat(2) per component.
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x01, 0x02, 0x04, 0x08
_RESOLVE = _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH
_ALWAYS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_PATH_ONLY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK_BYTES = 4000
"""Longest path given to one call; PATH_MAX is 4096."""
_ATTEMPTS = 16
"""Maximum attempts: openat2 fails with EAGAIN if a rename raced with it."""

Opener = Callable[[int, Sequence[bytes], int], int]
"""Function that opens components below a folder's descriptor with flags; raises OSError."""


def open_beneath(
    folder: int, parts: Sequence[str], flags: int, *, opener: Opener | None = None
) -> int:
    """Open `parts` below the descriptor `folder`, never through a link or another file system.

    Opening never blocks, whatever the file is. Any depth works. Raises OSError: ELOOP or ENOTDIR
    for a link, EXDEV for another file system, and the errors of open(2).
    """
    names = [os.fsencode(part) for part in parts]
    for name in names:
        if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), os.fsdecode(name))
    *folders, last = _chunks(names) if names else [[b"."]]
    opener = opener or _default_opener()
    current = folder
    try:
        for chunk in folders:
            deeper = opener(current, chunk, _PATH_ONLY)
            if current != folder:
                os.close(current)
            current = deeper
        return opener(current, last, flags if flags & os.O_PATH else flags | _ALWAYS)
    finally:
        if current != folder:
            os.close(current)


@contextlib.contextmanager
def opened_beneath(folder: int, parts: Sequence[str]) -> Iterator[int]:
    """Open an entry below a folder for its status, even a symlink, and close it at the end.

    Raises the errors of `open_beneath`.
    """
    fd = open_beneath(folder, parts, os.O_PATH | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)


def open_place(path: Path) -> int:
    """Open an absolute path that contains no symlink, as O_PATH; return the descriptor.

    Raises OSError, with ELOOP or ENOTDIR for a link.
    """
    current = os.open("/", _PATH_ONLY)
    for name in path.parts[1:]:
        try:
            deeper = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
        finally:
            os.close(current)
        current = deeper
    if stat.S_ISLNK(os.fstat(current).st_mode):
        os.close(current)
        raise OSError(errno.ELOOP, "a symbolic link is there now", str(path))
    return current


def _chunks(names: Sequence[bytes]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    length = 0
    for name in names:
        if chunk and length + len(name) + 1 > _CHUNK_BYTES:
            yield chunk
            chunk, length = [], 0
        chunk.append(name)
        length += len(name) + 1
    yield chunk


def with_openat2(folder: int, names: Sequence[bytes], flags: int) -> int:
    """Open by one openat2 call; the error after `_ATTEMPTS` races is EAGAIN. Raises OSError."""
    path = b"/".join(names)
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(BlockingIOError, InterruptedError):
            return linux.openat2(folder, path, flags, _RESOLVE)
    return linux.openat2(folder, path, flags, _RESOLVE)


def by_walking(folder: int, names: Sequence[bytes], flags: int) -> int:
    """Open component by component. Raises OSError."""
    device = os.fstat(folder).st_dev
    current = folder
    try:
        for name in names[:-1]:
            deeper = os.open(name, _PATH_ONLY, dir_fd=current)
            if current != folder:
                os.close(current)
            current = deeper
            _check_device(current, device)
        fd = os.open(names[-1], flags | os.O_NOFOLLOW, dir_fd=current)
        try:
            _check_device(fd, device)
        except OSError:
            os.close(fd)
            raise
        return fd
    finally:
        if current != folder:
            os.close(current)


def _check_device(fd: int, device: int) -> None:
    if os.fstat(fd).st_dev != device:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@cache
def _default_opener() -> Opener:
    """Return `with_openat2` if it works here: some container runtimes forbid it."""
    probe = os.open("/", _PATH_ONLY)
    try:
        os.close(with_openat2(probe, [b"."], _PATH_ONLY))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # a shortage, not a property of the system: test again at the next call
        return by_walking
    finally:
        os.close(probe)
    return with_openat2


_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EPERM)
"""Errors of renameat2(2) on file systems without exchange, old systems and under filters."""


def take_place(newcomer: Path, place: Path) -> Path | None:
    """Move the folder `newcomer` to `place`; return the new path of the folder from there.

    The two are exchanged, which takes a tenth of the time of replacing. If Linux cannot exchange
    them, `place` must be empty, is replaced, and None is returned. Raises OSError.
    """
    try:
        linux.exchange(os.fsencode(newcomer), os.fsencode(place))
    except OSError as reason:
        if reason.errno not in _NOT_HERE:
            raise OSError(
                reason.errno, reason.strerror, str(newcomer), None, str(place)
            ) from reason
        newcomer.rename(place)
        return None
    return newcomer


_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BATCH = 4096
"""Maximum number of entries in memory at a time."""


def make_private(path: Path) -> None:
    """Make a folder of mode 0700 without an inherited set-group-id bit. Raises OSError."""
    path.mkdir(mode=0o700, parents=True)
    path.chmod(0o700)


def remove_tree(path: Path) -> None:
    """Remove a folder and its content, if it exists. Raises OSError if something remains."""
    try:
        empty_tree(path)
    except FileNotFoundError:
        return
    path.rmdir()


def empty_tree(path: Path) -> None:
    """Remove the content of a folder. Raises OSError if something remains.

    Nested folders are moved to the top first, so that two open folders suffice for any depth.
    """
    top = _open_folder(str(path))
    names = (f".{secrets.token_hex(8)}-{number}" for number in itertools.count())
    try:
        while found := _some_entries(top):
            for name, is_folder in found:
                if is_folder:
                    _flatten(name, top, names)
                else:
                    os.unlink(name, dir_fd=top)
    finally:
        os.close(top)


def _flatten(folder: str, top: int, names: Iterator[str]) -> None:
    """Remove a folder of `top` after moving the folders in it to `top`."""
    fd = _open_folder(folder, top)
    try:
        while found := _some_entries(fd):
            for name, is_folder in found:
                if is_folder:
                    # moving a folder rewrites its "..", which requires write permission on it
                    _make_accessible(name, fd)
                    os.rename(name, next(names), src_dir_fd=fd, dst_dir_fd=top)
                else:
                    os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(folder, dir_fd=top)


def _some_entries(fd: int) -> list[tuple[str, bool]]:
    """Return a batch of a folder's entries: the name, and True for a folder."""
    with os.scandir(fd) as entries:
        batch = itertools.islice(entries, _BATCH)
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in batch]


def give_tree(path: Path, *, uid: int, gid: int) -> None:
    """Change the owner of a folder and its content, the folder itself last. Raises OSError.

    Does nothing if the folder already has that owner.
    """
    if path.lstat().st_uid == uid:
        return
    fd = _open_folder(str(path))
    try:
        pending = [_give_entries(fd, uid, gid)]
        while True:
            if pending[-1]:
                fd = _replace(fd, pending[-1].pop())
                pending.append(_give_entries(fd, uid, gid))
                continue
            pending.pop()
            if not pending:
                break
            fd = _replace(fd, "..")
        os.fchown(fd, uid, gid)
    finally:
        os.close(fd)


def _give_entries(fd: int, uid: int, gid: int) -> list[str]:
    """Change the owner of the entries of one folder; return the names of its folders."""
    folders: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            os.chown(entry.name, uid, gid, dir_fd=fd, follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
    return folders


def _replace(fd: int, name: str) -> int:
    """Open a subfolder or the parent of the folder `fd`, and close `fd`."""
    opened = _open_folder(name, fd)
    os.close(fd)
    return opened


def _open_folder(name: str, parent: int | None = None) -> int:
    """Open a folder for listing, whatever its mode."""
    try:
        fd = os.open(name, _OPEN_FOLDER, dir_fd=parent)
    except PermissionError:
        _make_accessible(name, parent)
        return os.open(name, _OPEN_FOLDER, dir_fd=parent)
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        with contextlib.suppress(PermissionError):
            os.fchmod(fd, mode | stat.S_IRWXU)
    return fd


def _make_accessible(name: str, parent: int | None) -> None:
    """Add the owner's rights to a folder through a handle that requires none."""
    handle = os.open(name, os.O_PATH | _OPEN_FOLDER, dir_fd=parent)
    try:
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            Path(f"/proc/self/fd/{handle}").chmod(mode | stat.S_IRWXU)
    finally:
        os.close(handle)
