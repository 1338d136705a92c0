"""A checkpoint: a suspended copy of the kernel, forked between two requests and woken by the host.

For each copy the host sends one end of a socket pair over the control socket, then a checkpoint
request. The copy reports that it is parked. For each `wake` packet it forks a kernel, so one copy
serves any number of them. It exits when the host closes its end. Packets are JSON objects:

    {"op": "park"}                        with the end to wait at (over the control socket)
    {"op": "wake", "id": n, "key": …, "folder": …}    with ends of shell, control, iopub, the next
                                          control socket, and a ring; a branch has a folder
    {"parked": true}                      from the copy
    {"error": …}                          from the copy or the kernel
    {"alive": n, "closed": […]}           from the kernel, with paths of files that were closed
    {"ended": n, "status": …}             from the copy: wait status of that kernel (wait(2))
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import stat
from collections.abc import Container, Iterator
from typing import Any

from kernel_specs import linux
from kernel_specs.restricted.originals import json, os, select, signal, socket, warnings

PACKET_BYTES = 64 * 1024
MOST_FDS = 8
FIRST_FD = 3
AS_A_COPY = 0x6B6D6370
"""Fifth argument of prctl(2), unused by Linux: the one form that the host's filter lets pass."""


def socket_of(fd: int) -> socket.socket:
    """Return a socket that owns a descriptor, and blocks whatever `socket.setdefaulttimeout` says.

    Code of cells may have set that timeout.
    """
    made = socket.socket(fileno=fd)
    made.settimeout(None)
    return made


def receive(sock: socket.socket, flags: int = 0) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next packet with its descriptors; None at the end. Raises OSError, ValueError."""
    fds = array.array("i")
    space = socket.CMSG_SPACE(MOST_FDS * fds.itemsize)
    content, extra, _, _ = sock.recvmsg(PACKET_BYTES, space, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return (json.loads(content), list(fds)) if content else None


def send(sock: socket.socket, **packet: Any) -> None:
    """Send a packet. Raises OSError."""
    sock.send(json.dumps(packet).encode())


@contextlib.contextmanager
def undisturbed() -> Iterator[set[signal.Signals]]:
    """Block signals, so that no handler of user code runs here or in processes forked meanwhile.

    Yields the signals that were blocked before. SIGCHLD has its default action meanwhile.
    """
    ended = signal.getsignal(signal.SIGCHLD)
    if ended is not None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
    try:
        yield {number for number in before if isinstance(number, signal.Signals)}
    finally:
        if ended is not None:
            signal.signal(signal.SIGCHLD, ended)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if callable(ended) and _child_has_ended():
            signal.raise_signal(signal.SIGCHLD)


def _child_has_ended() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def show(*, seen: bool) -> None:
    """Set by `seen` if the sandbox's other processes can read this one and its forks in /proc.

    Does nothing where the host's filter does not permit a process to hide.
    """
    with contextlib.suppress(OSError):
        linux.prctl(linux.PR_SET_DUMPABLE, int(seen), 0, 0, AS_A_COPY)


def fork_apart() -> int:
    """Fork a process that is no child of this one; return 0 in it and 1 here. Raises OSError.

    `os.wait` in user code does not return it, and user code cannot read its memory.
    """
    between = -1
    show(seen=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads; ours is made anew later
            between = os.fork()
            if between == 0:
                _fork_and_end()
                return 0
    finally:
        if between:
            show(seen=True)
    try:
        _, status = os.waitpid(between, 0)
    except ChildProcessError:  # user code ignores SIGCHLD
        return 1
    if status != 0:
        raise OSError("the second fork failed")
    return 1


def _fork_and_end() -> None:
    """Fork; return in the child only, and exit here."""
    try:
        apart = os.fork()
    except OSError:
        os._exit(1)
    if apart:
        os._exit(0)


def park(wake: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for the host, and fork a kernel for each request; exit when the host closes its end.

    Returns in the forked kernels alone, with the host's request and its descriptors.
    """
    children: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    send(wake, parked=True)
    while True:
        for fd, _ in poll.poll():
            if fd in children:
                poll.unregister(fd)
                os.close(fd)
                pid, number = children.pop(fd)
                _, status = os.waitpid(pid, 0)
                send(wake, ended=number, status=status)
                continue
            received = receive(wake)
            if received is None:
                os._exit(0)
            order, fds = received
            if order.get("op") != "wake":
                continue
            pid = os.fork()
            if pid == 0:
                for pidfd in children:
                    os.close(pidfd)
                os.setsid()
                show(seen=True)
                return order, fds
            for each in fds:
                os.close(each)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, int(order["id"])
            poll.register(pidfd, select.POLLIN)


def let_go(kept: Container[int]) -> None:
    """Replace pipes and sockets by dead ends, so that their peers see the end of file.

    The descriptor numbers stay in use: objects that own one would else close an unrelated file.
    """
    socket_end, other = socket.socketpair()
    reader, pipe_writer = os.pipe()
    pipe_reader, writer = os.pipe()
    other.close()
    os.close(pipe_writer)
    os.close(pipe_reader)
    dead = (socket_end.fileno(), reader, writer)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd < FIRST_FD or fd in kept or fd in dead:
            continue
        with contextlib.suppress(OSError):
            mode = os.fstat(fd).st_mode
            if stat.S_ISSOCK(mode):
                stand_in = socket_end.fileno()
            elif stat.S_ISFIFO(mode):
                writes = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
                stand_in = writer if writes else reader
            else:
                continue
            os.dup2(stand_in, fd, inheritable=os.get_inheritable(fd))
    socket_end.close()
    os.close(reader)
    os.close(writer)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)
