"""Process 1 of the template: makes a sandbox per request, has the zygote fork a kernel into it.

It runs on the standard library and outlives the zygote. Requests of the server, one packet each:

    {"op": "fork", "id": n, "uid": …, "hostname": …, "tmp_bytes": …, "places": […], "trial": …}
        with descriptors: ready socket, output ring, output pipe, then the mounts of `places`;
        `trial` describes the self-test to run instead of a kernel, if there is one

Answers:

    {"op": "ready", "missing": {module: error}}          everything is loaded
    {"op": "forked", "id": n}                            with pidfds: the init, the kernel
    {"op": "failed", "id": n, "error": …}                there is no such kernel
    {"op": "exit", "id": n, "status": …}                 wait status of the kernel
    {"op": "zygote-ended", "status": …}                  no more forks; kernels that run go on
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import select
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """

    python: str
    preload: tuple[str, ...]
    ground: cell.Ground

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Start:
        """From the server's packet. Raises KeyError, ValueError."""
        return cls(
            python=str(data["python"]),
            preload=tuple(map(str, data["preload"])),
            ground=cell.Ground(
                masks=tuple(map(str, data["masks"])),
                kept=tuple(map(str, data["kept"])),
                program=base64.b64decode(data["filter"]),
            ),
        )


@dataclass
class _Session:
    """A kernel and its init, by their pids here: 0 before they are known and once they are gone.

    `over` is set when there is no kernel any more.
    """

    init: int
    init_pidfd: int
    kernel: int = 0
    over: bool = False


class TemplateInit:
    """Makes a sandbox for each request and has the zygote put a kernel into it."""

    def __init__(self, control: socket.socket, start: Start) -> None:
        self._control = control
        self._start = start
        self._sessions: dict[int, _Session] = {}
        self._children = ChildWatch()
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._zygote, self._zygote_pid = self._start_zygote()

    def run(self) -> None:
        """Serve until the server is gone, or the zygote and the last kernel are.

        When this process ends, everything below it does.
        """
        linux.set_name("kernel-init")
        poll = select.poll()
        for source in (self._control, self._zygote, self._children):
            poll.register(source.fileno(), select.POLLIN)
        with contextlib.suppress(BrokenPipeError):
            while self._zygote_pid or self._sessions:
                ready = {fd for fd, _ in poll.poll()}
                if self._zygote.fileno() in ready and not self._on_zygote():
                    poll.unregister(self._zygote)
                if self._children.fileno() in ready:
                    for pid, status in self._children.ended():
                        self._on_ended(pid, status)
                if self._control.fileno() in ready and not self._on_request():
                    return

    def _start_zygote(self) -> tuple[socket.socket, int]:
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
        return ours, pid

    def _become_zygote(self, control: int) -> NoReturn:
        """Execute the zygote with `RESERVED_FDS` on /dev/null, so that no package gets them."""
        control = fcntl.fcntl(control, fcntl.F_DUPFD, RESERVED_FDS[-1] + 1)
        for fd in RESERVED_FDS:
            os.dup2(0, fd)  # /dev/null
        python = self._start.python
        arguments = [START, "zygote", str(control), *self._start.preload]
        os.execv(python, [python, "-I", "-B", *arguments])

    def _on_request(self) -> bool:
        """Handle one request; False when the server is gone."""
        received = linux.receive(self._control)
        if received is None:
            return False
        request, fds = received
        number = int(request["id"])
        try:
            wanted = cell.Cell.parse(request, fds[_STREAMS:])
            self._fork(number, wanted, fds[:_STREAMS], request.get("trial"))
        except (OSError, KeyError, ValueError) as error:
            self._tell({"op": "failed", "id": number, "error": f"{type(error).__name__}: {error}"})
            self._over(number)
        finally:
            linux.close_all(fds)
        return True

    def _fork(self, number: int, wanted: cell.Cell, streams: Sequence[int], trial: object) -> None:
        if not self._zygote_pid:
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
            session = self._sessions[number] = _Session(init, os.pidfd_open(init))
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

    def _on_zygote(self) -> bool:
        """Pass on one message of the zygote; False when there is none."""
        try:
            received = linux.receive(self._zygote, wait=False)
        except BlockingIOError:
            return False
        if received is None:
            return False
        message, fds = received
        number = message.get("id", 0)
        session = self._sessions.get(number)
        if message["op"] == "forked" and session is not None:
            session.kernel = message.pop("pid")
            self._tell(message, [session.init_pidfd, *fds])
        else:
            self._tell(message)
            self._over(number)
        linux.close_all(fds)
        return True

    def _on_ended(self, pid: int, status: int) -> None:
        """Handle the end of the zygote, an init, or a kernel that outlived the zygote."""
        if pid == self._zygote_pid:
            self._zygote_pid = 0
            while self._on_zygote():
                pass
            self._tell({"op": "zygote-ended", "status": status})
            for number, session in list(self._sessions.items()):
                if not session.kernel:
                    self._over(number)
            return
        for number, session in list(self._sessions.items()):
            if pid == session.init:
                session.init = 0
                self._forget(number)
            elif pid == session.kernel:
                self._tell({"op": "exit", "id": number, "status": status})
                self._over(number)

    def _over(self, number: int) -> None:
        """Kill what is left of a session without a kernel."""
        session = self._sessions.get(number)
        if session is None:
            return
        session.over = True
        if session.init:
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
