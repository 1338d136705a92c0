"""Process 1 of a container: start the kernel, reap children, exit with the server.

    enter.py SOCKET

The host sends the command, its descriptors and its system call filter over SOCKET. The connection
stays open. The exit code of the kernel is sent over it, 128 + n for signal n. This process exits
when the host's end closes, however the server has ended. As it is process 1, everything in the
container is killed with it.
"""

from __future__ import annotations

import array
import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing costs more time than all other imports
    from typing import Any

_PROJECT = os.path.realpath(f"{__file__}/../../..")
sys.path.insert(0, _PROJECT)
from kernel_specs import linux  # noqa: E402  # with -I and -S, sys.path lacks the project

sys.path.remove(_PROJECT)

MESSAGE_BYTES = 1 << 18
MOST_DESCRIPTORS = 64
EXIT_FAILED = 71
"""EX_OSERR of <sysexits.h>."""


def main(path: str) -> int:
    """Run the host's task; return the exit code of this process."""
    host = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host.connect(path)
    received: list[int] = []
    try:
        task, received = _receive(host)
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, _noted)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        # the kernel runs as the same user: it must not read or change this process
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        linux.install_filter(base64.b64decode(task["filter"]))
        child = os.fork()
        if child == 0:
            _become(task, received)
    except Exception as error:  # noqa: BLE001  # any error is reported to the host
        for stderr in received[2:3]:
            os.write(stderr, f"the container could not be set up: {error!r}\n".encode())
        _tell(host, EXIT_FAILED)
        return EXIT_FAILED
    os.closerange(0, 3)
    for fd in received:
        os.close(fd)
    status = _wait(host, woken, child)
    if status is not None:
        code = os.waitstatus_to_exitcode(status)
        _tell(host, code if code >= 0 else 128 - code)
    return 0


def _receive(host: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the task and its descriptors, moved above the numbers that the program expects."""
    numbers = array.array("i")
    space = socket.CMSG_SPACE(MOST_DESCRIPTORS * numbers.itemsize)
    message, extra, _, _ = host.recvmsg(MESSAGE_BYTES, space)
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    task = json.loads(message)
    above = max(task["descriptors"]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in numbers]
    for fd in numbers:
        os.close(fd)
    return task, moved


def _become(task: dict[str, Any], received: list[int]) -> None:
    """Execute the program in this child; does not return."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        wanted = task["descriptors"]
        for fd, number in zip(received, wanted, strict=True):
            os.dup2(fd, number)
        first = 0
        for number in sorted(wanted):
            if first < number:  # an empty range would close everything
                os.closerange(first, number)
            first = number + 1
        # the received descriptors are above these, and close on exec
        os.chdir("/")
        os.execve(task["argv"][0], task["argv"], task["env"])
    except BaseException as error:  # noqa: BLE001  # the child must not run on as a second init
        os.write(2, f"{task['argv'][0]}: {error}\n".encode())
    finally:
        os._exit(EXIT_FAILED)


def _wait(host: socket.socket, woken: socket.socket, child: int) -> int | None:
    """Reap children until the program ends; return its wait status, None if the host has closed."""
    poll = select.poll()
    poll.register(host, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if host.fileno() in ready:
            return None
        if woken.fileno() in ready:
            woken.recv(4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == child:
                return status
            if pid == 0:
                break


def _noted(number: int, frame: object) -> None:
    """Do nothing at SIGCHLD: the wakeup descriptor reports it."""


def _tell(host: socket.socket, code: int) -> None:
    with contextlib.suppress(OSError):  # the host has closed
        host.send(str(code).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
