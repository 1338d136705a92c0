"""Calls of Linux and its C library that Python before 3.12 does not wrap.

The server and the kernels both use this module.
Every function raises OSError unless documented otherwise. Only the standard library is imported.
Sources of the numbers:
<sched.h>, <sys/mount.h>, <sys/prctl.h>, <linux/capability.h>, <linux/openat2.h>, <linux/fs.h>,
<linux/stat.h> and <linux/time.h>.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes longer than the rest
    from typing import Any


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
_SYS_OPENAT2 = 437
_RENAME_EXCHANGE = 2
_STATX_BTIME = 0x800
_STATX_BYTES, _STATX_BTIME_AT = 256, 80
_HANDLE = struct.Struct("=Ii")
"""Head of `struct file_handle`: bytes of the handle, its type."""
_HANDLE_BYTES = 128  # MAX_HANDLE_SZ
CLOCK_BOOTTIME = 7
"""The clock that also counts while the machine sleeps."""
_TIMER_ABSTIME = 1
_SIGEV_SIGNAL, _SIGEVENT_BYTES = 0, 64
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""
FIRST_FD, LAST_FD = 3, 0x7FFFFFFF
"""Range of descriptors above standard input, output and error."""
CAP_SYS_PTRACE = 19
LISTEN_BACKLOG = 1024
"""Most connections of a listening socket that wait to be accepted."""
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C

_libc = ctypes.CDLL(None, use_errno=True)
_locked = ctypes.PyDLL(None, use_errno=True)
"""The C library for calls that never block: they run without releasing the GIL."""


class _Filter(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call by its number on this architecture; return its result."""
    wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _check(int(_libc.syscall(ctypes.c_long(number), *wide)), "")


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


def prctl(option: int, first: int = 0, second: int = 0, third: int = 0, fourth: int = 0) -> int:
    """Change an attribute of this process, by integer arguments; return the call's result."""
    wide = map(ctypes.c_ulong, (first, second, third, fourth))
    return _check(_libc.prctl(ctypes.c_int(option), *wide), f"prctl {option}")


def set_name(name: str) -> None:
    """Set the name of this thread, in `ps` that of its process; it is cut to 15 bytes."""
    _check(_libc.prctl(ctypes.c_int(PR_SET_NAME), name.encode()[:15], 0, 0, 0), "prctl name")


def shortest_turns() -> bool:
    """Request scheduler slices of 0.1 ms for this thread, so that it is scheduled sooner.

    Sets `sched_runtime` of `struct sched_attr`, a slice since Linux 6.12. Returns False if the call
    fails or its number is unknown for this architecture.
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


def enter_groups(cgroup_fds: Sequence[int]) -> None:
    """Move this thread into cgroup v1 groups, given by their open `tasks` files.

    Errors are ignored: the server checks the result, and moves the process or reports why not.
    """
    for gate in cgroup_fds:
        with contextlib.suppress(OSError):
            os.write(gate, b"0")


def loopback_up() -> None:
    """Bring up the loopback interface of this network namespace."""
    import socket  # here: it would double the import time of this module

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16xH14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[0]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def own_address(address: str, number: int) -> None:
    """Add an IPv4 address (/32) to the loopback interface, under the label `lo:NUMBER`."""
    label = f"lo:{number}".encode()
    import socket  # here: it would double the import time of this module

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


def openat2(folder: int, path: bytes, flags: int, resolve: int) -> int:
    """Open a path below a folder's descriptor under the RESOLVE_ flags `resolve`. Linux 5.6."""
    how = struct.pack("=3Q", flags, 0, resolve)
    try:
        return syscall(_SYS_OPENAT2, folder, path, how, len(how))
    except OSError as reason:
        raise OSError(reason.errno, reason.strerror, os.fsdecode(path)) from None


def exchange(one: bytes, other: bytes) -> None:
    """Exchange two paths in one step. ENOSYS where the C library has no renameat2(2)."""
    call = _function("renameat2")
    _check(call(_AT_FDCWD, one, _AT_FDCWD, other, _RENAME_EXCHANGE), "")


def birth_time(fd: int) -> int:
    """Return the birth time of an open file in ns (statx(2)); 0 if its file system has none."""
    call, content = _function("statx"), ctypes.create_string_buffer(_STATX_BYTES)
    flags, mask = ctypes.c_int(_AT_EMPTY_PATH), ctypes.c_uint(_STATX_BTIME)
    _check(call(ctypes.c_int(fd), b"", flags, mask, content), "statx")
    (filled,) = struct.unpack_from("=I", content)
    seconds, nanoseconds = struct.unpack_from("=qI", content, _STATX_BTIME_AT)
    return int(seconds * 10**9 + nanoseconds) if filled & _STATX_BTIME else 0


def file_handle(fd: int) -> bytes:
    """Return the handle of an open file, with its head, as fanotify(7) reports it."""
    handle = ctypes.create_string_buffer(_HANDLE.size + _HANDLE_BYTES)
    _HANDLE.pack_into(handle, 0, _HANDLE_BYTES, 0)
    mounted, flags = ctypes.c_int(), ctypes.c_int(_AT_EMPTY_PATH)
    done = _libc.name_to_handle_at(ctypes.c_int(fd), b"", handle, ctypes.byref(mounted), flags)
    _check(done, "name_to_handle_at")
    length, _ = _HANDLE.unpack_from(handle)
    return handle.raw[: _HANDLE.size + length]


def fanotify_init(flags: int, event_flags: int) -> int:
    """Return the descriptor of a new fanotify(7) group."""
    call = _function("fanotify_init")
    return _check(call(ctypes.c_uint(flags), ctypes.c_uint(event_flags)), "fanotify_init")


def fanotify_mark(group: int, flags: int, mask: int, place: int | str) -> None:
    """Mark an open file or folder, or a path, for a fanotify(7) group."""
    folder, path = (place, None) if isinstance(place, int) else (_AT_FDCWD, os.fsencode(place))
    wide = ctypes.c_uint(flags), ctypes.c_uint64(mask), ctypes.c_int(folder)
    _check(_libc.fanotify_mark(ctypes.c_int(group), *wide, path), "fanotify_mark")


def inotify_init(flags: int) -> int:
    """Return the descriptor of a new inotify(7) instance."""
    return _check(_libc.inotify_init1(ctypes.c_int(flags)), "inotify_init1")


def inotify_add_watch(instance: int, path: bytes, mask: int) -> int:
    """Watch a path; return the number of the watch."""
    wide = ctypes.c_int(instance), path, ctypes.c_uint(mask)
    return _check(_libc.inotify_add_watch(*wide), "inotify_add_watch")


def inotify_rm_watch(instance: int, watch: int) -> None:
    """Remove a watch."""
    done = _libc.inotify_rm_watch(ctypes.c_int(instance), ctypes.c_int(watch))
    _check(done, "inotify_rm_watch")


def setfsuid(uid: int) -> None:
    """Set the user id for this thread's file accesses; reports no error."""
    _libc.setfsuid(ctypes.c_uint(uid))


def setfsgid(gid: int) -> None:
    """Set the group id for this thread's file accesses; reports no error."""
    _libc.setfsgid(ctypes.c_uint(gid))


def timer_create(clock: int, signal_number: int) -> int:
    """Return a timer that sends this process a signal; children do not inherit it."""
    event = struct.pack("@Pii", 0, signal_number, _SIGEV_SIGNAL).ljust(_SIGEVENT_BYTES, b"\0")
    timer = ctypes.c_void_p()
    _check(_timers().timer_create(ctypes.c_int(clock), event, ctypes.byref(timer)), "timer_create")
    return timer.value or 0


def timer_set(timer: int, moment: float) -> None:
    """Let a timer expire once, at `moment` in seconds of its clock."""
    seconds = int(moment)
    part = int((moment - seconds) * 1e9) or 1  # a zero time would stop it
    spec, flags = struct.pack("@4l", 0, 0, seconds, part), ctypes.c_int(_TIMER_ABSTIME)
    _check(_timers().timer_settime(ctypes.c_void_p(timer), flags, spec, None), "timer_settime")


def _timers() -> ctypes.CDLL:
    """Return the C library that has timer functions: librt before glibc 2.34."""
    return _libc if hasattr(_libc, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)


def timerfd_create(clock: int, flags: int) -> int:
    """Return the descriptor of a stopped timer."""
    return _check(_locked.timerfd_create(clock, flags), "timerfd_create")


def timerfd_spec(first: float, pause: float = 0.0) -> bytes:
    """Return `struct itimerspec`: seconds until the first tick, and between ticks; 0 for none."""
    return struct.pack(
        "@4l", *divmod(round(pause * 1e9), 10**9), *divmod(round(first * 1e9), 10**9)
    )


def timerfd_settime(fd: int, spec: bytes) -> None:
    """Start or stop a timer by a `struct itimerspec`, see `timerfd_spec`."""
    _check(_locked.timerfd_settime(fd, 0, spec, None), "timerfd_settime")


def mallopt(parameter: int, value: int) -> None:
    """Set a parameter of the C heap; does nothing where the C library has no such call."""
    call = getattr(_libc, "mallopt", None)
    if call is not None:
        call(parameter, value)


def malloc_trim() -> None:
    """Return free memory of the C heap to the system; does nothing where there is no such call."""
    call = getattr(_libc, "malloc_trim", None)
    if call is not None:
        call(ctypes.c_size_t(0))


def _function(name: str) -> Any:
    """Return a function that old C libraries lack. Raises OSError (ENOSYS) then."""
    try:
        return getattr(_libc, name)
    except AttributeError:
        raise OSError(errno.ENOSYS, f"{name}: {os.strerror(errno.ENOSYS)}") from None


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        text = os.strerror(number)
        raise OSError(number, f"{what}: {text}" if what else text)
    return result


def write_maps(process: str, rows: Sequence[tuple[int, ...]], processes: int) -> None:
    """Write the id maps of a new user namespace: first id inside, first outside, count.

    `process` is a pid or `self`; `processes` is an open descriptor of /proc. For `self`,
    setgroups(2) is denied first, as Linux requires.
    """
    content = "".join(" ".join(map(str, row)) + "\n" for row in rows)
    if process == "self":
        write_file("self/setgroups", "deny", processes)
    write_file(f"{process}/gid_map", content, processes)
    write_file(f"{process}/uid_map", content, processes)


def write_file(path: str, content: str, processes: int) -> None:
    """Write to a file at `path`, relative to the open folder `processes`."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=processes)
    try:
        os.write(fd, content.encode())
    finally:
        os.close(fd)
