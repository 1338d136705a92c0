"""The process handle of an external kernel, which has neither process, limits nor network here.

The kernel is never signalled or ended from here; only the connection to it ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack

from kernel_mcp.config.settings import Limits
from kernel_mcp.launch.base import ConnectionInfo
from kernel_mcp.launch.network import Network, NetworkAccess
from kernel_mcp.launch.process import (
    ConfinedProcess,
    KernelProcess,
    KernelSockets,
    OnEnd,
    OutputRingReader,
    StartReport,
)
from kernel_mcp.launch.readiness import StderrTail
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.linux.proc import ExitStatus, WatchedProcess

KIND = "attached"
OUTSIDE = "the kernel is not this server's: nothing of a sandbox or of limits is around it"


class Connected:
    """A `Start` without a process: `kill` ends the connection, and `why` is the reason."""

    wrapped = False
    kernel: WatchedProcess | None = None

    def __init__(self) -> None:
        self.why = ""
        self._on_end: OnEnd | None = None
        silent, end = os.pipe()
        os.close(end)
        self.tail = StderrTail(silent, asyncio.get_running_loop())

    @property
    def pids(self) -> list[int]:
        """A list with -1 only: the process id is not known here."""
        return [-1]

    def begin(self, on_end: OnEnd) -> None:
        """See `Start`."""
        self._on_end = on_end

    def adopt(self, pid: int) -> None:
        """Do nothing: there is no process to adopt."""

    def end(self, why: str) -> None:
        """Treat the kernel as gone, for the first reason given."""
        self.why = self.why or why
        self.kill()

    def kill(self) -> None:
        """Report the end of the connection, once; the kernel goes on running."""
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(0)

    def explain(self, _status: ExitStatus) -> ExitStatus:
        """Return the reason why the connection ended, as an exit status in words."""
        return ExitStatus(words=self.why or "is no longer joined by this session")

    async def settled(self) -> None:
        """Return at once: there is nothing to wait for."""

    async def gone(self) -> None:
        """Return at once: there is nothing to wait for."""

    def close(self) -> None:
        """See `Start`."""
        self.tail.close()


def attached_process(
    place: object,
    connection: ConnectionInfo,
    start: Connected,
    ends: Sequence[socket.socket] = (),
) -> KernelProcess:
    """Return the handle of a kernel at `place`; `ends` are sockets of shell, control and iopub."""
    resources = AsyncExitStack()
    ring = OutputRingReader()
    resources.callback(ring.close)
    process = ConfinedProcess(start, start.explain)
    resources.push_async_callback(process.aclose)
    limits = KernelLimits(
        Limits(memory_bytes=0, pids=0, cpus=0, disk_bytes=0),
        membership=None,
        quotas=(),
        wake=lambda _: None,
        forget=lambda _: None,
    )
    return KernelProcess(
        sockets=KernelSockets(connection, ends),
        report=StartReport((f"{OUTSIDE}: {place}",), kind=KIND),
        process=process,
        limits=limits,
        ring=ring,
        egress=NetworkAccess(Network()),
        resources=resources,
    )
