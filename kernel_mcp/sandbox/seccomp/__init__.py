"""The system call filter of a kernel: a deny-list over the calls of Linux 6.17.

Calls unknown to the table answer ENOSYS, so that a newer Linux does not widen the surface.
Arguments are compared by their low words where Linux reads no more.
"""

from __future__ import annotations

import errno
from collections.abc import Collection

from kernel_mcp.linux.syscalls import REFUSED, Architecture
from kernel_mcp.sandbox.seccomp import bpf
from kernel_mcp.sandbox.seccomp.bpf import ALLOW, argument, compile_rules, fail, one_of

NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET of <linux/sched.h>."""
CLONE_FILES, CLONE_THREAD = 0x400, 0x10000
"""<linux/sched.h>."""
CLOSE_RANGE_UNSHARE = 2
"""<linux/close_range.h>."""
AF_UNIX, INTERNET_FAMILIES = 1, (2, 10)
"""With AF_INET and AF_INET6: the network namespace is empty, so that they reach nothing."""
INTERNET_PROTOCOLS = (0, 6, 17)
"""The family's own choice, IPPROTO_TCP, IPPROTO_UDP: no MPTCP, SCTP, UDP-Lite, ping or raw ones."""
UNIX_PROTOCOLS = (0, 1)
"""None, and PF_UNIX, which means the same."""
CONNECTED_TYPES = (1, 5)
"""SOCK_STREAM, SOCK_SEQPACKET: both ends of a pair are connected for good. Datagrams are not."""
TYPE_OF_SOCKET = 0xF
"""SOCK_TYPE_MASK of <linux/net.h>."""
MSG_OOB = 1
"""<linux/socket.h>."""
TERMINAL_IOCTLS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI and TIOCLINUX push input into a terminal; TIOCSETD loads line disciplines."""
PREALLOCATIONS = (0x40305828, 0x4030582A, 0x40305839)
"""FS_IOC_RESVSP, FS_IOC_RESVSP64 and FS_IOC_ZERO_RANGE: fallocate by another name."""
DEVICE_TYPES = (0x2000, 0x6000)
"""S_IFCHR, S_IFBLK."""
TYPE_MASK = 0xF000
SET_ID_BITS = 0o6000
"""S_ISUID, S_ISGID."""
MAKES_A_FILE = 0o100 | 0o20000000
"""O_CREAT, __O_TMPFILE of <asm-generic/fcntl.h>: other opens do not look at the mode."""
SURVEILLANCE = (1024, 1026, 1040)
"""F_SETLEASE, F_NOTIFY, F_SETDELEG of <linux/fcntl.h>."""
PR_SET_DUMPABLE = 4
"""<linux/prctl.h>."""
SOL_SOCKET, SO_LINGER = 1, 13
"""<asm-generic/socket.h>."""
MAP_HUGETLB, MFD_HUGETLB = 0x40000, 0x4
"""<asm-generic/mman-common.h>, <linux/memfd.h>."""

BUILDING = frozenset(
    {"mount", "mount_setattr", "move_mount", "open_tree", "prctl", "setns", "sethostname"}
    | {"umount2", "unshare"}
)
"""What it takes to build sandboxes for others, as a template does that has imported packages."""


def compile_filter(arch: Architecture, but: Collection[str] = (), *, sealed: bool = False) -> bytes:
    """The filter for one architecture, as bubblewrap's `--seccomp` reads it.

    The calls named in `but` are allowed whatever their arguments. `sealed` refuses every Unix
    socket that could be connected to one of the host's: what is left are pairs.
    """
    rules = {**_rules(), **(_sealed() if sealed else {})}
    return compile_rules(arch, {name: rule for name, rule in rules.items() if name not in but})


def _rules() -> dict[str, bpf.Program]:
    refuse, allow = bpf.give(fail(errno.EPERM)), bpf.give(ALLOW)
    return {
        **dict.fromkeys(REFUSED, refuse),
        # ENOSYS makes libc fall back to clone, whose flags a filter can read
        "clone3": bpf.give(fail(errno.ENOSYS)),
        "clone": argument(0)
        + bpf.branch(bpf.JUMP_SET, NAMESPACE_FLAGS, then=refuse, otherwise=_threads()),
        # as with clone: what is measured of a process is what one of its threads has open
        "close_range": _without_bits(2, CLOSE_RANGE_UNSHARE, errno.EINVAL),
        "personality": argument(0)
        + bpf.branch(bpf.JUMP_EQ, 0, then=bpf.give(ALLOW), otherwise=refuse),
        **dict.fromkeys(("socket", "socketpair"), _sockets()),
        # urgent data of Unix sockets has been a way into Linux, and a filter cannot tell families
        **dict.fromkeys(("sendmsg", "recvmsg"), _without_bits(2, MSG_OOB, errno.EOPNOTSUPP)),
        **dict.fromkeys(
            ("sendto", "recvfrom", "sendmmsg", "recvmmsg"),
            _without_bits(3, MSG_OOB, errno.EOPNOTSUPP),
        ),
        # it fills a disk before the watchdog looks; libc writes zeros instead
        "fallocate": bpf.give(fail(errno.EOPNOTSUPP)),
        "ioctl": _none_of(1, (*TERMINAL_IOCTLS, *PREALLOCATIONS)),
        "mknod": _makes_a_node(1),
        "mknodat": _makes_a_node(2),
        # a program in a kept workspace would run with the rights of the server's user
        **dict.fromkeys(("chmod", "fchmod", "creat"), _without_bits(1, SET_ID_BITS)),
        **dict.fromkeys(("fchmodat", "fchmodat2"), _without_bits(2, SET_ID_BITS)),
        "open": _opens(flags=1, mode=2),
        "openat": _opens(flags=2, mode=3),
        # its flags and mode are in memory; programs fall back to openat
        "openat2": bpf.give(fail(errno.ENOSYS)),
        # open(2) of a file that another process holds a lease on waits
        "fcntl": _none_of(1, SURVEILLANCE),
        # what a process holds would be hidden from an ordinary user's server
        "prctl": argument(0) + one_of((PR_SET_DUMPABLE,), refuse, allow),
        # the last close(2) of a lingering socket blocks, and that may be the server's
        "setsockopt": argument(1)
        + bpf.branch(
            bpf.JUMP_EQ,
            SOL_SOCKET,
            then=argument(2) + one_of((SO_LINGER,), bpf.give(fail(errno.ENOPROTOOPT)), allow),
            otherwise=allow,
        ),
        # no limit counts the pages that the machine has set aside
        "mmap": _without_bits(3, MAP_HUGETLB, errno.ENOMEM),
        "memfd_create": _without_bits(1, MFD_HUGETLB, errno.ENOMEM),
    }


def _threads() -> bpf.Program:
    """Refuse CLONE_THREAD without CLONE_FILES: a thread with its own table of open files."""
    allow, refuse = bpf.give(ALLOW), bpf.give(fail(errno.EPERM))
    shares = bpf.branch(bpf.JUMP_SET, CLONE_FILES, then=allow, otherwise=refuse)
    return bpf.branch(bpf.JUMP_SET, CLONE_THREAD, then=shares, otherwise=allow)


def _sealed() -> dict[str, bpf.Program]:
    """A socket file below a mounted folder answers whatever the mount and the namespaces are."""
    refused = bpf.give(fail(errno.EACCES))
    pairs = argument(1, TYPE_OF_SOCKET) + one_of(CONNECTED_TYPES, bpf.give(ALLOW), refused)
    return {"socket": _sockets(unix=refused), "socketpair": _sockets(unix=pairs)}


def _sockets(unix: bpf.Program | None = None) -> bpf.Program:
    """Allow sockets of few families and of their usual protocols; `unix` decides on AF_UNIX."""
    allow, other = bpf.give(ALLOW), bpf.give(fail(errno.EPROTONOSUPPORT))
    internet = argument(2) + one_of(INTERNET_PROTOCOLS, allow, other)
    unix = unix or argument(2) + one_of(UNIX_PROTOCOLS, allow, other)
    # libzmq aborts on EAFNOSUPPORT
    known = one_of(INTERNET_FAMILIES, internet, bpf.give(fail(errno.EOPNOTSUPP)))
    return argument(0) + bpf.branch(bpf.JUMP_EQ, AF_UNIX, then=unix, otherwise=known)


def _none_of(index: int, values: tuple[int, ...], bits: int = 0xFFFFFFFF) -> bpf.Program:
    """Refuse the call when the masked argument is one of `values`."""
    refuse, allow = bpf.give(fail(errno.EPERM)), bpf.give(ALLOW)
    return argument(index, bits) + one_of(values, refuse, allow)


def _without_bits(index: int, bits: int, error: int = errno.EPERM) -> bpf.Program:
    """Fail with `error` when the argument has one of `bits`."""
    lack = bpf.give(fail(error))
    return argument(index) + bpf.branch(bpf.JUMP_SET, bits, then=lack, otherwise=bpf.give(ALLOW))


def _makes_a_node(mode: int) -> bpf.Program:
    """Refuse devices and set-id bits."""
    refuse = bpf.give(fail(errno.EPERM))
    kind = _none_of(mode, DEVICE_TYPES, TYPE_MASK)
    return argument(mode) + bpf.branch(bpf.JUMP_SET, SET_ID_BITS, then=refuse, otherwise=kind)


def _opens(*, flags: int, mode: int) -> bpf.Program:
    """Refuse to make a file with set-id bits."""
    checked = _without_bits(mode, SET_ID_BITS)
    return argument(flags) + bpf.branch(
        bpf.JUMP_SET, MAKES_A_FILE, then=checked, otherwise=bpf.give(ALLOW)
    )
