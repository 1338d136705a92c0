"""Detached mounts: what a root server hands to one kernel's sandbox and to no other."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

# <linux/mount.h>, <fcntl.h>; numbers from 424 on are the same on every architecture
_SYS_OPEN_TREE = 428
_SYS_MOUNT_SETATTR = 442
_OPEN_TREE_CLONE = 1
_AT_EMPTY_PATH = 0x1000
_AT_NO_AUTOMOUNT = 0x800
_AT_FDCWD = -100
_MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 2, 4
_MS_PRIVATE = 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def detached(folder: Path) -> int:
    """A bind mount of `folder` that hangs nowhere yet: a descriptor, close-on-exec.

    Takes CAP_SYS_ADMIN and Linux 5.2. Raises OSError.
    """
    # through a handle, so that a symlink in the folder's place is refused
    handle = os.open(folder, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH | _AT_NO_AUTOMOUNT
        tree = _libc.syscall(
            ctypes.c_long(_SYS_OPEN_TREE), ctypes.c_int(handle), b"", ctypes.c_uint(flags)
        )
        _check(tree, f"open_tree {folder}")
    finally:
        os.close(handle)
    try:
        _restrict(tree)
    except BaseException:
        os.close(tree)
        raise
    return int(tree)


def _restrict(tree: int) -> None:
    """Forbid set-user-id programs, devices and propagation.

    Before Linux 5.12 that is left to no_new_privs and to whoever attaches the mount.
    """
    attributes = struct.pack("=4Q", _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, _MS_PRIVATE, 0)
    done = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(tree),
        b"",
        ctypes.c_uint(_AT_EMPTY_PATH),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    if done < 0 and ctypes.get_errno() != errno.ENOSYS:
        _check(done, "mount_setattr")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
