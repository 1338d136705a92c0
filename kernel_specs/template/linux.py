"""System calls that Python does not wrap (before 3.12). Every function raises OSError.

Numbers: <sched.h>, <sys/mount.h>, <sys/prctl.h> and <linux/capability.h>.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Iterable, Sequence


def close_all(fds: Sequence[int]) -> None:
    """Close all descriptors."""
    for fd in fds:
        os.close(fd)


CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_NAME = 15
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
SECCOMP_MODE_FILTER = 2

_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_SYS_MOVE_MOUNT = 429  # the same on every architecture, as all calls from 424 on
_SYS_CLOSE_RANGE = 436
_SYS_OPEN_TREE = 428
_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SYS_MOUNT_SETATTR = 442
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 4, 0x40
_OPEN_TREE_CLONE = 1
_AT_EMPTY_PATH, _AT_NO_AUTOMOUNT, _AT_RECURSIVE = 0x1000, 0x800, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_IDMAP = 1, 2, 4, 0x100000
_AT_FDCWD = -100
FIRST_FD, LAST_FD = 3, 0x7FFFFFFF
"""Range of descriptors above standard input, output and error."""
CAP_SYS_PTRACE = 19
LISTEN_BACKLOG = 1024
"""Most connections of a listening socket that wait to be accepted."""
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def unshare(flags: int) -> None:
    """Move this process (or for CLONE_NEWPID its next children) to new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, flags: int) -> None:
    """Join namespaces: those of a process given by pidfd, or one given by its own descriptor."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flags)), "setns")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Make or change a mount; empty strings stand for arguments that the flags do not use."""
    done = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode(),
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )
    _check(done, f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount with everything below it."""
    _check(_libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def move_mount(tree: int, target: str | int) -> None:
    """Attach a detached mount, as of open_tree(2), at a path or an open descriptor."""
    folder, path, flags = _AT_FDCWD, b"", _MOVE_MOUNT_F_EMPTY_PATH
    if isinstance(target, int):
        folder, flags = target, flags | _MOVE_MOUNT_T_EMPTY_PATH
    else:
        path = os.fsencode(target)
    done = _libc.syscall(
        ctypes.c_long(_SYS_MOVE_MOUNT),
        ctypes.c_int(tree),
        b"",
        ctypes.c_int(folder),
        path,
        ctypes.c_uint(flags),
    )
    _check(done, f"move_mount {target}")


def open_tree(place: str | int, *, recursive: bool = False) -> int:
    """Return a detached copy of the mount at a path or descriptor, close-on-exec; Linux 5.2."""
    folder, path = (place, b"") if isinstance(place, int) else (_AT_FDCWD, os.fsencode(place))
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH | _AT_NO_AUTOMOUNT
    tree = _libc.syscall(
        ctypes.c_long(_SYS_OPEN_TREE),
        ctypes.c_int(folder),
        path,
        ctypes.c_uint(flags | (_AT_RECURSIVE if recursive else 0)),
    )
    return _check(int(tree), f"open_tree {place}")


def set_attributes(
    place: str | int, attributes: int, *, recursive: bool = False, userns: int = -1
) -> None:
    """Set attributes of a mount and make it private; `userns` id-maps it. Linux 5.12."""
    folder, path = (place, b"") if isinstance(place, int) else (_AT_FDCWD, os.fsencode(place))
    wanted = attributes | (MOUNT_ATTR_IDMAP if userns >= 0 else 0)
    content = struct.pack("=4Q", wanted, 0, MS_PRIVATE, max(userns, 0))
    done = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(folder),
        path,
        ctypes.c_uint(_AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)),
        content,
        ctypes.c_size_t(len(content)),
    )
    _check(int(done), "mount_setattr")


def prctl(option: int, first: int = 0, second: int = 0) -> int:
    """Change an attribute of this process, by integer arguments; return the call's result."""
    zero = ctypes.c_ulong(0)
    done = _libc.prctl(
        ctypes.c_int(option), ctypes.c_ulong(first), ctypes.c_ulong(second), zero, zero
    )
    return _check(done, f"prctl {option}")


def set_name(name: str) -> None:
    """Set the name of this process in `ps`; it is cut to 15 bytes. Raises OSError."""
    _check(_libc.prctl(ctypes.c_int(PR_SET_NAME), name.encode()[:15], 0, 0, 0), "prctl name")


def shortest_turns() -> bool:
    """Ask the scheduler for short time slices of this thread, which then come sooner.

    Sets 0.1 ms as `sched_runtime` in `struct sched_attr`. Returns False before Linux 6.12.
    """
    number = _SYS_SCHED_SETATTR.get(os.uname().machine)
    if number is None:
        return False
    content = struct.pack("=IIQiIQQQ", 48, 0, 0, 0, 0, 100_000, 0, 0)
    return int(_libc.syscall(ctypes.c_long(number), 0, content, 0)) == 0


def clear_capabilities() -> None:
    """Empty the effective, permitted and inheritable sets."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


def use_capabilities() -> None:
    """Make all permitted capabilities effective."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    sets = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, sets), "capget")
    for at in (0, 12):  # effective, permitted, inheritable: two words of each
        struct.pack_into("=I", sets, at, *struct.unpack_from("=I", sets, at + 4))
    _check(_libc.capset(header, sets), "capset")


def drop_capability(number: int) -> None:
    """Remove a capability below 32 from the effective, permitted, inheritable and ambient sets."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    sets = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, sets), "capget")
    for at in (0, 4, 8):  # the first words of effective, permitted, inheritable
        (bits,) = struct.unpack_from("=I", sets, at)
        struct.pack_into("=I", sets, at, bits & ~(1 << number))
    _check(_libc.capset(header, sets), "capset")


def install_filter(program: bytes) -> None:
    """Install a seccomp program for good; requires no_new_privs."""
    fprog = _Filter(len(program) // 8, program)
    mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)
    done = _libc.prctl(ctypes.c_int(PR_SET_SECCOMP), mode, ctypes.byref(fprog), 0, 0)
    _check(done, "seccomp")


def set_hostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    content = name.encode()
    _check(_libc.sethostname(content, ctypes.c_size_t(len(content))), "sethostname")


def close_range(first: int, last: int = LAST_FD) -> None:
    """Close every descriptor from `first` to `last`."""
    done = _libc.syscall(
        ctypes.c_long(_SYS_CLOSE_RANGE),
        ctypes.c_uint(first),
        ctypes.c_uint(last),
        ctypes.c_uint(0),
    )
    _check(done, "close_range")


def close_range_but(kept: Iterable[int], *, first: int) -> None:
    """Close every descriptor from `first` on, except `kept`."""
    for fd in sorted(kept):
        if fd > first:
            close_range(first, fd - 1)
        first = max(first, fd + 1)
    close_range(first)


def enter_groups(gates: Sequence[int]) -> None:
    """Enter control groups of version 1 by their open `tasks` files; for one thread alone.

    Errors are ignored: the server checks the result, and moves the process or reports why not.
    """
    for gate in gates:
        with contextlib.suppress(OSError):
            os.write(gate, b"0")


def loopback_up() -> None:
    """Bring up the loopback interface of this network namespace."""
    import socket  # half of what this module would take to import

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16xH14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[0]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def own_address(address: str, number: int) -> None:
    """Give the loopback interface a further IPv4 address, with a label of this number."""
    label = f"lo:{number}".encode()
    import socket  # half of what this module would take to import

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.255")):
            packed = socket.inet_aton(value)
            fcntl.ioctl(sock, request, struct.pack("16sHH4s8x", label, socket.AF_INET, 0, packed))


def send_listeners(way: int, places: Sequence[tuple[str, int]]) -> None:
    """Listen at each (address, port) of this network namespace; send all over a Unix socket.

    Listeners and `way` are closed here: only the receiver can accept. Requires CAP_NET_ADMIN for
    addresses outside 127.0.0.0/8, CAP_NET_BIND_SERVICE for ports below 1024.
    """
    import socket

    made: list[socket.socket] = []
    further = dict.fromkeys(str(each[0]) for each in places if not each[0].startswith("127."))
    with socket.socket(fileno=way) as out:
        try:
            for number, address in enumerate(further):
                own_address(address, number)
            for address, port in places:
                made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                made[-1].bind((str(address), int(port)))
                made[-1].listen(LISTEN_BACKLOG)
            socket.send_fds(out, [b"listeners"], [each.fileno() for each in made])
        finally:
            for each in made:
                each.close()


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def write_maps(process: str, rows: Sequence[tuple[int, ...]], processes: int) -> None:
    """Write the id maps of a new user namespace: first id inside, first outside, count.

    `process` is the name of its process in /proc, of which `processes` is a handle. For `self`,
    setgroups(2) is denied first, as Linux requires.
    """
    content = "".join(" ".join(map(str, row)) + "\n" for row in rows)
    if process == "self":
        write_file("self/setgroups", "deny", processes)
    write_file(f"{process}/gid_map", content, processes)
    write_file(f"{process}/uid_map", content, processes)


def write_file(path: str, content: str, processes: int) -> None:
    """Write to a file below the folder that `processes` is a handle of."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=processes)
    try:
        os.write(fd, content.encode())
    finally:
        os.close(fd)
