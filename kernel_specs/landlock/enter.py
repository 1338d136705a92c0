"""Apply Landlock, a system call filter and limits to this process, then execute the kernel.

    enter.py [OPTION VALUE]... -- PROGRAM ARGUMENT...

Options name open descriptors and numbers that the host has prepared; see `_Task`. Every start of a
kernel waits for this program, so it runs on a bare interpreter (`-I -S`) and imports little. It
uses `_ctypes` and `posix`: importing `ctypes` and `os` would take another 3 ms and 1 ms. Nothing is
executed unless every step has succeeded.
"""

import _ctypes
import errno
import posix
import sys

# <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4
SECCOMP_MODE_FILTER = 2
SECUREBITS = 0b1111
"""SECBIT_NOROOT and SECBIT_NO_SETUID_FIXUP, both locked. User 0 has no special rights, a change of
user keeps capabilities, and access(2) counts them."""

# include/uapi/asm-generic/unistd.h; the same on every architecture
SYS_PIDFD_SEND_SIGNAL = 424
SYS_LANDLOCK_ADD_RULE = 445
SYS_LANDLOCK_RESTRICT_SELF = 446
PIDFD_SIGNAL_PROCESS_GROUP = 1 << 2
RULE_PATH_BENEATH = 1
READ_FILE, READ_DIR = 1 << 2, 1 << 3

SIGKILL = 9
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH = 2
EXIT_FAILED = 71
"""EX_OSERR of <sysexits.h>."""

OWN_FACTS = (
    *("cmdline", "comm", "fd", "io", "limits"),
    *("maps", "smaps_rollup", "stat", "statm", "status"),
)
"""Files of /proc/PID that the kernel may read of itself. Never `net`, `mem`, `root`, `environ`."""


class _Task:
    """The parsed options.

    ruleset  Landlock rules to enter
    filter   system call filter, an array of `struct sock_filter`; in this order
    keep     descriptor that PROGRAM inherits
    limit    NUMBER:SOFT:HARD, a resource limit to set
    uid      user and group id to switch to; -1 for no change
    search   1: keep CAP_DAC_READ_SEARCH, to pass through folders that the user may not enter
    parent   process id of the server; this process is killed when it exits
    """

    def __init__(self, argv: list[str]) -> None:
        end = argv.index("--")
        given = list(zip(argv[1:end:2], argv[2:end:2], strict=True))
        self.program = argv[end + 1 :]
        self.ruleset = int(_last(given, "--ruleset"))
        self.filters = [int(value) for name, value in given if name == "--filter"]
        self.keep = [int(value) for name, value in given if name == "--keep"]
        self.limits = [value.split(":") for name, value in given if name == "--limit"]
        self.uid = int(_last(given, "--uid"))
        self.search = _last(given, "--search") == "1"
        self.parent = int(_last(given, "--parent"))


class _Long(_ctypes._SimpleCData):  # type: ignore[type-arg]  # which at run time it has not
    """C `long`."""

    _type_ = "l"


class _Int(_ctypes._SimpleCData):  # type: ignore[type-arg]
    """C `int`; the syscalls used here return 0 or -1."""

    _type_ = "i"


class _Byte(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "B"


class _Function(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Int


_library = _ctypes.dlopen(None, posix.RTLD_NOW)  # type: ignore[arg-type]  # this program itself
_functions = {
    name: _Function(_ctypes.dlsym(_library, name))
    for name in ("prctl", "syscall", "capset", "setrlimit")
}


def main(argv: list[str]) -> None:
    """Confine this process, then execute the program; does not return. Raises OSError."""
    task = _Task(argv)
    if posix.getpgid(0) != posix.getpid():
        posix.setsid()
    _prctl(PR_SET_DUMPABLE, 0)
    filters = [_content(fd) for fd in task.filters]
    pins = _allow_own_facts(task.ruleset)
    _start_watcher(task.uid)
    for kind, soft, hard in task.limits:
        _call("setrlimit", int(kind), _bytes(8, int(soft)) + _bytes(8, int(hard)))
    _drop_privileges(task.uid, search=task.search)
    # after the change of user, which clears it
    _prctl(PR_SET_PDEATHSIG, SIGKILL)
    if posix.getppid() != task.parent:
        raise OSError(errno.ESRCH, "the server has ended")
    _call("syscall", SYS_LANDLOCK_RESTRICT_SELF, task.ruleset, 0)
    _close_all_but({0, 1, 2, *task.keep, *pins})
    for program in filters:
        _filter_calls(program)
    posix.execve(task.program[0], task.program, posix.environ)


def _allow_own_facts(ruleset: int) -> list[int]:
    """Allow reading this process's own files of /proc, also after execve(2); return their handles.

    They must stay open: otherwise Linux may drop the inodes and create new ones without rules.
    """
    pins = []
    for name in OWN_FACTS:
        try:
            fd = posix.open(f"/proc/self/{name}", posix.O_PATH)
        except OSError:
            continue  # hidden, or not built into this Linux
        access = READ_DIR if name == "fd" else READ_FILE
        # struct landlock_path_beneath_attr
        rule = _bytes(8, access) + _bytes(4, fd)
        _call("syscall", SYS_LANDLOCK_ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0)
        posix.set_inheritable(fd, True)
        pins.append(fd)
    return pins


def _start_watcher(uid: int) -> None:
    """Start a process outside the sandbox that kills the process group once its leader has ended.

    So the kernel's children are killed even if the server is gone. The watcher is a grandchild, so
    that the kernel does not see it as its own child.
    """
    leader = posix.pidfd_open(posix.getpid())
    child = posix.fork()
    if child == 0:
        try:
            posix.setsid()
            if posix.fork() == 0:
                _watch(leader, uid)
        finally:
            posix._exit(0)
    posix.close(leader)
    posix.waitpid(child, 0)


def _watch(leader: int, uid: int) -> None:
    import select  # off the kernel's start path, and before the change of user may hide its folder

    _close_all_but({leader})
    posix.chdir("/")
    _drop_privileges(uid, search=False)
    ended = select.poll()
    ended.register(leader, select.POLLIN)
    ended.poll()
    _call("syscall", SYS_PIDFD_SEND_SIGNAL, leader, SIGKILL, 0, PIDFD_SIGNAL_PROCESS_GROUP)


def _drop_privileges(uid: int, *, search: bool) -> None:
    """Switch to `uid` unless it is -1, without groups, and drop all capabilities.

    With `search`, CAP_DAC_READ_SEARCH stays.
    """
    kept = 1 << CAP_DAC_READ_SEARCH if search else 0
    if uid >= 0:
        _prctl(PR_SET_SECUREBITS, SECUREBITS)
    for number in range(64):
        if not kept >> number & 1 and _result("prctl", PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break  # past the last one, or this process has no right to
    _result("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if uid >= 0:
        posix.setgroups([])
        posix.setresgid(uid, uid, uid)
        posix.setresuid(uid, uid, uid)
    # effective, permitted and inheritable: the lower 32 of them, then the upper ones
    sets = _bytes(4, kept) * 3 + _bytes(4, 0) * 3
    _call("capset", _bytes(4, CAPABILITY_VERSION_3) + _bytes(4, 0), sets)
    if search:
        _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def _filter_calls(program: bytes) -> None:
    instructions = (_Byte * len(program)).from_buffer_copy(program)
    # struct sock_fprog: count, padding, pointer
    attr = _bytes(2, len(program) // 8) + bytes(6) + _bytes(8, _ctypes.addressof(instructions))
    _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, attr, 0, 0)


def _close_all_but(kept: set[int]) -> None:
    first = 0
    for fd in sorted(kept):
        if first < fd:  # an empty range would close everything
            posix.closerange(first, fd)
        first = fd + 1
    posix.closerange(first, 1 << 20)


def _content(fd: int) -> bytes:
    content = bytearray()
    while piece := posix.read(fd, 1 << 16):
        content += piece
    return bytes(content)


def _last(given: list[tuple[str, str]], option: str) -> str:
    return [value for name, value in given if name == option][-1]


def _prctl(option: int, value: int, third: int = 0) -> None:
    _call("prctl", option, value, third, 0, 0)


def _call(name: str, *args: int | bytes) -> None:
    if _result(name, *args) < 0:
        error = _ctypes.get_errno()
        raise OSError(error, posix.strerror(error))


def _result(name: str, *args: int | bytes) -> int:
    """Call a C function with integers and pointers to constant bytes."""
    wide = [_Long(arg) if isinstance(arg, int) else arg for arg in args]
    return int(_functions[name](*wide))


def _bytes(size: int, value: int) -> bytes:
    return value.to_bytes(size, sys.byteorder)


if __name__ == "__main__":
    try:
        main(sys.argv)
    except Exception as error:  # noqa: BLE001
        # any failure: report it and exit, so that the kernel never runs unconfined
        sys.stderr.write(f"the Landlock sandbox could not be entered: {error!r}\n")
        sys.stderr.flush()
        posix._exit(EXIT_FAILED)
