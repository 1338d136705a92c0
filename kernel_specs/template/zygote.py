"""`start.py zygote SUPPORT FD MODULE…`: fork kernels that share the modules loaded here.

The first zygote has the kernel alone; successors (`stages`) import the modules and replace it. It
has no thread, no kernel socket and no event loop, so that forking is safe and single-threaded
children may change namespaces. It never runs user code.
"""

from __future__ import annotations

import base64
import fcntl
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from kernel_specs import linux, selftest
from kernel_specs.restricted import config, confine, host
from kernel_specs.template import immortal, packets, preload, sandbox, stages
from kernel_specs.template.init import RESERVED_FDS, ChildWatch

CONNECTION_FILE = Path("/run/kernel/connection.json")
READY_FD, RING_FD = RESERVED_FDS
"""Descriptor numbers in a kernel; 0 is /dev/null, 1 and 2 are the output pipe."""
EXIT_CODE = 70  # EX_SOFTWARE
REST_S = 0.15
"""Seconds without a request after which an awaited stage starts its successor."""
LONGEST_REST_S = 1.0


@dataclass(frozen=True)
class Job:
    """A request for a kernel: its sandbox, its descriptors, control groups to enter (`cgroup_fds`).

    With `trial` it runs that self-test instead of a kernel.
    """

    sandbox: sandbox.SandboxEntry
    ready: int
    ring: int
    output: int
    cgroup_fds: Sequence[int] = ()
    trial: dict[str, Any] | None = None


@dataclass(frozen=True)
class Inheritance:
    """State that a kernel inherits from the template.

    `files` are descriptors that packages keep open for reading.
    """

    settings: sandbox.SandboxSettings
    loaded: preload.PreloadResult
    files: Sequence[int]


class Zygote:
    """Forks a kernel for each message of the template's init and reports its end.

    Meanwhile a successor imports further modules; once it is ready, the init gets its socket.
    """

    def __init__(self, control: socket.socket, stage: stages.Stage) -> None:
        self._control = control
        self._stage = stage
        self._successor: stages.NextZygote | None = None
        self._began = self._asked = time.monotonic()
        self._kernels: dict[int, int] = {}
        self._children = ChildWatch()
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def run(self) -> Job | socket.socket | None:
        """Serve until the template's init hangs up, then return None.

        Returns in forked children, too: the job of a kernel, or a successor's socket to its parent.
        """
        packets.send(self._control, self._stage.message())
        while True:
            if self._grows and not self._rest_ms:
                link = self._grow()
                if link is not None:
                    return link
            readable = self._wait()
            if self._successor is not None:
                self._look_at(self._successor, readable)
            if self._children.fileno() in readable:
                for pid, status in self._children.ended():
                    self._on_ended(pid, status)
            if self._control.fileno() not in readable:
                continue
            received = packets.receive(self._control)
            if received is None:
                return None
            self._asked = time.monotonic()
            message, fds = received
            try:
                pid = self._fork(fds[1])
                if pid == 0:
                    return _job(message, fds)
                self._report(message["id"], pid)
            except OSError as error:
                packets.send(
                    self._control, {"op": "failed", "id": message["id"], "error": str(error)}
                )
            linux.close_all(fds)

    @property
    def _grows(self) -> bool:
        return bool(self._stage.to_come) and self._successor is None

    @property
    def _rest_ms(self) -> int:
        """Milliseconds until a successor may start; an awaited stage first serves waiting kernels.

        A successor would compete for their processors, and end the stage during its self-test.
        """
        if not self._stage.awaited:
            return 0
        end = min(self._asked + REST_S, self._began + LONGEST_REST_S)
        return max(0, math.ceil(1000 * (end - time.monotonic())))

    def _wait(self) -> set[int]:
        """Return readable descriptors; none if a successor is late, or may start."""
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._children.fileno(), select.POLLIN)
        if self._successor is None:
            return {fd for fd, _ in poll.poll(self._rest_ms if self._grows else None)}
        poll.register(self._successor.link.fileno(), select.POLLIN)
        return {fd for fd, _ in poll.poll(self._successor.left_ms)}

    def _grow(self) -> socket.socket | None:
        """Fork a successor; return None, and in the successor its socket to this process."""
        try:
            begun = stages.NextZygote.begin()
        except OSError as error:
            while self._stage.to_come:
                self._stage.without("", f"nothing more can be imported: {error}")
            packets.send(self._control, self._stage.message())
            return None
        if isinstance(begun, stages.NextZygote):
            self._successor = begun
            return None
        self._children.forget()
        self._children.close()
        self._control.close()
        os.close(self._own_pids)
        return begun

    def _look_at(self, successor: stages.NextZygote, readable: set[int]) -> None:
        """Send a ready successor to the init; if it failed or is late, give up its module."""
        late = not successor.left_ms
        try:
            ready = successor.heard() if successor.link.fileno() in readable else None
        except (EOFError, ValueError, KeyError):
            ready, late = None, False
        else:
            if ready is None and not late:
                return
        self._successor = None
        if ready is not None:
            self._stage.over()
            fds = [successor.link.fileno()]
            packets.send(self._control, {**ready, "pid": successor.pid}, fds)
            successor.link.close()
            return
        successor.over(late=late)
        self._do_without(successor)

    def _do_without(self, successor: stages.NextZygote) -> None:
        self._stage.without(successor.taking, successor.why)
        if not self._stage.to_come:
            packets.send(self._control, self._stage.message())

    def _fork(self, pids: int) -> int:
        """Fork a child into the pid namespace `pids`; return its pid, 0 in the child."""
        linux.setns(pids, linux.CLONE_NEWPID)
        try:
            pid = os.fork()
        except BaseException:
            linux.setns(self._own_pids, linux.CLONE_NEWPID)
            raise
        if pid == 0:
            self._children.forget()
            return 0
        linux.setns(self._own_pids, linux.CLONE_NEWPID)
        return pid

    def _report(self, number: int, pid: int) -> None:
        self._kernels[pid] = number
        pidfd = os.pidfd_open(pid)
        try:
            packets.send(self._control, {"op": "forked", "id": number, "pid": pid}, [pidfd])
        finally:
            os.close(pidfd)

    def _on_ended(self, pid: int, status: int) -> None:
        if self._successor is not None and pid == self._successor.pid:
            successor, self._successor = self._successor, None
            successor.link.close()
            self._do_without(successor)
        number = self._kernels.pop(pid, 0)
        if number:
            packets.send(self._control, {"op": "exit", "id": number, "status": status})


def main(argv: Sequence[str]) -> int:
    """Serve until the init hangs up, then return 0; in a kernel, return its exit code."""
    control = socket.socket(fileno=int(argv[1]))
    linux.set_name("kernel-template")
    kernel = host.KernelHost()
    stage = stages.Stage(preload.begin(kernel), preload.ordered(argv[2:]), bare=True)
    control.set_inheritable(False)
    start = packets.receive(control)
    if start is None:
        return 0
    settings = sandbox.SandboxSettings((), (), (), base64.b64decode(start[0]["filter"]))
    if not stage.to_come:
        immortal.keep()
    while True:
        files = preload.plain_files()
        kernel.freeze(collect=not (stage.bare or stage.to_come))  # kernels wait for the others
        turn = Zygote(control, stage).run()
        if turn is None:
            return 0
        if isinstance(turn, Job):
            control.detach()
            inherited = Inheritance(settings, stage.loaded, preload.own_files(files))
            return _serve(kernel, turn, inherited)
        control = turn
        stage = stages.grow(kernel, control, stage)


def _job(message: dict[str, Any], fds: Sequence[int]) -> Job:
    """Return the job that the init requests."""
    init, _, done, ready, ring, output, *cgroup_fds = map(_moved, fds)
    entry = sandbox.SandboxEntry(message["uid"], init, done)
    return Job(entry, ready, ring, output, cgroup_fds, message["trial"])


def _moved(fd: int) -> int:
    """Return a duplicate of the descriptor above the numbers that a kernel reserves."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, RING_FD + 1)


def _arrange(job: Job) -> None:
    """Move the descriptors of a kernel to the numbers that it expects."""
    os.dup2(job.output, 1)
    os.dup2(job.output, 2)
    os.dup2(job.ready, READY_FD, inheritable=False)
    os.dup2(job.ring, RING_FD, inheritable=False)


def _try(trial: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Run the self-test where a kernel would run, send the results, and wait for SIGKILL."""
    facts = selftest.gather(trial, inherited=(0, 1, 2, *RESERVED_FDS, *files))
    host.send_packet(READY_FD, {"ready": True, "facts": facts})
    while True:
        signal.pause()


def _serve(kernel: host.KernelHost, job: Job, inherited: Inheritance) -> int:
    """Enter the sandbox, then serve as a cold start does; return the exit code."""
    linux.set_name("python")
    _arrange(job)
    try:
        linux.enter_groups(job.cgroup_fds)
        sandbox.join(job.sandbox, inherited.settings)
        linux.close_range_but(inherited.files, first=RING_FD + 1)
        if job.trial is not None:
            _try(job.trial, inherited.files)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = [""]
        boot = config.load(CONNECTION_FILE)
        confine.confine(boot)
        for folder in inherited.loaded.folders:
            os.mkdir(folder, 0o700)  # noqa: PTH102
        preload.set_size(inherited.loaded.pools.sized)
        fill = partial(preload.set_size, inherited.loaded.pools.filled)
        kernel.serve(boot, CONNECTION_FILE, at_work=fill)
    except Exception as error:  # noqa: BLE001  # any error is reported to the host
        import traceback

        traceback.print_exc(file=sys.__stderr__)
        host.send_packet(READY_FD, {"ready": False, "error": f"{type(error).__name__}: {error}"})
        return EXIT_CODE
    return 0
