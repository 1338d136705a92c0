"""The sandbox that a forked kernel shares with its checkpoints and the kernels forked from them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio

from kernel_mcp.barriers import ignore_missing
from kernel_mcp.errors import LaunchError
from kernel_mcp.launch import rundir
from kernel_mcp.launch.base import ConnectionInfo, hold_little, take_no_descriptors
from kernel_mcp.launch.checkpoint import Checkpoint
from kernel_mcp.launch.process import (
    END_WAIT_S,
    ConfinedProcess,
    Egress,
    KernelProcess,
    KernelSockets,
    OutputRingReader,
    SandboxProcesses,
    StartReport,
)
from kernel_mcp.launch.readiness import Inspection
from kernel_mcp.launch.template.forked import LOOK_S, Forked, ResumedProcess
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.linux.proc import (
    ExitStatus,
    is_zombie,
    namespace_of,
    pids_of_namespace,
    private_bytes,
    set_oom_score,
    tree,
)
from kernel_specs import linux
from kernel_specs.restricted.wire.zmtp import opening

logger = logging.getLogger(__name__)

FIRST_ROUNDS, ROUNDS = 3, 40
"""Rounds in which the processes of a dead kernel are killed.

The first rounds let the sandbox start processes, the others do not. If a fork bomb survives them,
the whole sandbox is killed.
"""
ROUND_S = 0.5
"""Maximum wait in seconds for killed processes, one of which may be writing to a slow disk."""
BUSY_LOOKS = 400
"""Maximum number of checks, `LOOK_S` apart, until no checkpoint or kernel is being made."""
MOST_OOM_SCORE = 1000
"""Highest value of proc_pid_oom_score_adj(5): Linux kills such a process first."""
_TYPES = (b"DEALER", b"DEALER", b"SUB")
"""ZeroMQ types of the server's sockets for a kernel's `ENDS`."""


class Inspect(Protocol):
    """Compares a process with the confinement that its sandbox is expected to have."""

    def __call__(self, pid: int, pidfd: int, *, kin: Iterable[int]) -> Inspection:
        """Inspect a process; `kin` are pidfds of kernels in the same sandbox.

        Raises BoundaryBroken, LaunchError.
        """


class ForkedSandboxGroup:
    """Owner of a sandbox and all its processes; closed when its last kernel is closed.

    `checkpoints` are the suspended ones. A kernel that is dead but not closed keeps the group open.
    """

    def __init__(
        self,
        forked: Forked,
        *,
        limits: KernelLimits,
        inspect: Inspect,
        connection: ConnectionInfo,
        egress: Egress,
        resources: AsyncExitStack,
    ) -> None:
        """`resources` are closed when all processes of the sandbox have ended."""
        self.init, self.tail, self._release = forked.init, forked.tail, forked.release
        self.checkpoints: list[Checkpoint] = []
        self._limits = limits
        self._inspect = inspect
        self._connection = connection
        self._egress = egress
        self._resources = resources
        self._kernels: dict[KernelProcess, AsyncExitStack] = {}
        self._pending: set[Checkpoint] = set()
        self._namespace = ""
        self._resuming = 0
        self._copies = itertools.count(2)
        self._clearing = anyio.Lock()
        self._closed = False
        forked.needed = lambda: self.needed(forked)
        self._ending: tuple[KernelProcess, float] | None = None
        limits.kill, limits.relieve = self._kill_kernels, self._kill_largest

    def needed(self, beside: SandboxProcesses) -> bool:
        """Return True if a kernel other than `beside` runs, or a checkpoint could fork one."""
        others = (each for each in self._kernels if each.process.start is not beside)
        return not self._closed and (
            any(each.exit is None for each in others)
            or any(each.usable for each in self.checkpoints)
        )

    def kill(self) -> None:
        """Send SIGKILL to the init, which ends all processes."""
        if self.init.pidfd >= 0:  # otherwise all processes are gone
            self.init.signal(signal.SIGKILL)
            self.init.continue_parent()

    async def leave(self, kernel: KernelProcess) -> None:
        """Close a kernel that is no longer used; with the last one, close the whole sandbox."""
        own = self._kernels.pop(kernel, None)
        if own is None:
            return
        with anyio.CancelScope(shield=True):
            if not self._kernels:
                self._closed = True
                for checkpoint in (*self.checkpoints, *self._pending):
                    checkpoint.close()
                self.checkpoints.clear()
                self.kill()
            elif kernel.exit is None:
                for pid in list(tree(kernel.pid)):
                    _close(self._end(pid))
            await own.aclose()
            if self._closed:
                with anyio.move_on_after(END_WAIT_S) as patience:
                    await self.init.gone.wait()
                if patience.cancelled_caught:
                    logger.error("process %d does not end although it was killed", self.init.pid)
                self.init.close()
                self.tail.close()
                self._release()
                await self._resources.aclose()
            else:
                self.tail.forget()  # the last output belongs to this kernel, not to the next one

    async def new_checkpoint(self, kernel: KernelProcess) -> Checkpoint:
        """See `SandboxGroup`."""
        await self._cleared()
        if kernel.sockets.control is None or kernel.exit is not None:
            raise LaunchError("the kernel takes no checkpoints")
        try:
            namespace, size = namespace_of(kernel.pid), private_bytes(kernel.pid)
            signal.pidfd_send_signal(kernel.process.pidfd, 0)  # raises if the pid was reused
        except OSError as reason:
            raise LaunchError(f"the kernel has just ended ({reason})") from reason
        self._namespace = self._namespace or namespace
        made = Checkpoint(self._hold, self._on_gone, self._unknown)
        made.size = size
        self._pending.add(made)
        try:
            made.send_park_socket(kernel.sockets.control)
        except BaseException:
            self.drop(made)
            raise
        return made

    def _unknown(self) -> Iterator[int]:
        """Return processes of the sandbox outside the trees of kernels and checkpoints."""
        known = {each.pid for each in self._kernels} | {each.pid for each in self.checkpoints}
        return tree(self.init.pid, known)

    def add(self, checkpoint: Checkpoint) -> None:
        """See `SandboxGroup`."""
        self._pending.discard(checkpoint)
        self.checkpoints.append(checkpoint)
        with contextlib.suppress(OSError):  # not permitted on every system
            set_oom_score(checkpoint.pid, checkpoint.pidfd, MOST_OOM_SCORE)
        self._share()

    def drop(self, checkpoint: Checkpoint) -> None:
        """See `SandboxGroup`."""
        checkpoint.users -= 1
        if checkpoint.users > 0 and checkpoint.usable:
            return
        self._pending.discard(checkpoint)
        if checkpoint in self.checkpoints:
            self.checkpoints.remove(checkpoint)
        checkpoint.close()
        self._share()

    async def clear(self) -> None:
        """See `SandboxGroup`."""
        async with self._clearing:
            for _ in range(BUSY_LOOKS):  # a process that is being made would be killed
                if not (self._resuming or self._pending):
                    break
                await anyio.sleep(LOOK_S)
            if await self._end_others(FIRST_ROUNDS):
                return
            with self._limits.no_more_processes():  # this also affects other branches
                if await self._end_others(ROUNDS):
                    return
        raise LaunchError("what the kernel had started does not end")

    async def _end_others(self, rounds: int) -> bool:
        """Kill all processes except kernels and checkpoints, in up to `rounds` rounds.

        Return False if others are still running then.
        """
        for _ in range(rounds):
            kept = {self.init.pid, *(each.pid for each in self.checkpoints if each.usable)}
            for kernel in self._kernels:
                if kernel.exit is None:
                    kept.update(tree(kernel.pid))
            left = [pid for pid in self._processes() if pid not in kept]
            if not left:
                return True
            ends = [fd for fd in map(self._end, left) if fd >= 0]
            with anyio.move_on_after(ROUND_S):
                for fd in ends:
                    await anyio.wait_readable(fd)
            for fd in ends:
                _close(fd)
        return False

    async def _cleared(self) -> None:
        """Wait for a running `clear`, which would kill a new process."""
        async with self._clearing:
            return

    async def resume(self, checkpoint: Checkpoint, folder: str = "") -> KernelProcess:
        """See `SandboxGroup`."""
        await self._cleared()
        self._resuming += 1
        try:
            return await self._resume(checkpoint, folder)
        finally:
            self._resuming -= 1

    async def _resume(self, checkpoint: Checkpoint, folder: str) -> KernelProcess:
        async with AsyncExitStack() as own:
            ring = OutputRingReader()
            own.callback(ring.close)
            with ExitStack() as sent:
                channels, theirs = connected(own)
                sent.callback(linux.close_all, theirs)
                control_socket, guest = _pair(own, socket.SOCK_SEQPACKET)
                theirs.append(guest.detach())
                theirs.append(ring.guest_fd())
                connection = self._connection
                if connection.tools:  # a socket of its own: the copy has lost the first one
                    connection = replace(
                        connection, tools=f"{connection.tools}-{next(self._copies)}"
                    )
                    theirs.append(rundir.listening_at(connection.tools))
                    own.callback(Path(connection.tools).unlink, missing_ok=True)
                resumed = await checkpoint.resume(theirs, folder)
            try:
                process = ConfinedProcess(
                    ResumedProcess(resumed, checkpoint, self), self._limits.explain
                )
            except BaseException:
                signal.pidfd_send_signal(resumed.pidfd, signal.SIGKILL)
                os.close(resumed.pidfd)
                raise
            own.push_async_callback(process.aclose)
            control_socket.shutdown(socket.SHUT_RD)
            hold_little(control_socket)
            with contextlib.suppress(OSError):
                set_oom_score(resumed.pid, resumed.pidfd, 0)
                if folder:  # branches need it: they are killed first
                    set_oom_score(checkpoint.pid, checkpoint.pidfd, 0)
            kin = [each.process.pidfd for each in self._kernels]
            inspected = self._inspect(resumed.pid, resumed.pidfd, kin=kin)
            own.callback(inspected.forget)
            self.tail.forget()
            connection = replace(connection, key=resumed.key)
            boundary = ("forked from a checkpoint of its session", *inspected.words)
            kernel = KernelProcess(
                sockets=KernelSockets(connection, channels, control_socket),
                report=StartReport(boundary, closed=resumed.closed),
                process=process,
                limits=self._limits,
                ring=ring,
                egress=self._egress,
                resources=AsyncExitStack(),
                sandbox_group=self,
            )
            self.join(kernel, own.pop_all())
            return kernel

    def join(self, kernel: KernelProcess, own: AsyncExitStack) -> None:
        """Add a kernel; `own` is closed when it leaves."""
        self._kernels[kernel] = own
        kernel.on_close(partial(self.leave, kernel))

    def _kill_kernels(self) -> None:
        """Send SIGKILL to all kernels, as a limit is exceeded."""
        for kernel in self._kernels:
            kernel.kill()

    def _kill_largest(self) -> None:
        """Send SIGKILL to the kernel that uses most memory, as Linux does in a control group.

        Do nothing while the last killed kernel is ending, as its memory still counts.
        """
        living = [kernel for kernel in self._kernels if kernel.exit is None]
        now = asyncio.get_running_loop().time()
        if self._ending is not None:
            last, since = self._ending
            if now - since < END_WAIT_S:
                if last not in living:
                    self._ending = None
                return
        if living:
            largest = max(living, key=lambda kernel: sum(map(_held_now, tree(kernel.pid))))
            self._ending = largest, now
            # bind the cause now: another kernel's cell may change it before this end is seen
            largest.process.explain = partial(_because, self._limits.cause)
            largest.kill()

    def _on_gone(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint that has ended without being closed."""
        if checkpoint.died:  # usually killed by Linux for lack of memory
            self._limits.excuse()
        self.drop(checkpoint)

    def _share(self) -> None:
        """Raise the memory limit by the size of the largest suspended checkpoint."""
        waiting = [each for each in self.checkpoints if each.usable]
        self._limits.make_room(
            max((each.size for each in waiting), default=0),
            {each.pid: each.size for each in waiting},
        )

    def _hold(self, pid: int) -> int:
        """Return a pidfd of a process of this sandbox that is no kernel, checkpoint or init.

        Raises LaunchError for any other process, OSError.
        """
        known = {self.init.pid, *(each.pid for each in (*self.checkpoints, *self._pending))}
        known.update(kernel.pid for kernel in self._kernels)
        if pid <= 0 or pid in known:
            raise LaunchError("it is another process")
        pidfd = os.pidfd_open(pid)
        try:
            if namespace_of(pid) != self._namespace:
                raise LaunchError("it is not of this sandbox")
            signal.pidfd_send_signal(pidfd, 0)  # raises if the pid was reused meanwhile
        except BaseException:
            os.close(pidfd)
            raise
        return pidfd

    def _end(self, pid: int) -> int:
        """Send SIGKILL to a process of this sandbox; return a pidfd of it, -1 if it has ended."""
        try:
            pidfd = self._hold_any(pid)
        except (OSError, LaunchError):
            return -1
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return pidfd

    def _hold_any(self, pid: int) -> int:
        pidfd = os.pidfd_open(pid)
        if pids_of_namespace(self._namespace, [pid]):
            return pidfd
        os.close(pidfd)
        raise LaunchError("it is not of this sandbox")

    def _processes(self) -> Sequence[int]:
        """Return process ids of this sandbox, zombies excluded."""
        group = self._limits.group
        among = None if group is None else group.processes()
        return [pid for pid in pids_of_namespace(self._namespace, among) if not is_zombie(pid)]


def connected(own: AsyncExitStack) -> tuple[list[socket.socket], list[int]]:
    """Return socket pairs for a kernel's `ENDS`: the server's ends, and the kernel's.

    The ZMTP greeting is already sent. `own` closes the server's ends, the caller the others. Raises
    OSError.
    """
    ours: list[socket.socket] = []
    with ExitStack() as undo:
        theirs: list[int] = []
        undo.callback(linux.close_all, theirs)
        for kind in _TYPES:
            host, guest = _pair(own)
            theirs.append(guest.detach())
            host.send(opening(kind))
            ours.append(host)
        undo.pop_all()
    return ours, theirs


def _pair(
    own: AsyncExitStack, kind: int = socket.SOCK_STREAM
) -> tuple[socket.socket, socket.socket]:
    """Return a socket pair: a non-blocking host end, which `own` closes, and the guest's end."""
    host, guest = socket.socketpair(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    own.callback(host.close)
    take_no_descriptors(host)
    host.setblocking(False)
    return host, guest


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _because(cause: str, status: ExitStatus) -> ExitStatus:
    """Return the exit status, with the cause added if the kernel was killed by SIGKILL."""
    return replace(status, cause=cause) if status.signal == signal.SIGKILL else status


def _held_now(pid: int) -> int:
    """Return the bytes of private resident memory of a process, 0 if it has ended."""
    with ignore_missing:
        return private_bytes(pid)
    return 0
