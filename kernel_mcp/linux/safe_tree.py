"""Make, remove and hand over file trees that hostile code has built: any depth, any link, any mode.

No symlink is followed and no path grows with the depth of the tree. The calls block.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

# Put one folder in the place of another, for those who know the place by its name.

_AT_FDCWD = -100  # <fcntl.h>
_RENAME_EXCHANGE = 2  # <linux/fs.h>
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EPERM)
"""What renameat2(2) says on file systems without exchange, old systems and under filters."""
_libc = ctypes.CDLL(None, use_errno=True)


def take_place(newcomer: Path, place: Path) -> Path | None:
    """Move the folder `newcomer` to `place` in one step; where the folder that was there is now.

    They are exchanged, which takes a tenth of the time that replacing takes. Where that cannot be
    done, an empty folder is replaced: None. Raises OSError.
    """
    paths = os.fsencode(newcomer), os.fsencode(place)
    if not _renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE):
        return newcomer
    reason = ctypes.get_errno()
    if reason not in _NOT_HERE:
        raise OSError(reason, os.strerror(reason), str(newcomer), None, str(place))
    newcomer.rename(place)
    return None


def _without(*_: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


_renameat2 = getattr(_libc, "renameat2", _without)


_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BATCH = 4096
"""Entries held in memory at a time."""


def make_private(path: Path) -> None:
    """Make a folder for its owner alone.

    It has no set-group-id bit, whatever it is in: kernels may not copy that. Raises OSError.
    """
    path.mkdir(mode=0o700, parents=True)
    path.chmod(0o700)


def remove_tree(path: Path) -> None:
    """Remove a folder with all it holds; nothing happens when it is not there.

    Raises OSError when something cannot be removed.
    """
    try:
        empty_tree(path)
    except FileNotFoundError:
        return
    path.rmdir()


def empty_tree(path: Path) -> None:
    """Remove all that a folder holds.

    Folders in folders are moved up to the top before they are emptied, so that two open folders
    are enough for any depth. Raises OSError when something cannot be removed.
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
                    # moving a folder rewrites its "..", which takes write permission on it
                    _make_accessible(name, fd)
                    os.rename(name, next(names), src_dir_fd=fd, dst_dir_fd=top)
                else:
                    os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(folder, dir_fd=top)


def _some_entries(fd: int) -> list[tuple[str, bool]]:
    """A batch of a folder's entries: the name and whether it is a folder."""
    with os.scandir(fd) as entries:
        batch = itertools.islice(entries, _BATCH)
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in batch]


def give_tree(path: Path, *, uid: int, gid: int) -> None:
    """Make one owner the owner of a folder and all it holds; its own entry is changed last.

    Nothing is done when the folder belongs to that owner already. Raises OSError.
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
    """Hand over the entries of one folder; the names of those that are folders."""
    folders: list[str] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            os.chown(entry.name, uid, gid, dir_fd=fd, follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
    return folders


def _replace(fd: int, name: str) -> int:
    """Open a neighbour of the folder `fd` and close `fd`."""
    opened = _open_folder(name, fd)
    os.close(fd)
    return opened


def _open_folder(name: str, parent: int | None = None) -> int:
    """Open a folder for listing, whatever mode it was left with."""
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
    """Add the owner's rights to a folder through a handle that needs none."""
    handle = os.open(name, os.O_PATH | _OPEN_FOLDER, dir_fd=parent)
    try:
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            Path(f"/proc/self/fd/{handle}").chmod(mode | stat.S_IRWXU)
    finally:
        os.close(handle)
