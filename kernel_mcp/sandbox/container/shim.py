"""Start a container and send descriptors to its first process, which no engine supports.

    shim.py --parent PID --status FD --task FD

This program runs on the host. It listens beside the kernel's sockets and runs the engine to start
the container. The container's first process connects, and SO_PEERCRED shows its pid on the host.

The shim sends this pid over the socket `--status`, with the connection that reports the kernel's
end, and exits. If the other end of `--status` is closed, it stays and exits with the kernel's code,
128 + n for signal n. It is killed with the server. The container ends when the connection closes.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel_mcp.linux.cgroupfs import Hierarchy

SOCKET = "enter"
PATIENCE_MS = 2000
"""Milliseconds without a connection after which the engine is asked if the container still runs."""
EXIT_FAILED = 125
MOST_DESCRIPTORS = 1 << 20
GROUP_PREFIX = "kernel-mcp-"
"""Prefix of the names of servers' control groups."""
Task: TypeAlias = "dict[str, Any]"
_CREDENTIALS = struct.Struct("3i")


def main(argv: list[str]) -> int:
    """Start the container; return the exit code."""
    given = dict(zip(argv[::2], argv[1::2], strict=True))
    server = int(given["--parent"])
    _die_with(server)
    status_fd, task = int(given["--status"]), _task(int(given["--task"]))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        _listen(listener, task)
        first = _start(listener, task, server)
        if first is None:
            return EXIT_FAILED
        pid, uid, _ = _CREDENTIALS.unpack(
            first.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != task["uid"]:
            return _fail(
                f"processes of the container run as host user {uid}, not as {task['uid']}: the "
                "engine maps users (userns-remap), which kernel-mcp cannot work with"
            )
    _bring_along(pid)
    with socket.socket(fileno=status_fd) as status:
        watched = _report(status, pid, first)
    _hand_over(first, task)
    return 0 if watched else _outcome(first)


def _task(fd: int) -> Task:
    with open(fd, "rb") as file:
        task: Task = json.load(file)
    return task


def _die_with(parent: int) -> None:
    _find_project()
    from kernel_specs import linux

    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(EXIT_FAILED)


def _listen(listener: socket.socket, task: Task) -> None:
    # bind by a relative name: the whole path may be too long for a socket's address
    os.chdir(task["sockets"])
    listener.bind(SOCKET)
    os.chmod(SOCKET, 0o600)  # noqa: PTH101
    if task["uid"] != os.geteuid():
        os.chown(SOCKET, task["uid"], -1)
    listener.listen(1)
    os.chdir("/")


def _start(listener: socket.socket, task: Task, server: int) -> socket.socket | None:
    """Start the container with the engine; return the connection of its first process.

    None if the container could not be started or ended at once; the reason is written to stderr.
    """
    code = _engine(task["run"], quiet=True, server=server)
    if code != 0:
        _fail(f"{task['run'][0]} could not start a container (exit code {code})")
        return None
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while not poll.poll(PATIENCE_MS):
        if _engine(task["alive"], quiet=True) != 0:
            _engine(task["diagnose"], quiet=False)
            _fail("the container ended before the interpreter in it had started; see above")
            return None
    first, _ = listener.accept()
    os.unlink(f"{task['sockets']}/{SOCKET}")  # noqa: PTH108
    return first


def _engine(argv: list[str], *, quiet: bool, server: int = 0) -> int:
    """Run the engine's command line to its end; return its exit code.

    The engine may outlive this program: killing it could leave a half-made container. A container
    that starts too late finds no listener and ends.

    With `server`, the engine runs in the control groups of that process. Processes in the groups of
    a kernel are killed with the kernel.
    """
    places = _places_of(server) if server else []
    child = os.fork()
    if child == 0:
        try:
            for place in places:
                place.write_text(str(os.getpid()))
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, 0)
            if quiet:
                os.dup2(null, 1)
            os.closerange(3, MOST_DESCRIPTORS)
            os.execv(argv[0], argv)
        finally:
            os._exit(EXIT_FAILED)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _bring_along(pid: int) -> None:
    """Move a process into the control groups in which the server has started this program.

    This happens before the kernel starts, as memory stays charged to the group that allocated it.
    """
    for tree in _kernel_groups():
        (tree.own / "cgroup.procs").write_text(str(pid))


def _places_of(server: int) -> list[Path]:
    """Return cgroup.procs of the server's groups, for the controllers that limit the kernel."""
    kernels = {tree.controllers for tree in _kernel_groups()}
    servers = _groups_of(str(server))
    return [tree.own / "cgroup.procs" for tree in servers if tree.controllers in kernels]


def _kernel_groups() -> list[Hierarchy]:
    """Return the kernel's control groups, in which the server has started this program."""
    trees = _groups_of("self")
    return [t for t in trees if any(part.startswith(GROUP_PREFIX) for part in t.own.parts)]


def _groups_of(process: str) -> Sequence[Hierarchy]:
    _find_project()
    from kernel_mcp.linux.cgroupfs import find_hierarchies

    return find_hierarchies(Path("/proc", process))


def _find_project() -> None:
    """Make this project importable in this program."""
    packages = str(Path(__file__).parents[3])
    if packages not in sys.path:
        sys.path.append(packages)


def _report(status: socket.socket, pid: int, first: socket.socket) -> bool:
    """Send pid and connection of the first process to the server; return False without a reader."""
    try:
        socket.send_fds(status, [json.dumps({"child-pid": pid}).encode() + b"\n"], [first.fileno()])
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _hand_over(first: socket.socket, task: Task) -> None:
    """Send the task with stdin, stdout, stderr and the descriptors that the kernel inherits."""
    numbers = [0, 1, 2, *task["inherit"]]
    message = {name: task[name] for name in ("argv", "env", "filter")}
    message["descriptors"] = numbers
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))
    data = json.dumps(message).encode()
    first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(data) + (1 << 16))
    first.sendmsg([data], [rights])
    os.closerange(3, first.fileno())
    os.closerange(first.fileno() + 1, MOST_DESCRIPTORS)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)


def _outcome(first: socket.socket) -> int:
    """Wait for the end of the kernel; return its exit code, 128 + n for signal n."""
    try:
        said = first.recv(64)
    except ConnectionResetError:
        said = b""
    # no message: the first process was killed, and with it all others
    return int(said or 128 + signal.SIGKILL)


def _fail(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
