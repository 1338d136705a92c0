"""The resource manager of one server: watchdog, control groups, and the report on both."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from kernel_mcp.barriers import Barrier, run_in_thread
from kernel_mcp.config.settings import Limits
from kernel_mcp.limits.group import KernelGroup
from kernel_mcp.limits.groups import PREFIX, RECORD, GroupsUnavailable, GroupTree, Membership
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.limits.quota import FolderQuota
from kernel_mcp.linux.cgroupfs import find_hierarchies
from kernel_mcp.sandbox.base import SandboxReport, listed
from kernel_mcp.units import format_bytes

TICK_S = 0.25
"""Seconds between checks of a kernel in which code runs or has just ended."""
REST_S = 5.0
"""Seconds between checks of other kernels, as threads and processes may run between cells."""
CROWDED_S = 0.75
"""Seconds between memory checks of idle kernels with child processes, plus `TICK_S`."""


SCANS = 4
"""Maximum number of concurrent folder scans: more threads would delay the event loop."""


class Watchdog:
    """Checks the kernels that have run code at least once."""

    def __init__(self) -> None:
        self._kernels: set[KernelLimits] = set()
        self._reading = False
        self._woken = anyio.Event()

    def watch(self, kernel: KernelLimits) -> None:
        """Check this kernel from now on."""
        self._kernels.add(kernel)
        self._woken.set()

    def forget(self, kernel: KernelLimits) -> None:
        self._kernels.discard(kernel)

    async def run(self) -> None:
        """Check kernels until cancelled."""
        rest = weighed = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            while True:
                soonest = rest + REST_S
                if any(kernel.crowded for kernel in self._kernels):
                    soonest = min(soonest, weighed + CROWDED_S)
                await self._pause(soonest - anyio.current_time())
                now = anyio.current_time()
                if everyone := now >= rest + REST_S:
                    rest = now
                if crowded := now >= weighed + CROWDED_S:
                    weighed = now
                others = sum(kernel.awake for kernel in self._kernels)
                resting = []
                for kernel in list(self._kernels):
                    if kernel.pressing(others - kernel.awake):
                        self._check(kernel, others, tasks)
                    elif everyone:
                        resting.append(kernel)
                    elif crowded and kernel.crowded and kernel.memory_due(others):
                        tasks.start_soon(_guarded, kernel, kernel.check_memory)
                if resting and not self._reading:
                    tasks.start_soon(self._check_resting, resting, others, tasks)

    async def _check_resting(
        self, resting: Sequence[KernelLimits], awake: int, tasks: TaskGroup
    ) -> None:
        """Check the kernels that show activity; `awake` is the number of awake kernels."""
        self._reading = True
        try:
            with Barrier("looking for kernels that compute between cells"):
                for kernel in await run_in_thread(_moved, resting):
                    if kernel in self._kernels:
                        self._check(kernel, awake, tasks)
        finally:
            self._reading = False

    def _check(self, kernel: KernelLimits, awake: int, tasks: TaskGroup) -> None:
        """Start the checks of a kernel; `awake` is the number of awake kernels with it."""
        with Barrier("ranking a kernel", kernel.session):
            kernel.rank()
        if kernel.memory_due(awake - kernel.awake):
            tasks.start_soon(_guarded, kernel, kernel.check_memory)
        check_disk = partial(kernel.check_disk, awake - kernel.awake)
        tasks.start_soon(_guarded, kernel, check_disk)

    async def _pause(self, longest_s: float) -> None:
        """Wait up to `longest_s` for an awake kernel, and then for one tick."""
        if not any(kernel.awake for kernel in self._kernels):
            self._woken = anyio.Event()
            with anyio.move_on_after(max(longest_s, 0) if self._kernels else math.inf):
                await self._woken.wait()
        await anyio.sleep(TICK_S)


def _moved(kernels: Iterable[KernelLimits]) -> list[KernelLimits]:
    """Return the kernels that are not known to be idle. Blocks."""
    return [kernel for kernel in kernels if not kernel.at_rest()]


async def _guarded(kernel: KernelLimits, check: Callable[[], Awaitable[None]]) -> None:
    """Run one check and log its failure; the watchdog continues."""
    with Barrier("comparing a kernel with its limits", kernel.session):
        await check()


_NAMES = {"memory": "memory", "pids": "processes", "cpu": "processors"}

logger = logging.getLogger(__name__)


class ResourceManager:
    """Control groups where the server may create them, else rlimits and a watchdog.

    The watchdog runs inside `running`.
    """

    def __init__(
        self, groups: GroupTree | None = None, refusal: str = "", *, grouped: bool = False
    ) -> None:
        """`refusal` is the reason for having no `groups`; if `grouped`, the sandbox has its own."""
        self._groups = groups
        self._grouped = grouped
        self._refusal = refusal
        self._watchdog = Watchdog()
        self._number = 0
        self._scanning = anyio.CapacityLimiter(SCANS)
        self._executor = ThreadPoolExecutor(1, "cgroups")
        """Serialises changes of groups: the first move after a while blocks all for some 10 ms."""

    @classmethod
    def create(cls, run: Path, sandbox: SandboxReport | None = None) -> ResourceManager:
        """Make the server's groups, recorded in the run directory `run`.

        For a `sandbox` with groups of its own, none are made.
        """
        if sandbox is not None and sandbox.own_groups:
            return cls(refusal="the sandbox has its own", grouped=True)
        name = f"{PREFIX}{os.getpid()}-{run.name.rpartition('-')[2]}"
        try:
            return cls(GroupTree.create(find_hierarchies(), name, run / RECORD))
        except (GroupsUnavailable, OSError) as reason:
            return cls(refusal=str(reason))

    def warn(self, limits: Limits) -> None:
        """Log the limits that are enforced in a weaker form."""
        if weak := listed(self._without_group(limits)):
            logger.warning("no cgroup limits %s: see kernel-mcp doctor", weak)
            logger.info("no cgroup: %s", self._refusal)

    def open(
        self, limits: Limits, workspace: Path, sockets: Path, session: str = ""
    ) -> KernelLimits:
        """Return the limits of a new kernel of `session`, before any process is admitted.

        `workspace` and `sockets` are its writable folders on disk. Raises OSError.
        """
        quotas: list[FolderQuota] = []
        try:
            if limits.disk_bytes:
                quotas.append(FolderQuota(workspace, "the workspace", limits.disk_bytes))
            if limits.tmp_bytes:
                quotas.append(FolderQuota(sockets, "the temporary folder", limits.tmp_bytes))
        except BaseException:
            for quota in quotas:
                quota.close()
            raise
        membership = None
        if self._groups is not None:
            self._number += 1
            membership = Membership(
                self._groups,
                f"k-{self._number}",
                limits,
                executor=self._executor,
                leave=self._discard,
            )
        return KernelLimits(
            limits,
            membership=membership,
            quotas=quotas,
            wake=self._watchdog.watch,
            forget=self._watchdog.forget,
            session=session,
            scanning=self._scanning,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the watchdog inside this block; leaving it removes the control groups."""
        task = asyncio.create_task(self._watchdog.run())
        task.add_done_callback(_tell_failure)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            self.close()

    def close(self) -> None:
        self._executor.shutdown()
        if self._groups is not None:
            self._groups.close()
            self._groups = None

    def report(self, sandbox: SandboxReport, limits: Limits) -> SandboxReport:
        """Return the sandbox's report, extended by the resource limits in force."""
        return replace(
            sandbox,
            enforced=(*sandbox.enforced, *self._enforced(limits)),
            gaps=(*sandbox.gaps, *self._gaps(limits)),
        )

    @property
    def limits_processors(self) -> bool:
        """Return True if `Limits.cpus` is enforced here."""
        return bool(self._by("cpu"))

    def _discard(self, group: KernelGroup) -> None:
        if self._groups is not None:
            self._executor.submit(self._groups.discard, group)

    def _by(self, controller: str) -> str:
        """Return the cgroup that limits a resource, such as "cgroup v2"; empty for none."""
        if self._grouped:
            return "the sandbox's cgroup"
        versions = self._groups.versions if self._groups is not None else {}
        return f"cgroup v{versions[controller]}" if controller in versions else ""

    def _enforced(self, limits: Limits) -> list[str]:
        found = []
        none = f"no cgroup: {self._refusal}"
        if limits.memory_bytes:
            means = self._by("memory") or f"a watchdog ({none})"
            how = f"RLIMIT_AS and {means}" if limits.address_space else f"{means} alone (--device)"
            found.append(f"memory {format_bytes(limits.memory_bytes)} by {how}")
        if limits.pids:
            means = self._by("pids") or f"RLIMIT_NPROC ({none})"
            found.append(f"{limits.pids} processes and threads by {means}")
        if limits.cpus and self._by("cpu"):
            found.append(f"{limits.cpus:g} processors by {self._by('cpu')}")
        if limits.disk_bytes:
            found.append(f"workspace {format_bytes(limits.disk_bytes)} by a watchdog")
        return found

    def _gaps(self, limits: Limits) -> list[str]:
        found = []
        if weak := listed(self._without_group(limits)):
            found.append(f"no cgroup limits {weak}")
        if waived := listed([flag for flag, limit in _limited(limits).items() if not limit]):
            found.append(f"{waived} not limited at all")
        return found

    def _without_group(self, limits: Limits) -> list[str]:
        wanted = {"memory": limits.memory_bytes, "pids": limits.pids, "cpu": limits.cpus}
        return [_NAMES[name] for name, limit in wanted.items() if limit and not self._by(name)]


def _limited(limits: Limits) -> dict[str, int]:
    return {
        "memory": limits.memory_bytes,
        "processes": limits.pids,
        "disk": limits.disk_bytes,
    }


def _tell_failure(task: asyncio.Task[None]) -> None:
    """Log the exception of a watchdog that has failed: kernels then have no limits."""
    if not task.cancelled() and task.exception() is not None:
        logger.critical("the watchdog of kernels has failed", exc_info=task.exception())
