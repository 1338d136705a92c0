"""Put Landlock, a system call filter and limits on this process, then become the kernel.

    enter.py [OPTION VALUE]... -- PROGRAM ARGUMENT...

Options name open descriptors and numbers that the host has prepared; see `_Task`. Runs on a bare
interpreter (`-I -S`) and imports little, because every kernel waits for it. Nothing is executed
unless every step has succeeded.
"""

import ctypes
import errno
import os
import sys

_libc = ctypes.CDLL(None, use_errno=True)

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
"""SECBIT_NOROOT and NO_SETUID_FIXUP, both locked: user 0 has no special rights, a change of user
keeps what was kept, and access(2) heeds it."""

# include/uapi/asm-generic/unistd.h; the same on every architecture
SYS_PIDFD_SEND_SIGNAL = 424
SYS_LANDLOCK_ADD_RULE = 445
SYS_LANDLOCK_RESTRICT_SELF = 446
PIDFD_SIGNAL_PROCESS_GROUP = 1 << 2
RULE_PATH_BENEATH = 1
READ_FILE, READ_DIR = 1 << 2, 1 << 3

SIGKILL = 9
POLLIN = 1
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH = 2
EXIT_FAILED = 71
"""EX_OSERR of <sysexits.h>."""

OWN_FACTS = (
    *("cmdline", "comm", "fd", "io", "limits"),
    *("maps", "smaps_rollup", "stat", "statm", "status"),
)
"""What the kernel may read of itself below /proc. Never `net`, `mem`, `root`, `environ`."""


class _Task:
    """The options.

    ruleset  Landlock rules to enter
    filter   system call filter, an array of `struct sock_filter`; in this order
    keep     descriptor that PROGRAM inherits
    limit    NUMBER:VALUE, a resource limit to lower
    uid      user and group to become; -1 to stay
    search   1: keep the capability to pass folders that the user may not enter
    parent   the process to die with
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


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class _Capabilities(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _PollRequest(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _ResourceLimit(ctypes.Structure):
    _fields_ = (("soft", ctypes.c_uint64), ("hard", ctypes.c_uint64))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def main(argv: list[str]) -> None:
    """Do every step; does not return."""
    task = _Task(argv)
    if os.getpgid(0) != os.getpid():
        os.setsid()
    _prctl(PR_SET_DUMPABLE, 0)
    filters = [_content(fd) for fd in task.filters]
    pins = _allow_own_facts(task.ruleset)
    _start_watcher(task.uid)
    for kind, value in task.limits:
        _lower(int(kind), int(value))
    _drop_privileges(task.uid, search=task.search)
    # after the change of user, which clears it
    _prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != task.parent:
        raise OSError(errno.ESRCH, "the server has ended")
    _syscall(SYS_LANDLOCK_RESTRICT_SELF, task.ruleset, 0)
    _close_all_but({0, 1, 2, *task.keep, *pins})
    for program in filters:
        _filter_calls(program)
    os.execve(task.program[0], task.program, os.environ)


def _allow_own_facts(ruleset: int) -> list[int]:
    """Rules for this process's own files of /proc, which stay its own when it executes.

    The handles have to stay open: without them Linux may make the files anew, without rules.
    """
    pins = []
    for name in OWN_FACTS:
        try:
            fd = os.open(f"/proc/self/{name}", os.O_PATH)
        except OSError:
            continue  # hidden, or not built into this Linux
        access = READ_DIR if name == "fd" else READ_FILE
        rule = _PathBeneath(access, fd)
        _syscall(SYS_LANDLOCK_ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.byref(rule), 0)
        os.set_inheritable(fd, True)
        pins.append(fd)
    return pins


def _start_watcher(uid: int) -> None:
    """A process outside the sandbox that ends the group when its leader has ended.

    It covers what the kernel has started for the case that the server is gone. A grandchild, so
    that the kernel does not see it as a child of its own.
    """
    leader = os.pidfd_open(os.getpid())
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                _watch(leader, uid)
        finally:
            os._exit(0)
    os.close(leader)
    os.waitpid(child, 0)


def _watch(leader: int, uid: int) -> None:
    _close_all_but({leader})
    os.chdir("/")
    _drop_privileges(uid, search=False)
    ended = _PollRequest(leader, POLLIN, 0)
    while _libc.poll(ctypes.byref(ended), 1, -1) != 1:
        continue  # a signal
    _syscall(SYS_PIDFD_SEND_SIGNAL, leader, SIGKILL, None, PIDFD_SIGNAL_PROCESS_GROUP)


def _drop_privileges(uid: int, *, search: bool) -> None:
    """Become `uid` if it is not -1, without groups, and give up all capabilities but one."""
    kept = 1 << CAP_DAC_READ_SEARCH if search else 0
    if uid >= 0:
        _prctl(PR_SET_SECUREBITS, SECUREBITS)
    for number in range(64):
        if not kept >> number & 1 and _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break  # past the last one, or this process has no right to
    _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if uid >= 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = _CapabilityHeader(CAPABILITY_VERSION_3, 0)
    sets = (_Capabilities * 2)(_Capabilities(kept, kept, kept), _Capabilities(0, 0, 0))
    _check(_libc.capset(ctypes.byref(header), sets))
    if search:
        _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def _filter_calls(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    attr = _FilterProgram(len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(attr), 0, 0))


def _lower(kind: int, value: int) -> None:
    limit = _ResourceLimit()
    _check(_libc.getrlimit(kind, ctypes.byref(limit)))
    limit.hard = min(value, limit.hard)  # no limit is the largest number
    limit.soft = limit.hard
    _check(_libc.setrlimit(kind, ctypes.byref(limit)))


def _close_all_but(kept: set[int]) -> None:
    first = 0
    for fd in sorted(kept):
        if first < fd:  # an empty range would close everything
            os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 1 << 20)


def _content(fd: int) -> bytes:
    content = bytearray()
    while piece := os.read(fd, 1 << 16):
        content += piece
    return bytes(content)


def _last(given: list[tuple[str, str]], option: str) -> str:
    return [value for name, value in given if name == option][-1]


def _prctl(option: int, value: int, third: int = 0) -> None:
    wide = [ctypes.c_ulong(number) for number in (value, third, 0, 0)]
    _check(_libc.prctl(option, *wide))


def _syscall(number: int, *args: object) -> None:
    wide = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    _check(_libc.syscall(ctypes.c_long(number), *wide))


def _check(result: int) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


if __name__ == "__main__":
    try:
        main(sys.argv)
    except Exception as error:  # noqa: BLE001
        # whatever it is, the kernel must not run outside the boundary: say why and end
        sys.stderr.write(f"the Landlock sandbox could not be entered: {error!r}\n")
        sys.stderr.flush()
        os._exit(EXIT_FAILED)
