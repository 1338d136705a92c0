"""Process 1 of the template: build a sandbox per request, into which the zygote forks a kernel.

Requests of the server, one packet each:

    {"op": "fork", "id": n, "uid": …, "hostname": …, "tmp_bytes": …, "places": […], "trial": …,
     "stage": …, "gates": …}
        with descriptors in this order: ready socket, output ring, output pipe, control groups to
        enter (`gates` is their number), mounts of `places`, and a socket if there is `listen`.
        Sockets that listen at its addresses are sent over that socket. `trial` describes a
        self-test to run instead of a kernel. `stage` is the one that has to fork, 0 for any

    {"op": "end", "id": n}      kill the sandbox: the pidfds of its kernel did not reach the server

Answers:

    {"op": "ready", "stage": n, "missing": {module: error}, "left": …}
        the stage forks from now on; `left` is the number of modules still to be imported

    {"op": "forked", "id": n, "stage": …}                with pidfds: the init, the kernel
    {"op": "failed", "id": n, "error": …}                no kernel was forked
    {"op": "passed", "id": n}                            nor here: its stage is over, request again
    {"op": "exit", "id": n, "status": …}                 wait status of the kernel; its init stays
    {"op": "zygote-ended", "status": …}                  no more forks; kernels that run go on
"""

from __future__ import annotations

import binascii
import contextlib
import fcntl
import os
import select
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kernel_specs import linux
from kernel_specs.template import packets, sandbox

if TYPE_CHECKING:
    from typing import Any, NoReturn


class ChildWatch:
    """A descriptor that is readable when a child may have exited (SIGCHLD)."""

    def __init__(self) -> None:
        """Set this process's SIGCHLD handler and wakeup descriptor."""
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._read

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._read)
        os.close(self._write)

    def ended(self) -> Iterator[tuple[int, int]]:
        """Yield process id and wait status of every child that has exited since the last call."""
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
        """Reset SIGCHLD and the wakeup descriptor, in a child that is to be a kernel."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


START = f"{os.path.dirname(__file__)}/start.py"  # noqa: PTH120  # pathlib takes 4 ms
EXIT_CODE = 70  # EX_SOFTWARE
RESERVED_FDS = (3, 4)
"""Descriptor numbers of a kernel's ready socket and output ring."""
PIDS_OF_KERNELS = 32
"""Highest pid of kernels.

The zygote's is above: libraries renew random state if getpid() differs.
"""
_LAST_PID = "/proc/sys/kernel/ns_last_pid"
_END_MS = 200
"""Milliseconds to wait for the exit of a zygote that has closed its socket."""
_STREAMS = 3
"""Number of descriptors of a request before those of control groups."""


class TemplateRequest:
    """The first message from the server.

    python   interpreter of the environment
    preload  modules to import before the first fork
    support  folder of the kernel's own packages and its place on sys.path; empty if not needed
    variables  environment variables during the imports
    """

    def __init__(self, data: dict[str, Any]) -> None:
        """Parse the server's packet. Raises KeyError, ValueError."""
        self.python = str(data["python"])
        self.preload = tuple(map(str, data["preload"]))
        self.support = tuple(map(str, data["support"]))
        self.settings = sandbox.SandboxSettings(
            masks=tuple(map(str, data["masks"])),
            fixed=tuple(map(str, data["fixed"])),
            kept=tuple(map(str, data["kept"])),
            program=binascii.a2b_base64(data["filter"]),
        )
        self.variables = {str(name): str(value) for name, value in data["variables"].items()}


class _Session:
    """A kernel and its init, by pids in this namespace: 0 if not known yet, or reaped.

    `zygote` is the socket of the zygote that forks it. `over` is set once the kernel has ended.
    """

    def __init__(self, zygote: socket.socket, stage: int, init: int) -> None:
        self.zygote = zygote
        self.stage = stage
        self.init = init
        self.init_pidfd = os.pidfd_open(init)
        self.kernel = 0
        self.over = False


class TemplateInit:
    """Builds a sandbox for each request; the zygote forks a kernel into it.

    The next stage is a successor with more modules, which replaces the zygote.
    """

    def __init__(self, control: socket.socket, start: TemplateRequest) -> None:
        self._control = control
        self._start = start
        self._sessions: dict[int, _Session] = {}
        """Sessions by the number of their request."""
        self._children = ChildWatch()
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._stage = 0
        self._zygote_pid = 0
        self._zygote_status: int | None = None
        self._zygote: socket.socket | None = self._start_zygote()
        self._zygotes = [self._zygote]
        """Sockets of zygotes: the last one forks, earlier ones report the ends of their kernels."""
        self._poll = select.poll()

    def run(self) -> None:
        """Serve until the server is gone, or both the zygote and the last kernel are.

        When this process ends, so do all processes of its pid namespace.
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
                sandbox.hide_sessions()
                sandbox.show_processes()
                # it runs code of packages, and this process sees the folders of all sessions
                sandbox.keep_from_processes()
                self._become_zygote(theirs.fileno())
            except OSError as error:
                os.write(2, f"the template could not be started: {error}\n".encode())
            finally:
                os._exit(EXIT_CODE)
        self._zygote_pid = pid
        theirs.close()
        program = binascii.b2a_base64(self._start.settings.program, newline=False).decode()
        packets.send(ours, {"filter": program})
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
        """Handle one request; return False if the server is gone."""
        received = packets.receive(self._control)
        if received is None:
            return False
        request, fds = received
        try:
            self._do(request, fds)
        finally:
            linux.close_all(fds)
        return True

    def _do(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        number = int(request["id"])
        if request["op"] == "end":
            self._over(number)
        elif request.get("stage", 0) not in (0, self._stage):
            self._tell({"op": "passed", "id": number})
        else:
            try:
                self._fork(number, request, fds)
            except (OSError, KeyError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
                self._tell({"op": "failed", "id": number, "error": why})
                self._over(number)

    def _fork(self, number: int, request: dict[str, Any], fds: Sequence[int]) -> None:
        """Make an init in a new pid namespace, and request a kernel in that from the zygote.

        Raises OSError, KeyError, ValueError.
        """
        if self._zygote is None:
            raise OSError("the template has ended")
        end = _STREAMS + int(request.get("gates", 0))
        wanted, cgroup_fds = sandbox.KernelSandbox.parse(request, fds[end:]), fds[_STREAMS:end]
        with contextlib.ExitStack() as sent:
            done_read, done_write = os.pipe()
            sent.callback(linux.close_all, (done_read, done_write))
            # Linux refuses a second unshare unless the own namespace is restored first
            linux.setns(self._own_pids, linux.CLONE_NEWPID)
            linux.unshare(linux.CLONE_NEWPID)
            init = os.fork()
            if init == 0:
                self._children.forget()
                sandbox.hold(wanted, self._start.settings, cgroup_fds, done_write)
            session = self._sessions[number] = _Session(self._zygote, self._stage, init)
            # the zygote may not access an init before that has dropped its capabilities
            pids = os.open("/proc/self/ns/pid_for_children", os.O_RDONLY | os.O_CLOEXEC)
            sent.callback(os.close, pids)
            packets.send(
                self._zygote,
                {"id": number, "uid": wanted.uid, "trial": request.get("trial")},
                [session.init_pidfd, pids, done_read, *fds[:end]],
            )

    def _on_zygote(self, zygote: socket.socket) -> None:
        """Forward the messages of a zygote to the server, and handle its end."""
        while True:
            try:
                received = packets.receive(zygote, wait=False)
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
        """Fork from the `successor` from now on, if there is one; the old zygote ends.

        Report the new stage to the server.
        """
        if successor and self._zygote is not None:
            with contextlib.suppress(OSError):  # it has just ended
                self._zygote.shutdown(socket.SHUT_WR)
            self._zygote = socket.socket(fileno=successor[0])
            self._zygote_pid = int(message["pid"])
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
        """Handle the end of a zygote: report its open forks as failed, and that forking is over.

        It is not over if a successor has taken its place.
        """
        self._poll.unregister(zygote)
        self._zygotes.remove(zygote)
        zygote.close()
        if zygote is self._zygote:
            self._zygote = None
            self._tell({"op": "zygote-ended", "status": self._zygotes_end()})
        for number, session in list(self._sessions.items()):
            if session.zygote is zygote and not session.kernel and not session.over:
                self._tell({"op": "failed", "id": number, "error": "the template has ended"})
                self._over(number)

    def _zygotes_end(self) -> int | None:
        """Return the wait status of the zygote that has hung up; None if its parent reaps it."""
        if self._zygote_status is None:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                pidfd = os.pidfd_open(self._zygote_pid)
                try:
                    poll = select.poll()
                    poll.register(pidfd, select.POLLIN)
                    poll.poll(_END_MS)
                finally:
                    os.close(pidfd)
                pid, status = os.waitpid(self._zygote_pid, os.WNOHANG)
                self._zygote_status = status if pid else None
        return self._zygote_status

    def _on_ended(self, pid: int, status: int) -> None:
        """Handle the end of an init, of a zygote, or of a kernel that outlived its zygote."""
        if pid == self._zygote_pid:
            self._zygote_status = status
        for zygote in list(self._zygotes):
            self._on_zygote(zygote)  # it may just have reported that kernel
        for number, session in list(self._sessions.items()):
            if pid == session.init:
                session.init = 0
                self._forget(number)
            elif pid == session.kernel:
                self._tell({"op": "exit", "id": number, "status": status})
                self._over(number, kill=False)

    def _over(self, number: int, *, kill: bool = True) -> None:
        """Note that a session's kernel has ended; with `kill`, kill its sandbox.

        Otherwise the server kills it later: it may still fork another kernel from a checkpoint.
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
        packets.send(self._control, message, fds)


def _use_up_pids() -> None:
    """Advance the pid counter past `PIDS_OF_KERNELS`."""
    # only a root server's template has a writable /proc, where this works
    with contextlib.suppress(OSError), open(_LAST_PID, "wb", buffering=0) as last_pid:
        last_pid.write(str(PIDS_OF_KERNELS).encode())
    last = 0
    while last < PIDS_OF_KERNELS:
        last = os.fork()
        if last == 0:
            os._exit(0)
        os.waitpid(last, 0)


def main(argv: Sequence[str]) -> int:
    """Serve requests of the server over the control socket, whose descriptor is the argument."""
    # a terminal's or a kernel's SIGINT is never meant for these processes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(argv[0])) as server:
        server.set_inheritable(False)
        start = packets.receive(server)
        if start is not None:
            TemplateInit(server, TemplateRequest(start[0])).run()
    return 0
