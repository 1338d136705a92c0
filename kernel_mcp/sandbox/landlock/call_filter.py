"""The second system call filter of a kernel under Landlock.

Without namespaces a kernel shares the host's network, processes and IPC, and may share the
server's user. This filter takes away the calls that reach them past Landlock's rules; it is loaded
on top of the filter in `seccomp`, and for each call the stricter verdict counts.
"""

from __future__ import annotations

import errno

from kernel_mcp.linux.syscalls import Architecture
from kernel_mcp.sandbox.seccomp import AF_UNIX, INTERNET_FAMILIES, bpf
from kernel_mcp.sandbox.seccomp.bpf import ALLOW, argument, compile_rules, fail, one_of

# Landlock does not govern modes and times, and a kernel that shares the server's user owns files
# outside its folders. ipykernel and copying programs stop when these calls fail.
_MODES = ("chmod", "fchmod", "fchmodat", "fchmodat2")
_TIMES = ("futimesat", "utime", "utimensat", "utimes")
_WITHOUT_ATTRIBUTES = (  # shutil.copystat goes on when these are not supported
    *("fgetxattr", "flistxattr", "fremovexattr", "fsetxattr", "getxattr", "getxattrat"),
    *("lgetxattr", "listxattr", "listxattrat", "llistxattr", "lremovexattr", "lsetxattr"),
    *("removexattr", "removexattrat", "setxattr", "setxattrat", "file_getattr", "file_setattr"),
)
_REFUSED = (
    # other users' and one's own files outside
    *("chown", "fchown", "fchownat", "lchown"),
    *("inotify_add_watch", "inotify_init", "inotify_init1"),
    # leaving the process group would escape its end
    *("setpgid", "setsid"),
    # the host's message queues
    *("mq_open", "mq_unlink"),
    # other processes of the user
    "ioprio_set",
)
_ONLY_ITSELF = ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam")
"""Process 0 is the caller."""

CONNECTED_TYPES = (1, 5)
"""SOCK_STREAM, SOCK_SEQPACKET: a datagram socket reaches any address without `connect`."""
SOCKET_TYPE_MASK = 0xF
PR_SET_PDEATHSIG = 1
INTERFACE_IOCTLS = range(0x8906, 0x8A00)
"""SIOCGSTAMP up to SIOCPROTOPRIVATE: the host's network interfaces."""
IOCTL_TYPE_MASK = 0xFF00
FILE_IOCTL_TYPES = (0x5800, 0x6600, 0x7600, 0x9400)
"""Where file systems have what the owner of a file or folder may change on it through a handle that
only reads: flags, versions, keys, subvolumes. Landlock does not govern any of it."""
HARMLESS_FILE_IOCTLS = (
    0x80086601,  # FS_IOC_GETFLAGS
    0x80087601,  # FS_IOC_GETVERSION
    0x801C581F,  # FS_IOC_FSGETXATTR
    0xC020660B,  # FS_IOC_FIEMAP
    0x40049409,  # FICLONE: the target has to be open for writing
    0x4020940D,  # FICLONERANGE
    0xC0189436,  # FIDEDUPERANGE
)
PIDFD_IOCTL_TYPE = 0xFF00
"""<linux/pidfd.h>: facts about any process and handles of its namespaces."""
ACCESS_MODE, NO_ACCESS = 3, 3
"""O_ACCMODE, and the mode for ioctl(2) alone, which Landlock does not look at."""


def compile_landlock_filter(arch: Architecture, *, own_user: bool) -> bytes:
    """The filter for one architecture as a `struct sock_filter` array.

    `own_user`: no file outside the kernel's folders belongs to its user, so that it may change
    modes and times.
    """
    silent = dict.fromkeys((*_MODES, *_TIMES), bpf.give(ALLOW)) if own_user else {}
    return compile_rules(arch, _rules() | silent)


def _rules() -> dict[str, bpf.Program]:
    allow, refuse = bpf.give(ALLOW), bpf.give(fail(errno.EPERM))
    denied = bpf.give(fail(errno.EACCES))
    type_checked = argument(1, SOCKET_TYPE_MASK) + one_of(CONNECTED_TYPES, allow, denied)
    # libzmq aborts when its netlink socket is refused with anything but EOPNOTSUPP
    other = one_of(INTERNET_FAMILIES, denied, bpf.give(fail(errno.EOPNOTSUPP)))
    unix_only = argument(0) + bpf.branch(bpf.JUMP_EQ, AF_UNIX, then=type_checked, otherwise=other)
    priority = argument(0) + bpf.branch(
        bpf.JUMP_EQ,
        0,  # PRIO_PROCESS
        then=argument(1) + bpf.branch(bpf.JUMP_EQ, 0, then=allow, otherwise=refuse),
        otherwise=refuse,
    )
    return {
        **dict.fromkeys(_MODES, bpf.give(fail(0))),
        **dict.fromkeys(("futimesat", "utimensat"), _times(path=1, times=2)),
        **dict.fromkeys(("utime", "utimes"), _times(path=0, times=1)),
        **dict.fromkeys(_WITHOUT_ATTRIBUTES, bpf.give(fail(errno.EOPNOTSUPP))),
        **dict.fromkeys(_REFUSED, refuse),
        **dict.fromkeys(
            _ONLY_ITSELF,
            argument(0) + bpf.branch(bpf.JUMP_EQ, 0, then=allow, otherwise=refuse),
        ),
        # libzmq names its own threads by number and aborts when it fails
        "sched_setscheduler": argument(0)
        + bpf.branch(bpf.JUMP_EQ, 0, then=allow, otherwise=bpf.give(fail(0))),
        "connect": denied,
        "ioctl": argument(1) + _requests(),
        "open": argument(1, ACCESS_MODE) + one_of((NO_ACCESS,), denied, allow),
        "openat": argument(2, ACCESS_MODE) + one_of((NO_ACCESS,), denied, allow),
        "prctl": argument(0) + one_of((PR_SET_PDEATHSIG,), refuse, allow),
        "setpriority": priority,
        "socket": unix_only,
        "socketpair": unix_only,
    }


def _requests() -> bpf.Program:
    """Refuse the loaded request of ioctl(2) when it is about interfaces, processes or files."""
    allow, refuse = bpf.give(ALLOW), bpf.give(fail(errno.EPERM))
    types = (*FILE_IOCTL_TYPES, PIDFD_IOCTL_TYPE)
    by_type = bpf.mask(IOCTL_TYPE_MASK) + one_of(types, refuse, allow)
    other = one_of(HARMLESS_FILE_IOCTLS, allow, by_type)
    below_end = bpf.branch(bpf.JUMP_GE, INTERFACE_IOCTLS.stop, then=other, otherwise=refuse)
    return bpf.branch(bpf.JUMP_GE, INTERFACE_IOCTLS.start, then=below_end, otherwise=other)


def _times(*, path: int, times: int) -> bpf.Program:
    """Pretend to set times; refuse "now" for a path, as Path.touch takes success for existence."""
    silent, refuse = bpf.give(fail(0)), bpf.give(fail(errno.EPERM))
    return _if_null(path, silent, _if_null(times, refuse, silent))


def _if_null(index: int, then: bpf.Program, otherwise: bpf.Program) -> bpf.Program:
    """Look at both words of an argument that is a pointer."""
    high = bpf.load(20 + 8 * index) + bpf.branch(bpf.JUMP_EQ, 0, then=then, otherwise=otherwise)
    return argument(index) + bpf.branch(bpf.JUMP_EQ, 0, then=high, otherwise=otherwise)
