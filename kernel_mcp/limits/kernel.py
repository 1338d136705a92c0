"""The limits of one kernel: its CPU weight, processes and quotas, and why it was stopped."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from kernel_mcp.barriers import Barrier, Faults, run_in_thread
from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.limits.activity import Activity
from kernel_mcp.limits.group import BEHIND, EQUAL, SHELL, KernelGroup
from kernel_mcp.limits.groups import Membership
from kernel_mcp.limits.meter import Gauge, Unmeasurable, plainly
from kernel_mcp.limits.quota import FolderQuota
from kernel_mcp.linux.proc import ExitStatus, Usage, family, has_own_pids
from kernel_mcp.sandbox.base import SandboxCommand
from kernel_mcp.units import MIB, format_bytes

_STARVED = re.compile(r"out of memory|memory allocation of")
_MORE = "memory may be short: the limit is {}, and create_session's `memory` or --memory sets it"
LONG_S = 0.25
"""Seconds of computation after which a kernel's CPU weight is lowered."""


NEAR = 0.1
"""Relative difference of weights below which a new weight is not set."""


class CpuPriority:
    """One kernel's CPU weight among those of the server."""

    def __init__(
        self, group: KernelGroup | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._group = group
        self._clock = clock
        self._behind = False
        self._set = EQUAL
        self._cpus: float | None = None
        self._began = 0.0
        self._used: float | None = None

    @property
    def own(self) -> float:
        """Its CPU weight among kernels of the same principal."""
        return BEHIND if self._behind else EQUAL

    def weigh(self, weight: float, cpus: float) -> None:
        """Set its CPU weight among all kernels, and its maximum number of busy processors."""
        if self._group is None:
            return
        with contextlib.suppress(OSError):
            if abs(weight - self._set) > NEAR * self._set:
                self._group.weigh(weight)
                self._set = weight
        with contextlib.suppress(OSError):
            if cpus != self._cpus:
                self._group.limit_cpus(cpus)
                self._cpus = cpus

    def begin(self) -> None:
        """Restore the full weight: a cell begins."""
        if self._behind and self._group is not None:
            with contextlib.suppress(OSError):
                self._group.weigh(EQUAL)
                self._behind, self._set = False, EQUAL
        self._began = self._clock()
        self._used = None

    def rank(self) -> None:
        """Lower the weight if the kernel has computed since the last call, some `LONG_S` ago."""
        if self._group is None or self._behind:
            return
        with contextlib.suppress(OSError):
            if self._computes(self._group):
                self._group.weigh(BEHIND)
                self._behind, self._set = True, BEHIND

    def _computes(self, group: KernelGroup) -> bool:
        """Return True if it used more than half of `LONG_S` of CPU time since the last call.

        False at the first call. Without a controller: True `LONG_S` after the cell began.
        """
        used, before = group.cpu_s(), self._used
        if used is None:
            return self._clock() - self._began > LONG_S
        self._used = used
        return before is not None and used - before > LONG_S / 2


RESTING_CPU_S = 0.01
"""CPU seconds since the last check below which a kernel counts as idle."""
GROWTH = 16 * MIB
"""Bytes by which a checkpoint may grow beyond its size when it was made."""
MOST_PROCESSES = 10_000
"""Maximum number of processes of a kernel that are measured one by one."""


class KernelLimits:
    """The limits of one kernel, used by its launcher, its cells and the watchdog.

    The launcher awaits `ready`, runs `command`, and calls `admit` for each process. It awaits
    `settled` before user code runs, and sets `kill`. At the end it calls `explain` and `aclose`.
    Cells call `begin` and `end`.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        membership: Membership | None,
        quotas: Sequence[FolderQuota],
        wake: Callable[[KernelLimits], None],
        forget: Callable[[KernelLimits], None],
        session: str = "",
        scanning: anyio.CapacityLimiter | None = None,
    ) -> None:
        """`wake` registers the kernel with the watchdog, `forget` removes it; logs name `session`.

        `scanning` bounds the number of kernels whose folders are scanned concurrently.
        """
        self._scanning = scanning
        self.limits = limits
        self.group = membership.group if membership is not None else None
        self.quotas = quotas
        self.kill: Callable[[], None] = _nothing
        self.relieve: Callable[[], None] = lambda: self.kill()
        """Kills the kernel that uses most memory, if several kernels share these limits."""
        self.awake = False
        self._looking = False
        self._wake = wake
        self._priority = CpuPriority(self.group)
        self._membership = membership
        self._forget = forget
        self._roots: list[int] = []
        self._contained = False
        """A root has a pid namespace of its own. It keeps that, and so no later look reads it."""
        self._apart: dict[int, int] = {}
        self._faults = Faults(session)
        self._activity = Activity(self._everyone)
        self._gauge = Gauge(
            self.group,
            self._processes,
            activity=self._activity,
            budget=limits.memory_bytes,
            faults=self._faults,
        )
        self._on_excess: list[Callable[[], None]] = []
        self._cause = ""
        self._fatal = ""
        """Reason for killing the kernel; kept when cells begin or end before the kernel has ended.
        """
        self._cpu_s = 0.0
        self._known = False
        self._looked_at: dict[FolderQuota, float] = {}
        """CPU seconds of the kernel at the last scan between cells, by folder."""
        self._active = False
        self._stopped = False

    @property
    def cause(self) -> str:
        """The limit that stopped the kernel or its cell; empty if none did."""
        return self._cause

    @property
    def crowded(self) -> bool:
        """Return True if the last memory check found child processes of the kernel."""
        return self._gauge.crowded

    @property
    def session(self) -> str:
        """Handle of the session in log lines."""
        return self._faults.session

    @session.setter
    def session(self, handle: str) -> None:
        self._faults.session = handle

    async def entry_fds(self) -> list[int]:
        """Return descriptors by which processes enter the group themselves; call `admit` later.

        Empty if they must be moved. The caller closes them. Raises OSError.
        """
        return [] if self._membership is None else await self._membership.entry_fds()

    def admit(self, pids: Iterable[int]) -> None:
        """Move processes into the group unless they are in it; later children start there."""
        fresh = [pid for pid in pids if pid > 0 and pid not in self._roots]
        self._roots += fresh
        self._activity.changed()
        if self._membership is not None:
            self._membership.admit(fresh)

    async def settled(self) -> None:
        """Wait until the group holds all admitted processes. Raises OSError."""
        if self._membership is not None:
            await self._membership.settled()

    async def ready(self) -> None:
        """Wait until `command` can be called. Raises OSError."""
        if self._membership is not None:
            await self._membership.made()

    def command(self, command: SandboxCommand) -> SandboxCommand:
        """Return the command, changed to run inside the group from its first instruction on."""
        if self.group is None or not SHELL.exists():
            return command
        return replace(command, argv=[*self.group.entry(), *command.argv])

    def usage(self) -> Usage:
        """Return the usage of all processes; the last measured values if /proc or cgroups fail."""
        return self._gauge.usage()

    async def used(self) -> Usage:
        """Return `usage`; without a group, measure it in a thread."""
        return await self._gauge.used()

    async def survey(self) -> None:
        """Measure the folders of a kernel that has run no code since they were filled."""
        self._known = await self._look(processes=False)

    @asynccontextmanager
    async def holding(self, extra: int) -> AsyncIterator[None]:
        """Permit `extra` more bytes in the workspace inside this block: a file of the server."""
        for quota in self.quotas[:1]:
            quota.extra += extra
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self.survey()  # the file is gone
            for quota in self.quotas[:1]:
                quota.extra -= extra

    async def begin(self, on_excess: Callable[[], None]) -> None:
        """Prepare for a cell; `on_excess` is called if a limit, `cause`, must stop it.

        Raises WorkspaceError if the folders are too far above their quota to run code.
        """
        if not self._known:
            await self.survey()
        elif any(quota.full for quota in self.quotas):
            await self._look()
        for quota in self.quotas:
            quota.start()
            if quota.severe:
                raise WorkspaceError(
                    f"The cell was not run: {quota.sentence()}. That is more than code could put "
                    "in order. Call reset with files=true to empty the workspace."
                )
        if not self._on_excess:
            self._cause = ""
            self._stopped = False
        self._on_excess.append(on_excess)
        self._priority.begin()
        self._looked_at = {}
        self.awake = self._active = True
        self._wake(self)

    def end(self, on_excess: Callable[[], None] | None = None) -> list[str]:
        """Record the end of the cell of `on_excess`, or of all; return texts on OOM kills."""
        if on_excess in self._on_excess:
            self._on_excess.remove(on_excess)
        else:
            self._on_excess.clear()
        self._stopped, self._cause = bool(self._cause), ""
        if (killed := self._gauge.forgive()) <= 0:
            return []
        which = "a process" if killed == 1 else f"{killed} processes"
        return [f"The system killed {which} of this session: {self._gauge.out_of_memory()}"]

    async def check_memory(self) -> None:
        """Compare memory with its limit if no group enforces it; called by the watchdog."""
        try:
            if await self._gauge.too_much():
                self._cause = self._gauge.out_of_memory()
                self.relieve()
        except Unmeasurable as reason:
            self.kill_for(f"out of memory ({reason})")

    def kill_for(self, cause: str) -> None:
        """Kill the kernel, with `cause` as the reason."""
        self._cause = self._fatal = cause
        self.kill()

    def exceed(self, cause: str) -> None:
        """Interrupt the running cells for this reason, or kill the kernel if there are none."""
        self._cause = cause
        for tell in self._on_excess:
            tell()
        if not self._on_excess:
            self.kill_for(cause)

    def rank(self) -> None:
        """Lower the CPU weight of an awake kernel that has computed for `LONG_S`."""
        if self.awake:
            self._priority.rank()

    @property
    def weight(self) -> float:
        """Its CPU weight among kernels of the same principal; lower after a long computation."""
        return self._priority.own

    def weigh(self, weight: float, cpus: float) -> None:
        """Set its CPU weight among all kernels, and its `cpus`; 0 means its own limit."""
        self._priority.weigh(weight, cpus or self.limits.cpus)

    def pressing(self, others: int) -> bool:
        """Return True if it must be checked now.

        Code runs or has just ended, or a scan of its folders is due. `others` is the number of
        other awake kernels: scans share a part of one processor.
        """
        if not self.awake or self._active:
            return self.awake
        return any(quota.in_turn(others) for quota in self._stale())

    def at_rest(self) -> bool:
        """Return True if it has not computed since the last check.

        Up to `RESTING_CPU_S` count as idle if a group bounds its memory, else no time at all. False
        if CPU time is unknown. Blocks.
        """
        if self.awake:
            return False
        if self._gauge.weighs:
            return self._gauge.unchanged
        cpu_s = self._gauge.group_cpu_s() if self.group is not None else self._activity.cpu_s()
        return cpu_s is not None and cpu_s - self._cpu_s <= RESTING_CPU_S

    def memory_due(self, others: int) -> bool:
        """Return True if `check_memory` may find more than at its last call.

        `others` is the number of other awake kernels.
        """
        return self._gauge.due(others)

    async def check_disk(self, others: int = 0) -> None:
        """Compare the folders with their quotas if due; called by the watchdog.

        Sets `awake` while folders may change, or have changed since their last scan. `others` is
        the number of other awake kernels. Returns at once while an earlier call runs.
        """
        if self._looking:
            return
        self._looking = True
        try:
            looked_at, between = self._looked_at, not self._on_excess
            self._active = not between or await self._has_computed()
            cpu_s = self._cpu_s
            due = [quota for quota in self._stale() if quota.due(others)]
            if due and await self._look(due):
                if between:  # a cell that began meanwhile has replaced the table by an empty one
                    looked_at.update(dict.fromkeys(due, cpu_s))
                self._judge()
            self._active = self._active or bool(self._on_excess)
            self.awake = self._active or bool(self._stale())
        finally:
            self._looking = False

    def _stale(self) -> list[FolderQuota]:
        """Return the quotas whose folders may have changed since their last scan."""
        return [
            quota
            for quota in self.quotas
            if (before := self._looked_at.get(quota)) is None
            or self._cpu_s - before > RESTING_CPU_S
        ]

    async def _has_computed(self) -> bool:
        """Return True if it has used more than `RESTING_CPU_S` since the last call."""
        cpu_s = await self._gauge.cpu_s()
        computed = cpu_s - self._cpu_s > RESTING_CPU_S
        self._cpu_s = cpu_s
        return computed

    def make_room(self, size: int, apart: Mapping[int, int]) -> None:
        """Raise the memory limit by `size` bytes for checkpoints, as far as the machine has them.

        The increase is at most the kernel's own limit. `apart` maps process ids of checkpoints to
        the bytes that they may hold. Up to that, they do not count if memory is read from /proc.
        """
        self._apart = dict(apart)
        self._activity.changed()
        if self._membership is not None and (most := self.limits.memory_bytes):
            self._membership.make_room(most, min(size, most))

    def excuse(self) -> None:
        """Exclude one OOM kill from the count: it has hit a checkpoint, not a session's process."""
        self._gauge.excuse()

    @contextlib.contextmanager
    def no_more_processes(self) -> Iterator[None]:
        """Prevent new processes inside this block, if a group can enforce that."""
        if self.group is None:
            yield
            return
        with contextlib.suppress(OSError):
            self.group.limit_processes(1)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.group.limit_processes(self.limits.pids)

    def explain(self, exit_status: ExitStatus) -> ExitStatus:
        """Return the exit status, with the limit that caused it, if any."""
        if exit_status.signal != signal.SIGKILL:
            most, detail = self.limits.memory_bytes, exit_status.detail
            aborted = exit_status.signal in (signal.SIGABRT, signal.SIGTRAP) and not detail
            if not most or not (aborted or _STARVED.search(detail)):
                return exit_status
            return replace(exit_status, cause=_MORE.format(format_bytes(most)))
        cause = self._fatal or self._cause
        if not cause and self._gauge.starved() > 0:
            cause = self._gauge.out_of_memory()
        return replace(exit_status, cause=cause)

    async def aclose(self) -> None:
        """Release quotas and group; must be called after all processes have ended."""
        self.awake = False
        self.kill = self.relieve = _nothing
        self._on_excess.clear()
        with Barrier("closing a kernel's quotas", self.session):
            await run_in_thread(self._close_files)
        self._forget(self)
        if self._membership is not None:
            self._membership.end()

    async def _look(
        self, due: Sequence[FolderQuota] | None = None, *, processes: bool = True
    ) -> bool:
        """Measure the folders `due` (default: all), and the deleted files that processes hold.

        Without `processes`, deleted files are not counted. Return False if the measurement failed.
        """

        def look() -> None:
            for quota in self.quotas if due is None else due:
                # deleted files count once, for the first folder
                first = quota is self.quotas[0]
                quota.look(self._processes if processes and first else tuple)

        if self.quotas:
            with self._faults.kept("disk space"):
                await anyio.to_thread.run_sync(look, limiter=self._scanning)
                self._faults.unseen(sum(quota.measured.unreadable for quota in self.quotas))
                return True
            return False
        return True

    def _close_files(self) -> None:
        for quota in self.quotas:
            quota.close()

    def _judge(self) -> None:
        if self._stopped:  # the next cell is compared with what the stopped one has left
            self._stopped = False
            for quota in self.quotas:
                quota.start()
            return
        growing = [quota for quota in self.quotas if quota.growing]
        if not growing:
            return
        quota = max(growing, key=lambda quota: quota.severe)
        self.exceed(quota.sentence())
        if quota.severe:
            self.kill_for(quota.sentence())

    def _everyone(self) -> list[int]:
        """Return process ids of the group, or of the admitted processes and their descendants."""
        if self.group is not None:
            return self.group.processes()[:MOST_PROCESSES]
        if not self._contained:
            self._contained = any(map(has_own_pids, self._roots))
        return list(family(self._roots, contained=self._contained))[:MOST_PROCESSES]

    def _processes(self) -> list[int]:
        """Return the process ids without checkpoints that wait."""
        found = self._activity.processes()
        return [pid for pid in found if not self._waits(pid)] if self.group is None else found

    def _waits(self, pid: int) -> bool:
        """Return True for a checkpoint that uses hardly more memory than when it was made."""
        if (size := self._apart.get(pid)) is None:
            return False
        held = plainly(pid)
        return held.private + held.shared <= min(size, self.limits.memory_bytes or size) + GROWTH


def _nothing() -> None:
    """Do nothing: the kernel does not run yet, or any more."""
