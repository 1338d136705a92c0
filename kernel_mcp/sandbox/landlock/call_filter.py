"""The second system call filter of a kernel under Landlock.

Without namespaces a kernel shares the host's network, processes and IPC, and may share the
server's user. This filter takes away the calls that reach them past Landlock's rules; it is loaded
on top of the filter in `seccomp`, and for each call the stricter verdict counts.
"""

from __future__ import annotations

import errno
from typing import TypeAlias

from kernel_mcp.linux.syscalls import Architecture
from kernel_mcp.sandbox.seccomp import (
    AF_UNIX,
    ALLOW,
    INTERNET_FAMILIES,
    KILL,
    OFFSET_ARCH,
    OFFSET_NR,
    bpf,
    fail,
)

_Table: TypeAlias = dict[str, tuple[int | None, int | None]]

# Landlock does not govern modes and times, and a kernel that shares the server's user owns files
# outside its folders. ipykernel and copying programs stop when these calls fail.
_MODES: _Table = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
}
_TIMES: _Table = {
    "futimesat": (261, None),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
}
_WITHOUT_ATTRIBUTES: _Table = {
    # shutil.copystat goes on when these are not supported
    "fgetxattr": (193, 10),
    "file_getattr": (468, 468),
    "flistxattr": (196, 13),
    "fremovexattr": (199, 16),
    "fsetxattr": (190, 7),
    "getxattr": (191, 8),
    "getxattrat": (464, 464),
    "lgetxattr": (192, 9),
    "listxattr": (194, 11),
    "listxattrat": (465, 465),
    "llistxattr": (195, 12),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "file_setattr": (469, 469),
}
_REFUSED: _Table = {
    # other users' and one's own files outside
    "chown": (92, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "inotify_add_watch": (254, 27),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "lchown": (94, None),
    # sockets of the host
    "connect": (42, 203),
    # leaving the process group would escape its end
    "setpgid": (109, 154),
    "setsid": (112, 157),
    # the host's message queues
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # other processes of the user
    "ioprio_set": (251, 30),
}
_ONLY_ITSELF: _Table = {
    # process 0 is the caller
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
}
_CHECKED: _Table = {
    "ioctl": (16, 29),
    "open": (2, None),
    "openat": (257, 56),
    "prctl": (157, 167),
    "sched_setscheduler": (144, 119),
    "setpriority": (141, 140),
    "socket": (41, 198),
    "socketpair": (53, 199),
}

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


def numbers(arch: Architecture) -> dict[str, int]:
    """The calls this filter knows, by name."""
    column = 0 if arch.machine == "x86_64" else 1
    tables = _MODES | _TIMES | _WITHOUT_ATTRIBUTES | _REFUSED | _ONLY_ITSELF | _CHECKED
    return {name: number for name, pair in tables.items() if (number := pair[column]) is not None}


def compile_landlock_filter(arch: Architecture, *, own_user: bool) -> bytes:
    """The filter for one architecture as a `struct sock_filter` array.

    `own_user`: no file outside the kernel's folders belongs to its user, so that it may change
    modes and times.
    """
    rules = _rules() | (dict.fromkeys([*_MODES, *_TIMES], bpf.give(ALLOW)) if own_user else {})
    known = {number: rules[name] for name, number in numbers(arch).items()}
    allow = bpf.give(ALLOW)
    starts: list[tuple[int, bpf.Program]] = [(0, known.get(0, allow))]
    for number in range(1, max(known) + 2):
        rule = known.get(number, allow)
        if rule != starts[-1][1]:
            starts.append((number, rule))
    return bpf.assemble(
        bpf.load(OFFSET_ARCH)
        + bpf.branch(
            bpf.JUMP_EQ,
            arch.audit_arch,
            then=bpf.load(OFFSET_NR) + bpf.search(starts),
            otherwise=bpf.give(KILL),
        )
    )


def _rules() -> dict[str, bpf.Program]:
    allow, refuse = bpf.give(ALLOW), bpf.give(fail(errno.EPERM))
    denied = bpf.give(fail(errno.EACCES))
    type_checked = _argument(1, SOCKET_TYPE_MASK) + _one_of(CONNECTED_TYPES, allow, denied)
    # libzmq aborts when its netlink socket is refused with anything but EOPNOTSUPP
    other = _one_of(INTERNET_FAMILIES, denied, bpf.give(fail(errno.EOPNOTSUPP)))
    unix_only = _argument(0) + bpf.branch(bpf.JUMP_EQ, AF_UNIX, then=type_checked, otherwise=other)
    priority = _argument(0) + bpf.branch(
        bpf.JUMP_EQ,
        0,  # PRIO_PROCESS
        then=_argument(1) + bpf.branch(bpf.JUMP_EQ, 0, then=allow, otherwise=refuse),
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
            _argument(0) + bpf.branch(bpf.JUMP_EQ, 0, then=allow, otherwise=refuse),
        ),
        # libzmq names its own threads by number and aborts when it fails
        "sched_setscheduler": _argument(0)
        + bpf.branch(bpf.JUMP_EQ, 0, then=allow, otherwise=bpf.give(fail(0))),
        "connect": denied,
        "ioctl": _argument(1) + _requests(),
        "open": _argument(1, ACCESS_MODE) + _one_of((NO_ACCESS,), denied, allow),
        "openat": _argument(2, ACCESS_MODE) + _one_of((NO_ACCESS,), denied, allow),
        "prctl": _argument(0) + _one_of((PR_SET_PDEATHSIG,), refuse, allow),
        "setpriority": priority,
        "socket": unix_only,
        "socketpair": unix_only,
    }


def _requests() -> bpf.Program:
    """Refuse the loaded request of ioctl(2) when it is about interfaces, processes or files."""
    allow, refuse = bpf.give(ALLOW), bpf.give(fail(errno.EPERM))
    types = (*FILE_IOCTL_TYPES, PIDFD_IOCTL_TYPE)
    by_type = bpf.mask(IOCTL_TYPE_MASK) + _one_of(types, refuse, allow)
    other = _one_of(HARMLESS_FILE_IOCTLS, allow, by_type)
    below_end = bpf.branch(bpf.JUMP_GE, INTERFACE_IOCTLS.stop, then=other, otherwise=refuse)
    return bpf.branch(bpf.JUMP_GE, INTERFACE_IOCTLS.start, then=below_end, otherwise=other)


def _times(*, path: int, times: int) -> bpf.Program:
    """Pretend to set times; refuse "now" for a path, as Path.touch takes success for existence."""
    silent, refuse = bpf.give(fail(0)), bpf.give(fail(errno.EPERM))
    return _if_null(path, silent, _if_null(times, refuse, silent))


def _if_null(index: int, then: bpf.Program, otherwise: bpf.Program) -> bpf.Program:
    """Look at both words of an argument that is a pointer."""
    high = bpf.load(20 + 8 * index) + bpf.branch(bpf.JUMP_EQ, 0, then=then, otherwise=otherwise)
    return _argument(index) + bpf.branch(bpf.JUMP_EQ, 0, then=high, otherwise=otherwise)


def _argument(index: int, bits: int = 0xFFFFFFFF) -> bpf.Program:
    """Load the low word of a system call's argument, which is all that the kernel reads."""
    loaded = bpf.load(16 + 8 * index)
    return loaded if bits == 0xFFFFFFFF else loaded + bpf.mask(bits)


def _one_of(values: tuple[int, ...], then: bpf.Program, otherwise: bpf.Program) -> bpf.Program:
    program = otherwise
    for value in values:
        program = bpf.branch(bpf.JUMP_EQ, value, then=then, otherwise=program)
    return program
