"""Landlock as <linux/landlock.h> defines it, through ctypes: versions, rights and rulesets."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import stat

REQUIRED_VERSION = 6
"""The first that scopes signals and abstract Unix sockets: Linux 6.12."""

_CREATE_RULESET, _ADD_RULE = 444, 445
"""The same on every architecture (include/uapi/asm-generic/unistd.h)."""
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1


class Access(enum.IntFlag):
    """LANDLOCK_ACCESS_FS_*: what a rule allows below a folder or on a file."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


ALL_ACCESS = (1 << 16) - 1
ON_FILES = (
    Access.EXECUTE | Access.WRITE_FILE | Access.READ_FILE | Access.TRUNCATE | Access.IOCTL_DEV
)
"""The rights that a rule about anything but a folder may hold."""
_TCP_BIND_AND_CONNECT = 0b11
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


class _RulesetAttr(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneathAttr(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """The Landlock ABI version of the running Linux. Raises OSError when it has none."""
    return _call(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)


def unavailable() -> str | None:
    """Why kernels cannot be confined by Landlock here, or None when they can."""
    needed = f"ABI {REQUIRED_VERSION} or later is needed, which Linux 6.12 brought"
    try:
        found = version()
    except OSError as error:
        return {
            errno.ENOSYS: "this Linux was built without Landlock (or a container's system call "
            f"filter hides it); {needed}",
            errno.EOPNOTSUPP: "Landlock is built into this Linux but switched off at boot; add "
            "`landlock` to the `lsm=` parameter of the Linux command line and restart",
            errno.EPERM: "a system call filter forbids Landlock here; allow the calls landlock_* "
            "in the container or service manager this runs in",
        }.get(error.errno or 0, f"Landlock does not answer ({error}); {needed}")
    if found < REQUIRED_VERSION:
        return f"Landlock here has ABI {found} (Linux {os.uname().release}); {needed}"
    return None


class Ruleset:
    """Rules in the making: all file rights, TCP, signals and abstract sockets are handled.

    What no rule allows is denied once a process restricts itself with it.
    """

    def __init__(self) -> None:
        """Open an empty ruleset. Raises OSError."""
        attr = _RulesetAttr(ALL_ACCESS, _TCP_BIND_AND_CONNECT, _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS)
        self.fd = _call(_CREATE_RULESET, ctypes.byref(attr), ctypes.sizeof(attr), 0)

    def allow(self, path: str, access: Access) -> None:
        """Allow `access` on a file or below a folder; symlinks are followed. Raises OSError."""
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
            attr = _PathBeneathAttr(access if is_folder else access & ON_FILES, fd)
            _call(_ADD_RULE, self.fd, _RULE_PATH_BENEATH, ctypes.byref(attr), 0)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the ruleset; processes that entered it stay restricted."""
        os.close(self.fd)


def _call(number: int, *args: object) -> int:
    wide = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result = int(_libc.syscall(ctypes.c_long(number), *wide))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
