"""The Landlock rules of a kernel, and its second system call filter."""

from __future__ import annotations

import enum
import errno
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kernel_mcp.errors import LaunchError
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.syscalls import Architecture
from kernel_mcp.sandbox import seccomp
from kernel_mcp.sandbox.seccomp import (
    AF_UNIX,
    ALLOW,
    INTERNET_FAMILIES,
    argument,
    compile_rules,
    fail,
    one_of,
)
from kernel_specs.landlock import calls

REQUIRED_VERSION = 6
"""First ABI version that restricts signals and abstract Unix sockets: Linux 6.12."""


class Access(enum.IntFlag):
    """LANDLOCK_ACCESS_FS_*: rights that a rule grants below a folder or on a file."""

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
"""Rights that a rule about a file may grant; the others apply to folders only."""
_TCP_BIND_AND_CONNECT = 0b11
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


def version() -> int:
    """Return the Landlock ABI version of the running Linux. Raises OSError without Landlock."""
    return calls.version()


def unavailable() -> str | None:
    """Return why kernels cannot be confined by Landlock here, or None if they can."""
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
    """Rules on all file rights, TCP, signals and abstract sockets; other accesses are denied."""

    def __init__(self, fd: int = -1) -> None:
        """Make a ruleset, or own the ruleset `fd` of the same kind."""
        network, scoped = _TCP_BIND_AND_CONNECT, _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS
        self.fd = calls.make(ALL_ACCESS, network, scoped) if fd < 0 else fd

    def allow(self, path: str, access: Access) -> None:
        """Allow `access` on a file or below a folder; symlinks are followed. Raises OSError."""
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
            calls.allow(self.fd, fd, access if is_folder else access & ON_FILES)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the ruleset; processes that entered it stay restricted."""
        os.close(self.fd)


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
"""All rights except those for device nodes."""
CHANGE = WRITE & ~(Access.MAKE_SOCK | Access.MAKE_FIFO)
"""Rights in mounted folders: no sockets and FIFOs, as programs of the host may open these."""

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
    *map(str, sorted(Path("/etc").glob("python3*"))),  # sitecustomize of Debian
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
    # joblib and dask fail if these exist and are not readable
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
DEVICE = Access.READ_FILE | Access.WRITE_FILE | Access.IOCTL_DEV
"""Rights on a device that the operator grants."""
_TOO_MUCH = (
    *("/", "/boot", "/dev", "/etc", "/home", "/media", "/mnt", "/opt", "/proc", "/root", "/run"),
    *("/srv", "/sys", "/tmp", "/var", "/var/tmp"),
)


def allow_system(rules: Ruleset) -> None:
    """Allow the files of the host that every program requires, as far as they exist."""
    wanted = [
        *((path, RUN) for path in _PROGRAMS),
        *((path, READ) for path in (*_SETTINGS, *_MACHINE)),
        *_DEVICES.items(),
    ]
    for path, access in wanted:
        with suppress(FileNotFoundError, PermissionError):
            rules.allow(path, access)


def allow_required(rules: Ruleset, paths: Iterable[Path], access: Access) -> None:
    """Allow `access` to paths that the kernel requires.

    Raises LaunchError if one cannot be allowed.
    """
    for path in paths:
        if not path.is_absolute() or os.path.realpath(path) in _TOO_MUCH:
            raise LaunchError(
                f"{path} cannot be made readable in the sandbox: it has to be an absolute path "
                "to a folder or file of its own; check what --python and --kernel name"
            )
        try:
            rules.allow(str(path), access)
        except OSError as error:
            raise LaunchError(
                f"{path} cannot be made part of the sandbox: {error.strerror}; the kernel needs it"
            ) from error


def closed_folder(paths: Sequence[Path], identity: Identity) -> str | None:
    """Return the first folder above one of `paths` that `identity` may not enter, or None."""
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
    """Return True if the permission bits let `identity` search a folder or read a file."""
    found = path.stat()
    folder = stat.S_ISDIR(found.st_mode)
    shift = 6 if found.st_uid == identity.uid else 3 if found.st_gid == identity.gid else 0
    return bool(found.st_mode >> shift & (1 if folder else 4))


# The second filter refuses calls that reach the host's network, processes, IPC and files despite
# Landlock's rules: there are no namespaces, and the user may be the server's. Landlock does not
# restrict changes of modes and times, and a kernel that shares the server's user owns files outside
# its folders. For such a kernel these calls succeed without effect, as ipykernel and copying
# programs stop on errors.
_MODES = ("chmod", "fchmod", "fchmodat", "fchmodat2")
_TIMES = ("futimesat", "utime", "utimensat", "utimes")
_WITHOUT_ATTRIBUTES = (  # shutil.copystat ignores EOPNOTSUPP
    *("fgetxattr", "flistxattr", "fremovexattr", "fsetxattr", "getxattr", "getxattrat"),
    *("lgetxattr", "listxattr", "listxattrat", "llistxattr", "lremovexattr", "lsetxattr"),
    *("removexattr", "removexattrat", "setxattr", "setxattrat", "file_getattr", "file_setattr"),
)
_REFUSED = (
    # files outside the kernel's folders
    *("chown", "fchown", "fchownat", "lchown"),
    *("inotify_add_watch", "inotify_init", "inotify_init1"),
    # a process outside the process group would not be killed with it
    *("setpgid", "setsid"),
    # message queues of the host
    *("mq_open", "mq_unlink"),
    # other processes of the user
    "ioprio_set",
)
_ONLY_ITSELF = ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam")
"""Calls that are allowed only for process 0, the caller."""

CONNECTED_TYPES = (1, 5)
"""SOCK_STREAM, SOCK_SEQPACKET: a datagram socket can send to any address without `connect`."""
SOCKET_TYPE_MASK = 0xF
PR_SET_PDEATHSIG = 1
INTERFACE_IOCTLS = range(0x8906, 0x8A00)
"""SIOCGSTAMP up to SIOCPROTOPRIVATE: network interfaces of the host."""
IOCTL_TYPE_MASK = 0xFF00
FILE_IOCTL_TYPES = (0x5800, 0x6600, 0x7600, 0x9400)
"""Types of ioctl(2) by which an owner may change a file opened for reading only.

They change flags, versions, keys and subvolumes. Landlock restricts none of them.
"""
HARMLESS_FILE_IOCTLS = (
    0x80086601,  # FS_IOC_GETFLAGS
    0x80087601,  # FS_IOC_GETVERSION
    0x801C581F,  # FS_IOC_FSGETXATTR
    0xC020660B,  # FS_IOC_FIEMAP
    0x40049409,  # FICLONE: the target must be open for writing
    0x4020940D,  # FICLONERANGE
    0xC0189436,  # FIDEDUPERANGE
)
PIDFD_IOCTL_TYPE = 0xFF00
"""<linux/pidfd.h>: facts about any process, and descriptors of its namespaces."""
ACCESS_MODE, NO_ACCESS = 3, 3
"""O_ACCMODE, and the access mode for ioctl(2) only, which Landlock does not check."""


def compile_landlock_filter(arch: Architecture, *, own_user: bool) -> bytes:
    """Return the filter for one architecture as a `struct sock_filter` array.

    With `own_user`, changes of modes and times are allowed: that user owns no files outside.
    """
    silent = dict.fromkeys((*_MODES, *_TIMES), seccomp.give(ALLOW)) if own_user else {}
    return compile_rules(arch, _call_rules() | silent)


def _call_rules() -> dict[str, seccomp.Program]:
    allow, refuse = seccomp.give(ALLOW), seccomp.give(fail(errno.EPERM))
    denied = seccomp.give(fail(errno.EACCES))
    type_checked = argument(1, SOCKET_TYPE_MASK) + one_of(CONNECTED_TYPES, allow, denied)
    # libzmq aborts if its netlink socket fails with another error than EOPNOTSUPP
    other = one_of(INTERNET_FAMILIES, denied, seccomp.give(fail(errno.EOPNOTSUPP)))
    unix_only = argument(0) + seccomp.branch(
        seccomp.JUMP_EQ, AF_UNIX, then=type_checked, otherwise=other
    )
    priority = argument(0) + seccomp.branch(
        seccomp.JUMP_EQ,
        0,  # PRIO_PROCESS
        then=argument(1) + seccomp.branch(seccomp.JUMP_EQ, 0, then=allow, otherwise=refuse),
        otherwise=refuse,
    )
    return {
        **dict.fromkeys(_MODES, seccomp.give(fail(0))),
        **dict.fromkeys(("futimesat", "utimensat"), _times(path=1, times=2)),
        **dict.fromkeys(("utime", "utimes"), _times(path=0, times=1)),
        **dict.fromkeys(_WITHOUT_ATTRIBUTES, seccomp.give(fail(errno.EOPNOTSUPP))),
        **dict.fromkeys(_REFUSED, refuse),
        **dict.fromkeys(
            _ONLY_ITSELF,
            argument(0) + seccomp.branch(seccomp.JUMP_EQ, 0, then=allow, otherwise=refuse),
        ),
        # libzmq passes the ids of its own threads, and aborts on an error
        "sched_setscheduler": argument(0)
        + seccomp.branch(seccomp.JUMP_EQ, 0, then=allow, otherwise=seccomp.give(fail(0))),
        "connect": denied,
        "ioctl": argument(1) + _requests(),
        "open": argument(1, ACCESS_MODE) + one_of((NO_ACCESS,), denied, allow),
        "openat": argument(2, ACCESS_MODE) + one_of((NO_ACCESS,), denied, allow),
        "prctl": argument(0) + one_of((PR_SET_PDEATHSIG,), refuse, allow),
        "setpriority": priority,
        "socket": unix_only,
        "socketpair": unix_only,
    }


def _requests() -> seccomp.Program:
    """Return rules that refuse the loaded ioctl(2) request on interfaces, processes or files."""
    allow, refuse = seccomp.give(ALLOW), seccomp.give(fail(errno.EPERM))
    types = (*FILE_IOCTL_TYPES, PIDFD_IOCTL_TYPE)
    by_type = seccomp.mask(IOCTL_TYPE_MASK) + one_of(types, refuse, allow)
    other = one_of(HARMLESS_FILE_IOCTLS, allow, by_type)
    below_end = seccomp.branch(seccomp.JUMP_GE, INTERFACE_IOCTLS.stop, then=other, otherwise=refuse)
    return seccomp.branch(seccomp.JUMP_GE, INTERFACE_IOCTLS.start, then=below_end, otherwise=other)


def _times(*, path: int, times: int) -> seccomp.Program:
    """Return rules that ignore changes of times, but refuse "now" for a path.

    Success would mean to Path.touch that the file exists.
    """
    silent, refuse = seccomp.give(fail(0)), seccomp.give(fail(errno.EPERM))
    return _if_null(path, silent, _if_null(times, refuse, silent))


def _if_null(index: int, then: seccomp.Program, otherwise: seccomp.Program) -> seccomp.Program:
    """Return rules that compare both words of a pointer argument with 0."""
    high = seccomp.load(20 + 8 * index) + seccomp.branch(
        seccomp.JUMP_EQ, 0, then=then, otherwise=otherwise
    )
    return argument(index) + seccomp.branch(seccomp.JUMP_EQ, 0, then=high, otherwise=otherwise)
