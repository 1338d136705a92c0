"""What a kernel under Landlock may reach of the host's file tree."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kernel_mcp.errors import LaunchError
from kernel_mcp.linux.folders import Identity

# Landlock as <linux/landlock.h> defines it, through ctypes: versions, rights and rulesets.

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


READ = Access.READ_FILE | Access.READ_DIR
RUN = READ | Access.EXECUTE
WRITE = (
    RUN
    | Access.WRITE_FILE
    | Access.TRUNCATE
    | Access.REFER
    | Access.REMOVE_DIR
    | Access.REMOVE_FILE
    | Access.MAKE_DIR
    | Access.MAKE_REG
    | Access.MAKE_SOCK
    | Access.MAKE_FIFO
    | Access.MAKE_SYM
)
"""Everything but device nodes."""

_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = (
    "/etc/alternatives",
    "/etc/crypto-policies",
    "/etc/fonts",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/os-release",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/openssl.cnf",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    *map(str, sorted(Path("/etc").glob("python3*"))),  # Debian's sitecustomize
)
_MACHINE = (
    "/proc/cpuinfo",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/sys/vm/overcommit_memory",
    "/proc/uptime",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
    # joblib and dask stop when these exist and cannot be read
    "/sys/fs/cgroup/cpu.max",
    "/sys/fs/cgroup/cpu/cpu.cfs_period_us",
    "/sys/fs/cgroup/cpu/cpu.cfs_quota_us",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
_DEVICES = {
    "/dev/full": Access.READ_FILE | Access.WRITE_FILE,
    "/dev/null": Access.READ_FILE | Access.WRITE_FILE | Access.TRUNCATE,
    "/dev/random": Access.READ_FILE,
    "/dev/urandom": Access.READ_FILE,
    "/dev/zero": Access.READ_FILE | Access.WRITE_FILE,
}
_TOO_MUCH = (
    *("/", "/boot", "/dev", "/etc", "/home", "/media", "/mnt", "/opt", "/proc", "/root", "/run"),
    *("/srv", "/sys", "/tmp", "/var", "/var/tmp"),
)


def allow_system(rules: Ruleset) -> None:
    """What every program needs of the host, as far as this host has it."""
    wanted = [
        *((path, RUN) for path in _PROGRAMS),
        *((path, READ) for path in (*_SETTINGS, *_MACHINE)),
        *_DEVICES.items(),
    ]
    for path, access in wanted:
        with suppress(FileNotFoundError, PermissionError):
            rules.allow(path, access)


def allow_required(rules: Ruleset, paths: Iterable[Path], access: Access) -> None:
    """Rules that the kernel cannot do without. Raises LaunchError."""
    for path in paths:
        if not path.is_absolute() or os.path.realpath(path) in _TOO_MUCH:
            raise LaunchError(
                f"{path} cannot be made readable in the sandbox: it has to be an absolute path "
                "to a folder or file of its own; check the interpreter given with --python"
            )
        try:
            rules.allow(str(path), access)
        except OSError as error:
            raise LaunchError(
                f"{path} cannot be made part of the sandbox: {error.strerror}; the kernel needs it"
            ) from error


def closed_folder(paths: Sequence[Path], identity: Identity) -> str | None:
    """The first folder on the way to one of `paths` that `identity` may not enter, or None."""
    seen: set[str] = set()
    for path in paths:
        for name in {os.path.normpath(path), os.path.realpath(path)}:
            for folder in (*reversed(Path(name).parents), Path(name)):
                if str(folder) in seen:
                    continue
                seen.add(str(folder))
                if not _may_enter(folder, identity):
                    return str(folder)
    return None


def _may_enter(path: Path, identity: Identity) -> bool:
    """Whether the permission bits let `identity` search a folder or read a file."""
    found = path.stat()
    folder = stat.S_ISDIR(found.st_mode)
    shift = 6 if found.st_uid == identity.uid else 3 if found.st_gid == identity.gid else 0
    return bool(found.st_mode >> shift & (1 if folder else 4))
