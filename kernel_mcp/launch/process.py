"""Kernel processes in their sandboxes, started cold or forked: signalled and killed as a whole.

KernelProcess          a running kernel: its process, channels, limits; a Launcher returns it
  ConfinedProcess      the process of a kernel or another command, cold and forked alike
  OutputRingReader     shared memory with the last output of a kernel
  SandboxGroup         the sandbox of a kernel, with its checkpoints, which outlives the kernel
SandboxProcesses       the processes of one sandbox: starts, kills and reports the end of all
  Spawned              a child of the server, usually bubblewrap (spawn.py)
  Forked               forked by a template, which reports its end (template/forked.py)
  ResumedProcess       forked by a checkpoint (template/sandbox_group.py)
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
from kernel_mcp.records import dataclass

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
        """Return a duplicate descriptor to pass to the kernel; the caller closes it."""
        return os.dup(self._fd)

    def unreceived(self, characters: int) -> str:
        """Return text after the first `characters`, up to the ring's size; it may be forged."""
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
"""Seconds to wait for the exit status of a kernel that failed before it was ready."""
END_WAIT_S = 10.0
"""Seconds to wait for the exit of killed processes."""

OnEnd = Callable[[int | None], None]
"""Callback for an exit code as in `subprocess`, None if it is unknown."""


class SandboxProcesses(Protocol):
    """The processes of one sandbox. Signals have no effect once they have ended."""

    wrapped: bool
    """True if a wrapper process reports the kernel's death by signal n as exit code 128 + n."""
    tail: StderrTail
    """The last output of the processes (stdout and stderr); closed by `close`."""

    @property
    def kernel(self) -> WatchedProcess | None:
        """The process to interrupt, once it is known."""

    @property
    def pids(self) -> list[int]:
        """Known process ids: the process that was started first, the kernel last."""

    def begin(self, on_end: OnEnd) -> None:
        """Call `on_end` when the kernel ends; immediately if it has ended."""

    def adopt(self, pid: int) -> None:
        """Register `pid` as the kernel. Raises LaunchError if it is not of this sandbox."""

    def kill(self) -> None:
        """Send SIGKILL to all of them; continue the process that reports their end.

        In a sandbox that other kernels need, only the kernel is killed.
        """

    async def settled(self) -> None:
        """Wait until the processes to kill are known, some ms after the start."""

    async def gone(self) -> None:
        """Wait until all of them are gone."""

    def close(self) -> None:
        """Close every descriptor."""


class ConfinedProcess:
    """A kernel, or another command, in its sandbox; `explain` adds the cause to its exit status.

    Must be made and used on the event loop's thread: the kernel is killed when that thread ends.
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
        """The last 16 KiB of its stdout and stderr."""
        return self.start.tail.text()

    @property
    def pids(self) -> list[int]:
        """Known process ids: the process that was started first, the kernel last."""
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
        """Return True if a signal such as SIGSTOP has stopped the kernel."""
        kernel = self.start.kernel
        return self.exit is None and kernel is not None and kernel.stopped

    async def ready(self, channel: ReadinessChannel, timeout_s: float) -> None:
        """Wait for the readiness message and adopt its sender.

        Raises LaunchError with the last output.
        """
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
        """Send SIGINT to the kernel's process group, after SIGCONT."""
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
        """Send SIGKILL to every process of the sandbox."""
        if not self._closed:
            self.start.kill()

    async def wait(self) -> ExitStatus:
        """Wait for its end and return the exit status."""
        await self.ended.wait()
        assert self.exit is not None
        return self.exit

    async def aclose(self) -> None:
        """Kill all processes, wait up to `END_WAIT_S` for their end, and close every descriptor."""
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
    """Return the exit status of a kernel by its exit code.

    If the kernel was `wrapped` by bubblewrap, 128 + n means signal n.
    """
    detail = fatal_line(output) if code else ""
    if code < 0:
        return ExitStatus(signal=-code, detail=detail)
    if wrapped and 128 < code <= 128 + signal.NSIG:
        return ExitStatus(signal=code - 128, detail=detail)
    return ExitStatus(code=code, detail=detail)


def fatal_line(output: str) -> str:
    """Return the first line of the output that names a crash, 200 characters at most, or ""."""
    marks = (
        *("Fatal Python error", "terminate called", "free(): ", "malloc(): ", "double free"),
        *("# Fatal process", "FATAL ERROR: ", "memory allocation of "),  # V8, Node.js, Rust
    )
    lines = output.splitlines()
    return next((line[:200] for line in lines if line.startswith(marks)), "")


class Egress(Protocol):
    """The network access of a kernel."""

    def open(self, wanted: tuple[str, ...] | None, on_record: OnRecord) -> None:
        """Grant a session network access to the hosts `wanted`; None means all that are permitted.

        `on_record` is called with a record of each connection. A second call does nothing.
        """


class SandboxGroup(Protocol):
    """The sandbox that a template has made for a kernel, its checkpoints and their kernels."""

    checkpoints: list[Checkpoint]
    """The suspended copies, oldest first."""

    async def new_checkpoint(self, kernel: KernelProcess) -> Checkpoint:
        """Send a kernel the park socket for a copy of it; return the new checkpoint.

        Raises LaunchError.
        """

    def drop(self, checkpoint: Checkpoint) -> None:
        """Remove one user of a checkpoint; end the checkpoint with its last user."""

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, which is suspended now, to `checkpoints`."""

    async def clear(self) -> None:
        """Kill all processes except checkpoints and the process trees of living kernels.

        Raises LaunchError if some do not end.
        """

    async def resume(self, checkpoint: Checkpoint, folder: str = "") -> KernelProcess:
        """Return a kernel forked from a checkpoint; with a `folder`, as a branch in that folder.

        Raises LaunchError, BoundaryBroken, OSError.
        """


@dataclass(frozen=True, slots=True)
class KernelSockets:
    """Sockets between a kernel and the server.

    connection  where its channels listen, in host paths
    channels    server's ends of shell, control and iopub; empty if the kernel listens
    control     carries requests for checkpoints to the kernel; None if it supports none
    """

    connection: ConnectionInfo
    channels: Sequence[socket.socket] = ()
    control: socket.socket | None = None


@dataclass(slots=True)
class StartReport:
    """How a kernel was started, and what was found then.

    boundary  readable lines: how it was started, and the result of its inspection
    kind      cold, forked, or pooled if it waited in the pool first
    closed    its own report of files that only its checkpoint has open: hostile data
    unforked  why it was not forked as others of the server are; empty if none is, or it was
    """

    boundary: tuple[str, ...]
    kind: str = "cold"
    closed: object = None
    unforked: str = ""


class KernelProcess:
    """One running kernel in its sandbox, as sessions see it, however it was started.

    sandbox_group  its sandbox; None if there can be no checkpoints of it
    limits         its resource limits
    egress         its network access
    resources      closed by `aclose`, which undoes the start
    """

    def __init__(
        self,
        *,
        sockets: KernelSockets,
        report: StartReport,
        process: ConfinedProcess,
        limits: KernelLimits,
        ring: OutputRingReader,
        egress: Egress,
        resources: AsyncExitStack,
        sandbox_group: SandboxGroup | None = None,
    ) -> None:
        self.sockets = sockets
        self.report = report
        self.sandbox_group = sandbox_group
        self.process = process
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
        """Exit status; None while it runs."""
        return self.process.exit

    @property
    def stopped(self) -> bool:
        """Return True if a signal has stopped it: it does not run until SIGCONT."""
        return self.process.stopped

    def usage(self) -> Usage:
        """Return its resource usage, children included; zeros after its end."""
        return self.limits.usage() if self.exit is None else Usage()

    def unreceived(self, characters: int) -> str:
        """Return output after the first `characters`, including output that was not sent yet.

        At most the ring's size (64 KiB) is returned. The kernel may forge it.
        """
        return self._ring.unreceived(characters)

    def interrupt(self) -> None:
        """Send SIGINT to the kernel's process group; does nothing after its end."""
        self.process.interrupt()

    def signal(self, number: int) -> None:
        """Send any other signal to the kernel alone; does nothing after its end."""
        self.process.signal(number)

    def kill(self) -> None:
        """Send SIGKILL to every process of the sandbox; does nothing after its end."""
        self.process.kill()

    async def wait(self) -> ExitStatus:
        """Wait for its end, which a pidfd reports at once, and return the exit status."""
        return await self.process.wait()

    def on_close(self, work: Callable[[], Awaitable[None]]) -> None:
        """Register `work`, which `aclose` awaits first; the last registered is awaited first."""
        self._resources.push_async_callback(work)

    async def aclose(self) -> None:
        """Kill and reap remaining processes, remove the socket directory, release the user id.

        A sandbox that other kernels use is kept.
        """
        await self._resources.aclose()


class Launcher(Protocol):
    """Starts kernels; a cold start and a fork look the same to sessions."""

    async def launch(self, request: LaunchRequest) -> KernelProcess:
        """Return a kernel whose sockets listen. Raises LaunchError with the tail of its stderr."""

    async def aclose(self) -> None:
        """Release everything that outlives single kernels."""
