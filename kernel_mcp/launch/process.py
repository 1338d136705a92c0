"""Kernel processes in their sandboxes, started cold or forked: signalled and killed as a whole.

KernelProcess      a running kernel: its process, channels, limits; what a Launcher starts
ConfinedProcess    the process of a kernel or another command, cold and forked alike
OutputRingReader         shared memory with the last output of a kernel
SandboxGroup          the sandbox of a kernel, with its checkpoints, which outlives the kernel
Start              how it was started, how all of it is killed and how its end becomes known
Spawned            a child of the server, as a rule bubblewrap (spawn.py)
Forked             forked by a template, which reports its end (template/forked.py)
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.base import ConnectionInfo, LaunchRequest, OnRecord
from kernel_mcp.launch.checkpoint import Checkpoint
from kernel_mcp.launch.readiness import ReadinessChannel, StderrTail
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.linux.proc import ExitStatus, Usage, WatchedProcess

HEADER_BYTES = 64
RING_BYTES = 64 * 1024 - HEADER_BYTES
"""Bytes of output in the ring: as many as the kernel collects before it sends a message."""
_COUNTERS = struct.Struct("<QQ")
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class OutputRingReader:
    """A memfd of 64 KiB that the kernel writes and the server reads; its size is sealed."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("output-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, HEADER_BYTES + RING_BYTES)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(self._fd)
            raise

    def guest_fd(self) -> int:
        """Return another descriptor of the memory, to be passed to the kernel and closed here."""
        return os.dup(self._fd)

    def unreceived(self, characters: int) -> str:
        """Return text after the first `characters`, up to the ring's size; kernels may forge it."""
        if self._fd < 0:
            return ""
        written, size = _COUNTERS.unpack(os.pread(self._fd, _COUNTERS.size, 0))
        missing = written - characters
        if missing <= 0:
            return ""
        ring = os.pread(self._fd, RING_BYTES, HEADER_BYTES)
        end = size % RING_BYTES
        data = ring[:end] if size < RING_BYTES else ring[end:] + ring[:end]
        text = data.decode("utf-8", "replace")
        return text[-missing:] if missing < len(text) else text

    def close(self) -> None:
        """Close the memfd."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


logger = logging.getLogger(__name__)

EXIT_WAIT_S = 2.0
"""Seconds that a kernel which failed to get ready may take to end, for its exit status."""
END_WAIT_S = 10.0
"""Seconds that killed processes may take to end."""

OnEnd = Callable[[int | None], None]
"""Callback for an exit code as `subprocess` gives it, None if it is unknown."""


class SandboxProcesses(Protocol):
    """The processes of one sandbox. No signal does anything once they have ended."""

    wrapped: bool
    """True if a process in front of the kernel reports death by signal n as exit code 128 + n."""
    tail: StderrTail
    """The last of their standard output and error; closed by `close`."""

    @property
    def kernel(self) -> WatchedProcess | None:
        """The process to interrupt, once it is known."""

    @property
    def pids(self) -> list[int]:
        """Process ids that are known: the process that was started first, the kernel last."""

    def begin(self, on_end: OnEnd) -> None:
        """Call `on_end` when the kernel ends; at once if it has ended."""

    def adopt(self, pid: int) -> None:
        """Take `pid` as the kernel. Raises LaunchError when it is not of this sandbox."""

    def kill(self) -> None:
        """Send SIGKILL to all of them; continue the process that reports their end.

        In a sandbox that is still needed the kernel alone is killed.
        """

    async def settled(self) -> None:
        """Return when it is known which processes to kill, some ms after the start."""

    async def gone(self) -> None:
        """Return when all of them are gone."""

    def close(self) -> None:
        """Close every descriptor."""


class ConfinedProcess:
    """A kernel, or another command, in its sandbox; `explain` adds the cause to its end.

    Made and used on the event loop's thread: the kernel dies with it, and the loop sees its end.
    """

    def __init__(
        self,
        start: SandboxProcesses,
        explain: Callable[[ExitStatus], ExitStatus] = lambda status: status,
    ) -> None:
        self.start = start
        self.explain = explain
        self.exit: ExitStatus | None = None
        self.ended = anyio.Event()
        """Set once `exit` is known."""
        self._closed = False
        start.begin(self._on_end)

    @property
    def output(self) -> str:
        """The last 16 KiB of its standard output and error."""
        return self.start.tail.text()

    @property
    def pids(self) -> list[int]:
        """Process ids that are known: the process that was started first, the kernel last."""
        return self.start.pids

    @property
    def pid(self) -> int:
        """Process id of the kernel itself from `adopt` on, -1 before."""
        kernel = self.start.kernel
        return kernel.pid if kernel is not None else -1

    @property
    def pidfd(self) -> int:
        """The pidfd of the kernel itself from `adopt` on, -1 before."""
        kernel = self.start.kernel
        return kernel.pidfd if kernel is not None else -1

    @property
    def stopped(self) -> bool:
        """Return True if a signal has stopped the kernel (SIGSTOP and its like)."""
        kernel = self.start.kernel
        return self.exit is None and kernel is not None and kernel.stopped

    async def ready(self, channel: ReadinessChannel, timeout_s: float) -> None:
        """Wait for readiness and adopt its sender. Raises LaunchError with the last output."""
        try:
            with anyio.fail_after(timeout_s):
                pid = await channel.wait()
            self.start.adopt(pid)
            return
        except TimeoutError:
            reason = (
                f"the kernel was not ready after {timeout_s:g} s; the machine may be "
                "overloaded: try again, or raise the start timeout"
            )
        except LaunchError as failure:
            with anyio.move_on_after(EXIT_WAIT_S):
                await self.wait()
            reason = str(failure)
        if self.exit is not None:
            reason = f"{reason} ({self.exit.describe()})"
        output = self.output.strip()
        raise LaunchError(f"{reason}. It wrote:\n{output}" if output else f"{reason}.")

    def interrupt(self) -> None:
        """Send SIGINT to the kernel's process group, which is continued where it is stopped."""
        kernel = self.start.kernel
        if kernel is not None and self.exit is None:
            kernel.signal_group(signal.SIGCONT)  # a stopped process would not react
            kernel.signal_group(signal.SIGINT)

    def signal(self, number: int) -> None:
        """Send any signal to the kernel itself."""
        kernel = self.start.kernel
        if kernel is not None and self.exit is None:
            kernel.signal(number)

    def kill(self) -> None:
        """SIGKILL to every process of the sandbox."""
        if not self._closed:
            self.start.kill()

    async def wait(self) -> ExitStatus:
        """Return how it ended as soon as it has."""
        await self.ended.wait()
        assert self.exit is not None
        return self.exit

    async def aclose(self) -> None:
        """Kill all of it, wait up to `END_WAIT_S` until it is gone, close every descriptor."""
        if self._closed:
            return
        with anyio.CancelScope(shield=True):
            await self.start.settled()
            self.kill()
            with anyio.move_on_after(END_WAIT_S) as patience:
                await self.ended.wait()
                await self.start.gone()
            if patience.cancelled_caught:
                logger.error("process %d does not end although it was killed", self.pids[0])
        if not self._closed:
            self._closed = True
            self.start.close()

    def _on_end(self, code: int | None) -> None:
        if self.exit is not None:
            return
        with Barrier("killing what a kernel has left behind"):
            self.start.kill()
        with Barrier("reading the last output of a kernel"):
            self.start.tail.drain()
        if code is None:
            ended = ExitStatus(signal=signal.SIGKILL, detail="its template did not tell how")
        else:
            ended = exit_status(code, wrapped=self.start.wrapped, output=self.output)
        self.exit = ended
        with Barrier("finding out why a kernel has ended"):
            self.exit = self.explain(ended)
        self.ended.set()


def exit_status(code: int, *, wrapped: bool, output: str) -> ExitStatus:
    """Return how the kernel ended, by its exit code.

    `wrapped` by bubblewrap, 128 + n means signal n.
    """
    detail = fatal_line(output) if code else ""
    if code < 0:
        return ExitStatus(signal=-code, detail=detail)
    if wrapped and 128 < code <= 128 + signal.NSIG:
        return ExitStatus(signal=code - 128, detail=detail)
    return ExitStatus(code=code, detail=detail)


def fatal_line(output: str) -> str:
    """Return the first line of the output that names a crash, 200 characters at most, or ""."""
    marks = ("Fatal Python error", "terminate called", "free(): ", "malloc(): ", "double free")
    lines = output.splitlines()
    return next((line[:200] for line in lines if line.startswith(marks)), "")


class Egress(Protocol):
    """The network access of a kernel."""

    def open(self, wanted: tuple[str, ...] | None, on_record: OnRecord) -> None:
        """Grant a session network access to the hosts `wanted`; None means all that are permitted.

        `on_record` is called with a record of each connection. Does nothing the second time.
        """


class SandboxGroup(Protocol):
    """The sandbox that a template has made for a kernel, and for those of its checkpoints."""

    checkpoints: list[Checkpoint]
    """The copies that wait, oldest first."""

    async def new_checkpoint(self, kernel: KernelProcess) -> Checkpoint:
        """Send a kernel the park socket for a copy of it; return the new checkpoint.

        Raises LaunchError.
        """

    def drop(self, checkpoint: Checkpoint) -> None:
        """Remove one user of a checkpoint; end it with the last one."""

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint that now waits to `checkpoints`."""

    async def clear(self) -> None:
        """Kill all processes that no living kernel has started, except checkpoints.

        Raises LaunchError if some do not end.
        """

    async def resume(self, checkpoint: Checkpoint, folder: str = "") -> KernelProcess:
        """Return a kernel that goes on from a checkpoint; with a `folder`, as a branch in that.

        Raises LaunchError, BoundaryBroken, OSError.
        """


class KernelProcess:
    """One running kernel in its sandbox, however it was started: what sessions see of it.

    connection  where its channels listen, in host paths
    channels    its ends of shell, control and iopub, where it does not listen
    control_socket  socket that carries requests for checkpoints to it; None if it supports none
    sandbox_group  its sandbox; None if there can be no checkpoints of it
    closed      files that its checkpoint had open and it has not, as it says: hostile data
    kind        how it was started: cold, forked, or pooled if it waited in the pool first
    boundary    how it was started and what the check of its sandbox has found, for people
    limits      its resource limits
    egress      its network access
    resources   closed by `aclose`, which undoes the start
    """

    def __init__(
        self,
        *,
        connection: ConnectionInfo,
        boundary: tuple[str, ...],
        process: ConfinedProcess,
        limits: KernelLimits,
        ring: OutputRingReader,
        egress: Egress,
        resources: AsyncExitStack,
        channels: Sequence[socket.socket] = (),
        control_socket: socket.socket | None = None,
        sandbox_group: SandboxGroup | None = None,
        closed: object = None,
        kind: str = "cold",
    ) -> None:
        self.kind = kind
        self.channels = channels
        self.closed = closed
        self.control_socket = control_socket
        self.sandbox_group = sandbox_group
        self.process = process
        self.connection = connection
        self.boundary = boundary
        self.limits = limits
        self.egress = egress
        self._ring = ring
        self._resources = resources

    @property
    def pid(self) -> int:
        """Process id of the kernel itself, as the host sees it."""
        return self.process.pid

    @property
    def exit(self) -> ExitStatus | None:
        """Exit status, None while it lives."""
        return self.process.exit

    @property
    def stopped(self) -> bool:
        """Return True if a signal has stopped it: it does nothing until SIGCONT."""
        return self.process.stopped

    def usage(self) -> Usage:
        """Return its resource usage, children included; zeros once it has ended."""
        return self.limits.usage() if self.exit is None else Usage()

    def unreceived(self, characters: int) -> str:
        """Return output after the first `characters`, also what it has not sent yet.

        At most the ring's size (64 KiB) of it; the kernel may forge it.
        """
        return self._ring.unreceived(characters)

    def interrupt(self) -> None:
        """Send SIGINT to the kernel's process group; does nothing once it has ended."""
        self.process.interrupt()

    def signal(self, number: int) -> None:
        """Send any other signal to the kernel alone; does nothing once it has ended."""
        self.process.signal(number)

    def kill(self) -> None:
        """End every process of the sandbox with SIGKILL; does nothing once it has ended."""
        self.process.kill()

    async def wait(self) -> ExitStatus:
        """Return how it ended, at once after its death (pidfd)."""
        return await self.process.wait()

    def on_close(self, work: Callable[[], Awaitable[None]]) -> None:
        """Register `work`, which `aclose` awaits first; the last registered comes first."""
        self._resources.push_async_callback(work)

    async def aclose(self) -> None:
        """Kill what still runs, reap it, remove the socket directory, give the user id back.

        A sandbox that other kernels use stays.
        """
        await self._resources.aclose()


class Launcher(Protocol):
    """Starts kernels; sessions see no difference between a cold start and a fork."""

    async def launch(self, request: LaunchRequest) -> KernelProcess:
        """Return a kernel whose sockets listen. Raises LaunchError with the tail of its stderr."""

    async def aclose(self) -> None:
        """Release what outlives single kernels."""
