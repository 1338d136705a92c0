"""The system call filter of a kernel: a deny-list over the calls of Linux 6.17.

Unknown calls fail with ENOSYS, so that a newer Linux does not widen the attack surface. If Linux
reads only the low word of an argument, only that word is compared.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from kernel_mcp.linux.syscalls import LAST_KNOWN, REFUSED, Architecture
from kernel_specs.linux import PR_SET_DUMPABLE
from kernel_specs.restricted.checkpoints.suspended import AS_A_COPY

# Classic BPF. Each instruction is a `struct sock_filter` of <linux/filter.h>: a 16-bit code, 8-bit
# jump offsets for true and false, a 32-bit operand. Jumps only go forward.

ALLOW = 0x7FFF0000  # SECCOMP_RET_ALLOW
KILL = 0x80000000  # SECCOMP_RET_KILL_PROCESS
_ERRNO = 0x00050000  # SECCOMP_RET_ERRNO

OFFSET_NR, OFFSET_ARCH, OFFSET_ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`, little-endian; an argument has eight bytes."""
X32_BIT = 0x40000000

LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
JUMP = 0x05  # BPF_JMP | BPF_JA
JUMP_EQ = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_GE = 0x35  # BPF_JMP | BPF_JGE | BPF_K
JUMP_SET = 0x45  # BPF_JMP | BPF_JSET | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K

MAX_SHORT_JUMP = 255
"""Maximum offset of a conditional jump, which has one byte."""
MAX_INSTRUCTIONS = 4096
"""BPF_MAXINSNS of <linux/bpf_common.h>."""

_FILTER = struct.Struct("=HBBI")


class Instruction(NamedTuple):
    """One `struct sock_filter`."""

    code: int
    if_true: int
    if_false: int
    operand: int


Program: TypeAlias = list[Instruction]


def load(offset: int) -> Program:
    """Return instructions that load the 32-bit word at `offset` of the seccomp data."""
    return [Instruction(LOAD_WORD, 0, 0, offset)]


def mask(bits: int) -> Program:
    """Return instructions that keep only `bits` of the loaded word."""
    return [Instruction(AND, 0, 0, bits)]


def give(verdict: int) -> Program:
    """Return instructions that end the program with a verdict."""
    return [Instruction(RETURN, 0, 0, verdict)]


def fail(error: int) -> int:
    """Return the verdict that makes a call fail with `error`."""
    return _ERRNO | error


def argument(index: int, bits: int = 0xFFFFFFFF) -> Program:
    """Return instructions that load the low word of an argument, masked with `bits`."""
    loaded = load(OFFSET_ARGUMENTS + 8 * index)
    return loaded if bits == 0xFFFFFFFF else loaded + mask(bits)


def one_of(values: Sequence[int], then: Program, otherwise: Program) -> Program:
    """Return instructions: `then` if the loaded word is one of `values`, else `otherwise`.

    Both must end in a verdict.
    """
    program = otherwise
    for value in values:
        program = branch(JUMP_EQ, value, then=then, otherwise=program)
    return program


def branch(jump: int, operand: int, *, then: Program, otherwise: Program) -> Program:
    """Return instructions: `then` if the comparison holds, else `otherwise`.

    Both must end in a verdict.
    """
    if len(otherwise) <= MAX_SHORT_JUMP:
        return [Instruction(jump, len(otherwise), 0, operand), *otherwise, *then]
    return [
        Instruction(jump, 0, 1, operand),
        Instruction(JUMP, 0, 0, len(otherwise)),
        *otherwise,
        *then,
    ]


def search(starts: Sequence[tuple[int, Program]]) -> Program:
    """Return a binary search for the loaded word's interval, which then runs its program.

    `starts` are pairs of first number and program, sorted by number.
    """
    if len(starts) == 1:
        return starts[0][1]
    middle = len(starts) // 2
    return branch(
        JUMP_GE,
        starts[middle][0],
        then=search(starts[middle:]),
        otherwise=search(starts[:middle]),
    )


def assemble(program: Program) -> bytes:
    """Return the bytes of a `struct sock_filter` array. Raises ValueError if it is too long."""
    if len(program) > MAX_INSTRUCTIONS:
        raise ValueError(f"a BPF program has at most {MAX_INSTRUCTIONS} instructions")
    return b"".join(_FILTER.pack(*instruction) for instruction in program)


def compile_rules(arch: Architecture, rules: Mapping[str, Program]) -> bytes:
    """Return a filter that runs the rule of each call by its name and allows calls without a rule.

    Unknown calls fail with ENOSYS. A call of another architecture kills the process. Neighbouring
    numbers with equal rules are merged.
    """
    allow = give(ALLOW)
    known = {arch.numbers[name]: rule for name, rule in rules.items() if name in arch.numbers}
    starts: list[tuple[int, Program]] = []
    for number in range(LAST_KNOWN + 1):
        rule = known.get(number, allow)
        if not starts or starts[-1][1] != rule:
            starts.append((number, rule))
    by_number = search([*starts, (LAST_KNOWN + 1, give(fail(errno.ENOSYS)))])
    if arch.x32:
        by_number = branch(JUMP_GE, X32_BIT, then=give(KILL), otherwise=by_number)
    native = load(OFFSET_NR) + by_number
    return assemble(
        load(OFFSET_ARCH) + branch(JUMP_EQ, arch.audit_arch, then=native, otherwise=give(KILL))
    )


# The rules for kernels.

NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET of <linux/sched.h>."""
CLONE_FILES, CLONE_THREAD = 0x400, 0x10000
"""<linux/sched.h>."""
CLOSE_RANGE_UNSHARE = 2
"""<linux/close_range.h>."""
AF_UNIX, INTERNET_FAMILIES = 1, (2, 10)
"""AF_INET, AF_INET6 are allowed: the network namespace is empty, so they reach nothing."""
INTERNET_PROTOCOLS = (0, 6, 17)
"""Default, IPPROTO_TCP, IPPROTO_UDP: no MPTCP, SCTP, UDP-Lite, ping or raw sockets."""
UNIX_PROTOCOLS = (0, 1)
"""None, and PF_UNIX, which has the same meaning."""
CONNECTED_TYPES = (1, 5)
"""SOCK_STREAM, SOCK_SEQPACKET: a pair stays connected, whereas datagrams may go elsewhere."""
TYPE_OF_SOCKET = 0xF
"""SOCK_TYPE_MASK of <linux/net.h>."""
MSG_OOB = 1
"""Flag for urgent data, from <linux/socket.h>."""
TERMINAL_IOCTLS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI and TIOCLINUX inject input into a terminal; TIOCSETD loads line disciplines."""
PREALLOCATIONS = (0x40305828, 0x4030582A, 0x40305839)
"""FS_IOC_RESVSP, FS_IOC_RESVSP64 and FS_IOC_ZERO_RANGE, which do the same as fallocate."""
DEVICE_TYPES = (0x2000, 0x6000)
"""S_IFCHR, S_IFBLK."""
TYPE_MASK = 0xF000
SET_ID_BITS = 0o6000
"""S_ISUID, S_ISGID."""
MAKES_A_FILE = 0o100 | 0o20000000
"""O_CREAT, __O_TMPFILE of <asm-generic/fcntl.h>: without them open(2) ignores the mode."""
SURVEILLANCE = (1024, 1026, 1040)
"""F_SETLEASE, F_NOTIFY, F_SETDELEG of <linux/fcntl.h>."""
SOL_SOCKET, SO_LINGER = 1, 13
"""<asm-generic/socket.h>."""
MAP_HUGETLB, MFD_HUGETLB = 0x40000, 0x4
"""<asm-generic/mman-common.h>, <linux/memfd.h>."""

BUILDING = frozenset(
    {"mount", "mount_setattr", "move_mount", "open_tree", "prctl", "setns", "sethostname"}
    | {"umount2", "unshare"}
)
"""Calls with which a template builds sandboxes, after it has imported packages."""


def compile_filter(
    arch: Architecture, but: Collection[str] = (), *, sealed: bool = False, copies: bool = False
) -> bytes:
    """Return the filter for one architecture, as bubblewrap's `--seccomp` reads it.

    The calls named in `but` are allowed whatever their arguments are. `sealed` refuses every Unix
    socket that could be connected to one of the host's: only pairs are left.

    With `copies`, copies of a kernel may hide from other processes of its sandbox
    (PR_SET_DUMPABLE). This requires a user namespace of the server, to which they stay visible.
    """
    rules = {**_rules(), **(_sealed() if sealed else {}), **(_copies() if copies else {})}
    return compile_rules(arch, {name: rule for name, rule in rules.items() if name not in but})


def _rules() -> dict[str, Program]:
    refuse, allow = give(fail(errno.EPERM)), give(ALLOW)
    return {
        **dict.fromkeys(REFUSED, refuse),
        # on ENOSYS libc falls back to clone, whose flags a filter can read
        "clone3": give(fail(errno.ENOSYS)),
        "clone": argument(0) + branch(JUMP_SET, NAMESPACE_FLAGS, then=refuse, otherwise=_threads()),
        # as with clone: the disk quota reads the open files of one thread per process
        "close_range": _without_bits(2, CLOSE_RANGE_UNSHARE, errno.EINVAL),
        "personality": argument(0) + branch(JUMP_EQ, 0, then=give(ALLOW), otherwise=refuse),
        **dict.fromkeys(("socket", "socketpair"), _sockets()),
        # urgent data of Unix sockets had exploitable faults, and a filter cannot read the family
        **dict.fromkeys(("sendmsg", "recvmsg"), _without_bits(2, MSG_OOB, errno.EOPNOTSUPP)),
        **dict.fromkeys(
            ("sendto", "recvfrom", "sendmmsg", "recvmmsg"),
            _without_bits(3, MSG_OOB, errno.EOPNOTSUPP),
        ),
        # it could fill a disk before the watchdog's next check; libc writes zeros instead
        "fallocate": give(fail(errno.EOPNOTSUPP)),
        "ioctl": _none_of(1, (*TERMINAL_IOCTLS, *PREALLOCATIONS)),
        "mknod": _makes_a_node(1),
        "mknodat": _makes_a_node(2),
        # such a program in a saved workspace would run with the rights of the server's user
        **dict.fromkeys(("chmod", "fchmod", "creat"), _without_bits(1, SET_ID_BITS)),
        **dict.fromkeys(("fchmodat", "fchmodat2"), _without_bits(2, SET_ID_BITS)),
        "open": _opens(flags=1, mode=2),
        "openat": _opens(flags=2, mode=3),
        # a filter cannot read its flags and mode; programs fall back to openat
        "openat2": give(fail(errno.ENOSYS)),
        # open(2) waits if another process holds a lease on the file
        "fcntl": _none_of(1, SURVEILLANCE),
        # /proc would hide the process's files and memory from an ordinary user's server
        "prctl": argument(0) + one_of((PR_SET_DUMPABLE,), refuse, allow),
        # the last close(2) of a lingering socket blocks, and the server may be the last holder
        "setsockopt": argument(1)
        + branch(
            JUMP_EQ,
            SOL_SOCKET,
            then=argument(2) + one_of((SO_LINGER,), give(fail(errno.ENOPROTOOPT)), allow),
            otherwise=allow,
        ),
        # no limit counts huge pages that the machine has reserved
        "mmap": _without_bits(3, MAP_HUGETLB, errno.ENOMEM),
        "memfd_create": _without_bits(1, MFD_HUGETLB, errno.ENOMEM),
    }


def _threads() -> Program:
    """Refuse CLONE_THREAD without CLONE_FILES: a thread with its own table of open files."""
    allow, refuse = give(ALLOW), give(fail(errno.EPERM))
    shares = branch(JUMP_SET, CLONE_FILES, then=allow, otherwise=refuse)
    return branch(JUMP_SET, CLONE_THREAD, then=shares, otherwise=allow)


def _copies() -> dict[str, Program]:
    """Return the rule that lets copies of a kernel hide, marked by an argument unused by Linux."""
    refuse, allow = give(fail(errno.EPERM)), give(ALLOW)
    of_copies = argument(4) + one_of((AS_A_COPY,), allow, refuse)
    return {"prctl": argument(0) + one_of((PR_SET_DUMPABLE,), of_copies, allow)}


def _sealed() -> dict[str, Program]:
    """Return rules that allow Unix sockets only as connected pairs.

    A process could connect to a socket file below a mounted folder, in spite of namespaces.
    """
    refused = give(fail(errno.EACCES))
    pairs = argument(1, TYPE_OF_SOCKET) + one_of(CONNECTED_TYPES, give(ALLOW), refused)
    return {"socket": _sockets(unix=refused), "socketpair": _sockets(unix=pairs)}


def _sockets(unix: Program | None = None) -> Program:
    """Allow few families of sockets, with their usual protocols; `unix` decides on AF_UNIX."""
    allow, other = give(ALLOW), give(fail(errno.EPROTONOSUPPORT))
    internet = argument(2) + one_of(INTERNET_PROTOCOLS, allow, other)
    unix = unix or argument(2) + one_of(UNIX_PROTOCOLS, allow, other)
    # libzmq aborts on EAFNOSUPPORT
    known = one_of(INTERNET_FAMILIES, internet, give(fail(errno.EOPNOTSUPP)))
    return argument(0) + branch(JUMP_EQ, AF_UNIX, then=unix, otherwise=known)


def _none_of(index: int, values: tuple[int, ...], bits: int = 0xFFFFFFFF) -> Program:
    """Refuse the call if the masked argument is one of `values`."""
    refuse, allow = give(fail(errno.EPERM)), give(ALLOW)
    return argument(index, bits) + one_of(values, refuse, allow)


def _without_bits(index: int, bits: int, error: int = errno.EPERM) -> Program:
    """Fail with `error` if the argument has one of `bits`."""
    lack = give(fail(error))
    return argument(index) + branch(JUMP_SET, bits, then=lack, otherwise=give(ALLOW))


def _makes_a_node(mode: int) -> Program:
    """Refuse device nodes and set-id bits."""
    refuse = give(fail(errno.EPERM))
    kind = _none_of(mode, DEVICE_TYPES, TYPE_MASK)
    return argument(mode) + branch(JUMP_SET, SET_ID_BITS, then=refuse, otherwise=kind)


def _opens(*, flags: int, mode: int) -> Program:
    """Refuse to create a file with set-id bits."""
    checked = _without_bits(mode, SET_ID_BITS)
    return argument(flags) + branch(JUMP_SET, MAKES_A_FILE, then=checked, otherwise=give(ALLOW))
