"""Process 1 of the template: makes a sandbox per request, has the zygote fork a kernel into it.

It runs on the standard library and outlives the zygote. Requests of the server, one packet each:

    {"op": "fork", "id": n, "uid": …, "hostname": …, "tmp_bytes": …, "places": […], "trial": …,
     "stage": …}
        with descriptors: ready socket, output ring, output pipe, then the mounts of `places`,
        then the socket over which listening ones at the addresses of `listen` go, if there are any;
        `trial` describes the self-test to run instead of a kernel, if there is one; `stage` is the
        one that has to fork, 0 for any

    {"op": "end", "id": n}      of a kernel that the server cannot know: end its sandbox

Answers:

    {"op": "ready", "stage": n, "missing": {module: error}, "left": …}
        it forks from here on with what is loaded; `left` is the number of modules still to come

    {"op": "forked", "id": n, "stage": …}                with pidfds: the init, the kernel
    {"op": "failed", "id": n, "error": …}                there is no such kernel
    {"op": "passed", "id": n}                            the same, as its stage is over
    {"op": "exit", "id": n, "status": …}                 wait status of the kernel; its init stays
    {"op": "zygote-ended"}                               no more forks; kernels that run go on
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kernel_specs.template import cell, linux


class ChildWatch:
    """A descriptor that is readable when a child may have ended (SIGCHLD)."""

    def __init__(self) -> None:
        """Set this process's SIGCHLD handler and wakeup descriptor."""
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """What to poll."""
        return self._read

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self._read)
        os.close(self._write)

    def ended(self) -> Iterator[tuple[int, int]]:
        """Process id and wait status of every child that has ended since."""
        try:
            while os.read(self._read, 4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            yield pid, status

    @staticmethod
    def forget() -> None:
        """Undo the effects on this process, in a child that is none of ours."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


START = str(Path(__file__).with_name("start.py"))
EXIT_CODE = 70  # EX_SOFTWARE
RESERVED_FDS = (3, 4)
"""A kernel's descriptors of its ready socket and its output ring."""
PIDS_OF_KERNELS = 32
"""The zygote's pid is above: libraries renew random generators when getpid() has changed."""
_STREAMS = 3
"""Descriptors of a request before the mounts."""


@dataclass(frozen=True)
class Start:
    """The first message from the server.

    python   interpreter of the environment
    preload  modules to import before the first fork
    support  the folder of the kernel's own packages and its order, if the environment has none
    variables  of the environment that they are imported in
    """

    python: str
    preload: tuple[str, ...]
    support: tuple[str, ...]
    ground: cell.Ground
    variables: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Start:
        """From the server's packet. Raises KeyError, ValueError."""
        return cls(
            python=str(data["python"]),
            preload=tuple(map(str, data["preload"])),
            support=tuple(map(str, data["support"])),
            ground=cell.Ground(
                masks=tuple(map(str, data["masks"])),
                kept=tuple(map(str, data["kept"])),
                program=base64.b64decode(data["filter"]),
            ),
            variables={str(name): str(value) for name, value in data["variables"].items()},
        )


@dataclass
class _Session:
    """A kernel and its init, by their pids here: 0 before they are known and once they are gone.

    `zygote` is the link to the one that was asked for it.

    `over` is set when there is no kernel any more.
    """

    zygote: socket.socket
    stage: int
    init: int
    init_pidfd: int
    kernel: int = 0
    over: bool = False


class TemplateInit:
    """Makes a sandbox for each request and has the zygote put a kernel into it.

    A zygote hands over to the next one, which has more modules: that is another stage.
    """

    def __init__(self, control: socket.socket, start: Start) -> None:
        self._control = control
        self._start = start
        self._sessions: dict[int, _Session] = {}
        self._children = ChildWatch()
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._stage = 0
        self._zygote: socket.socket | None = self._start_zygote()
        self._zygotes = [self._zygote]
        """The one that forks is the last; those before it tell the ends of their kernels."""
        self._poll = select.poll()

    def run(self) -> None:
        """Serve until the server is gone, or the zygote and the last kernel are.

        When this process ends, everything below it does.
        """
        linux.set_name("kernel-init")
        for each in (self._control.fileno(), self._children.fileno(), self._zygotes[0].fileno()):
            self._poll.register(each, select.POLLIN)
        with contextlib.suppress(BrokenPipeError):
            while self._zygote is not None or self._sessions:
                ready = {fd for fd, _ in self._poll.poll()}
                for zygote in [each for each in self._zygotes if each.fileno() in ready]:
                    self._on_zygote(zygote)
                if self._children.fileno() in ready:
                    for pid, status in self._children.ended():
                        self._on_ended(pid, status)
                if self._control.fileno() in ready and not self._on_request():
                    return

    def _start_zygote(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _use_up_pids()
        pid = os.fork()
        if pid == 0:
            try:
                linux.unshare(linux.CLONE_NEWNS)
                cell.hide_sessions()
                cell.show_processes()
                # it will run code of packages, and this process sees the folders of all sessions
                cell.keep_from_processes()
                self._become_zygote(theirs.fileno())
            finally:
                os._exit(EXIT_CODE)
        theirs.close()
        program = base64.b64encode(self._start.ground.program).decode()
        linux.send(ours, {"filter": program})
        return ours

    def _become_zygote(self, control: int) -> NoReturn:
        """Execute the zygote with `RESERVED_FDS` on /dev/null, so that no package gets them."""
        control = fcntl.fcntl(control, fcntl.F_DUPFD, RESERVED_FDS[-1] + 1)
        for fd in RESERVED_FDS:
            os.dup2(0, fd)  # /dev/null
        python = self._start.python
        support = ":".join(self._start.support)
        arguments = [START, "zygote", support, str(control), *self._start.preload]
        os.execve(python, [python, "-I", "-B", *arguments], {**os.environ, **self._start.variables})

    def _on_request(self) -> bool:
        """Handle one request; False when the server is gone."""
        received = linux.receive(self._control)
        if received is None:
            return False
        request, fds = received
        number = int(request["id"])
        if request["op"] == "end":
            linux.close_all(fds)
            self._over(number)
            return True
        try:
            if request.get("stage", 0) not in (0, self._stage):
                self._tell({"op": "passed", "id": number})
                return True
            wanted = cell.Cell.parse(request, fds[_STREAMS:])
            self._fork(number, wanted, fds[:_STREAMS], request.get("trial"))
        except (OSError, KeyError, ValueError) as error:
            self._tell({"op": "failed", "id": number, "error": f"{type(error).__name__}: {error}"})
            self._over(number)
        finally:
            linux.close_all(fds)
        return True

    def _fork(self, number: int, wanted: cell.Cell, streams: Sequence[int], trial: object) -> None:
        if self._zygote is None:
            raise OSError("the template has ended")
        done_read, done_write = os.pipe()
        pids = -1
        try:
            # without going back first, a second unshare is refused
            linux.setns(self._own_pids, linux.CLONE_NEWPID)
            linux.unshare(linux.CLONE_NEWPID)
            init = os.fork()
            if init == 0:
                cell.hold(wanted, self._start.ground, done_write)
            session = self._sessions[number] = _Session(
                self._zygote, self._stage, init, os.pidfd_open(init)
            )
            # the zygote may not touch an init before that has given up its rights
            pids = os.open("/proc/self/ns/pid_for_children", os.O_RDONLY | os.O_CLOEXEC)
            linux.send(
                self._zygote,
                {"id": number, "uid": wanted.uid, "trial": trial},
                [session.init_pidfd, pids, done_read, *streams],
            )
        finally:
            if pids >= 0:
                os.close(pids)
            os.close(done_read)
            os.close(done_write)

    def _on_zygote(self, zygote: socket.socket) -> None:
        """Pass on the messages of a zygote, and take note of its end."""
        while True:
            try:
                received = linux.receive(zygote, wait=False)
            except BlockingIOError:
                return
            if received is None:
                self._lose(zygote)
                return
            message, fds = received
            number = message.get("id", 0)
            session = self._sessions.get(number)
            if message["op"] == "ready":
                if zygote is self._zygote:
                    self._on_stage(message, [fds.pop(0)] if fds else [])
            elif message["op"] == "forked" and session is not None:
                session.kernel = message.pop("pid")
                self._tell({**message, "stage": session.stage}, [session.init_pidfd, *fds])
            else:
                self._tell(message)
                self._over(number, kill=message["op"] != "exit")
            linux.close_all(fds)

    def _on_stage(self, message: dict[str, Any], successor: Sequence[int]) -> None:
        """Have another zygote fork from here on, if there is one; the old one ends."""
        if successor and self._zygote is not None:
            with contextlib.suppress(OSError):  # it has just ended
                self._zygote.shutdown(socket.SHUT_WR)
            self._zygote = socket.socket(fileno=successor[0])
            self._zygotes.append(self._zygote)
            self._poll.register(self._zygote.fileno(), select.POLLIN)
        if successor or not self._stage:
            self._stage += 1
        self._tell(
            {
                "op": "ready",
                "stage": self._stage,
                "missing": message["missing"],
                "left": message["left"],
            }
        )

    def _lose(self, zygote: socket.socket) -> None:
        """A zygote has ended, which may not have answered; without another one, forking is over."""
        self._poll.unregister(zygote)
        self._zygotes.remove(zygote)
        zygote.close()
        if zygote is self._zygote:
            self._zygote = None
            self._tell({"op": "zygote-ended"})
        for number, session in list(self._sessions.items()):
            if session.zygote is zygote and not session.kernel and not session.over:
                self._tell({"op": "failed", "id": number, "error": "the template has ended"})
                self._over(number)

    def _on_ended(self, pid: int, status: int) -> None:
        """Handle the end of an init, or of a kernel that outlived its zygote."""
        for zygote in list(self._zygotes):
            self._on_zygote(zygote)  # which may just have told of that kernel
        for number, session in list(self._sessions.items()):
            if pid == session.init:
                session.init = 0
                self._forget(number)
            elif pid == session.kernel:
                self._tell({"op": "exit", "id": number, "status": status})
                self._over(number, kill=False)

    def _over(self, number: int, *, kill: bool = True) -> None:
        """Kill what is left of a session that never had a kernel; the server does it otherwise.

        There may be a checkpoint, of which it wants another one.
        """
        session = self._sessions.get(number)
        if session is None:
            return
        session.over = True
        if session.init and kill:
            signal.pidfd_send_signal(session.init_pidfd, signal.SIGKILL)
        self._forget(number)

    def _forget(self, number: int) -> None:
        session = self._sessions[number]
        if session.over and not session.init:
            os.close(session.init_pidfd)
            del self._sessions[number]

    def _tell(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        linux.send(self._control, message, fds)


def _use_up_pids() -> None:
    """Advance the pid counter past `PIDS_OF_KERNELS`."""
    last = 0
    while last < PIDS_OF_KERNELS:
        last = os.fork()
        if last == 0:
            os._exit(0)
        os.waitpid(last, 0)


# `start.py enter CONTROL_FD [ID_MAPS]`: the first process inside the outer bubblewrap.
#
# A root server's template enters a user namespace first whose root is an ordinary user of the host,
# with the user ids of kernels but without the host's root. Packages are imported as that user. The
# processes that stay root outside have no capability and are not visible inside.

_EVERYTHING = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
    | linux.CLONE_NEWNET
)
_HIDDEN = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC


def main(argv: Sequence[str]) -> int:
    """Become the init, in the user namespace that the id maps of the second argument describe."""
    # a terminal's or a kernel's SIGINT is never meant for these processes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = int(argv[0])
    if argv[1:]:
        below = os.fork()
        if below:
            os.close(control)
            return _outlive(below)
        linux.mount("proc", "/proc", "proc", _HIDDEN)
        first = _enter([tuple(map(int, row.split(":"))) for row in argv[1].split(",")])
        if first:
            os.close(control)
            return _outlive(first)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        linux.mount("proc", "/proc", "proc", _HIDDEN)
        # a program belongs to the user namespace that it was started in
        os.set_inheritable(control, True)
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", START, "enter", argv[0]])
    with socket.socket(fileno=control) as server:
        server.set_inheritable(False)
        start = linux.receive(server)
        if start is not None:
            TemplateInit(server, Start.parse(start[0])).run()
    return 0


def _enter(maps: Sequence[tuple[int, ...]]) -> int:
    """Enter a user namespace with these id maps; the result of fork(2) in it."""
    ask_read, ask_write = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        _write_when_asked(ask_read, ask_write, maps)
    _own_what_comes(maps[0][1])
    linux.unshare(_EVERYTHING)
    os.close(ask_read)
    os.write(ask_write, b"1")
    os.close(ask_write)
    _, status = os.waitpid(mapper, 0)
    if status != 0:
        raise RuntimeError("the id maps of the template could not be written")
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
    return os.fork()


def _own_what_comes(owner: int) -> None:
    """Become this user, with all capabilities: the creator of a user namespace pays for its use.

    Queued signals, message queues and watches of kernels would else count for the host's root.
    """
    linux.prctl(linux.PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(owner, owner, owner)
    os.setresuid(owner, owner, owner)
    linux.use_capabilities()


def _write_when_asked(ask_read: int, ask_write: int, maps: Sequence[tuple[int, ...]]) -> None:
    """The helper's body: it stays in the old user namespace, whose root may write the maps."""
    os.close(ask_write)
    failed = 1
    try:
        if os.read(ask_read, 1):
            processes = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
            cell.write_maps(str(os.getppid()), maps, processes)
            failed = 0
    finally:
        os._exit(failed)


def _outlive(first: int) -> int:
    """Wait for a child, without capabilities; the child dies with this process (PDEATHSIG).

    The first of two such processes is PID 1, whose end kills everything below. It keeps the user
    of bubblewrap, whose own death signal reaches no other.
    """
    linux.set_name("kernel-outer")
    linux.clear_capabilities()
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    _, status = os.waitpid(first, 0)
    return os.waitstatus_to_exitcode(status) & 0x7F
