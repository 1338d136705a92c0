"""The limits of one kernel: its processes, what they use, and why it had to end."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import anyio

from kernel_mcp.barriers import Barrier, Faults, surely
from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.limits.group import SHELL, KernelGroup
from kernel_mcp.limits.groups import Membership
from kernel_mcp.limits.meter import Gauge, Unmeasurable
from kernel_mcp.limits.quota import FolderQuota
from kernel_mcp.linux.proc import ExitStatus, Usage, family
from kernel_mcp.sandbox.base import SandboxCommand

LONG_S = 0.25
"""A kernel that computes for about this long lets the others go first."""


class CpuPriority:
    """One kernel's place among those of the server."""

    def __init__(
        self, group: KernelGroup | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Without a `group` all are equal."""
        self._group = group
        self._clock = clock
        self._behind = False
        self._began = 0.0
        self._used: float | None = None

    def begin(self) -> None:
        """A cell is about to run."""
        if self._behind and self._group is not None:
            with contextlib.suppress(OSError):
                self._group.favour()
                self._behind = False
        self._began = self._clock()
        self._used = None

    def rank(self) -> None:
        """Let others go first from now on, if it has been computing for a while.

        Called again and again while it is at work, some `LONG_S` apart.
        """
        if self._group is None or self._behind:
            return
        with contextlib.suppress(OSError):
            if self._computes(self._group):
                self._group.step_back()
                self._behind = True

    def _computes(self, group: KernelGroup) -> bool:
        """Whether it has been busy since the last time, and not only been waiting for its turn."""
        used, before = group.cpu_s(), self._used
        if used is None:
            return self._clock() - self._began > LONG_S
        self._used = used
        return before is not None and used - before > LONG_S / 2


RESTING_CPU_S = 0.01
"""A kernel that used less than this since the last check has done nothing."""
MOST_PROCESSES = 10_000
"""How many of a kernel's processes are looked at when they have to be one by one."""


class KernelLimits:
    """What the launcher of a kernel, its cells and the watchdog have to say to each other.

    The launcher: start `command` when it is `ready`, `admit` each process it knows, wait until they
    are `settled` before the kernel runs user code, set `kill` to what ends all of them, `explain`
    their end, `aclose`. Cells: `begin` and `end`.
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
    ) -> None:
        """`wake` is called when the kernel is to be watched, `forget` when it has been closed.

        `session` is the handle that the log names.
        """
        self.limits = limits
        self.group = membership.group if membership is not None else None
        self.quotas = quotas
        self.kill: Callable[[], None] = _nothing
        self.awake = False
        self._looking = False
        self._wake = wake
        self._turns = CpuPriority(self.group)
        self._membership = membership
        self._forget = forget
        self._roots: list[int] = []
        self._faults = Faults(session)
        self._gauge = Gauge(
            self.group, self._processes, budget=limits.memory_bytes, faults=self._faults
        )
        self._on_excess: Callable[[], None] | None = None
        self._cause = ""
        self._cpu_s = 0.0
        self._known = False
        self._changed = False
        self._stopped = False

    @property
    def cause(self) -> str:
        """Why the kernel or its cell had to be stopped, if that was because of a limit."""
        return self._cause

    @property
    def crowded(self) -> bool:
        """Whether it had processes beside its own when its memory was last looked at."""
        return self._gauge.crowded

    @property
    def session(self) -> str:
        """The handle of the session that the kernel is for, as the log names it."""
        return self._faults.session

    @session.setter
    def session(self, handle: str) -> None:
        self._faults.session = handle

    def admit(self, pids: Iterable[int]) -> None:
        """Begin to take processes in, and with them all that they start from then on."""
        fresh = [pid for pid in pids if pid > 0 and pid not in self._roots]
        self._roots += fresh
        if self._membership is not None:
            self._membership.admit(fresh)

    async def settled(self) -> None:
        """Wait until the group is there, with all that have been admitted. Raises OSError."""
        if self._membership is not None:
            await self._membership.settled()

    async def ready(self) -> None:
        """Wait until `command` can be run. Raises OSError."""
        if self._membership is not None:
            await self._membership.made()

    def command(self, command: SandboxCommand) -> SandboxCommand:
        """The same command, run within the limits from its first instruction on."""
        if self.group is None or not SHELL.exists():
            return command
        return replace(command, argv=[*self.group.entry(), *command.argv])

    def usage(self) -> Usage:
        """What all processes of the kernel use, as the last look that succeeded found it."""
        return self._gauge.usage()

    async def survey(self) -> None:
        """Measure the folders of a kernel that has run no code since they were filled."""
        self._known = await self._look(processes=False)

    async def begin(self, on_excess: Callable[[], None]) -> None:
        """A cell is about to run; `on_excess` is called when it has to stop because of `cause`.

        Raises WorkspaceError when the kernel's folders hold so much that no code may run.
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
        self._cause = ""
        self._on_excess = on_excess
        self._stopped = False
        self._turns.begin()
        self._changed = self.awake = True
        self._wake(self)

    def end(self) -> list[str]:
        """The cell has ended: what happened to its processes, in sentences."""
        self._on_excess = None
        self._stopped, self._cause = bool(self._cause), ""
        if (killed := self._gauge.forgive()) <= 0:
            return []
        which = "a process" if killed == 1 else f"{killed} processes"
        return [f"The system killed {which} of this session: {self._gauge.out_of_memory()}"]

    async def check_memory(self) -> None:
        """Compare the memory with its limit where no group does; called by the watchdog."""
        try:
            if await self._gauge.too_much():
                self._cause = self._gauge.out_of_memory()
                self.kill()
        except Unmeasurable as reason:
            self._cause = f"out of memory ({reason})"
            self.kill()

    def give_up(self, cause: str) -> None:
        """End the kernel because of what it costs the server."""
        self._cause = cause
        self.kill()

    def rank(self) -> None:
        """Let short cells of other kernels go before one that has been computing for a while."""
        if self.awake:
            self._turns.rank()

    async def check_disk(self) -> None:
        """Compare the folders with their quotas where that is due; called by the watchdog.

        Sets `awake` while there is something to see. Does nothing while an earlier call is at it.
        """
        if self._looking:
            return
        self._looking = True
        try:
            cpu_s = (await self._gauge.used()).cpu_s
            active = self._on_excess is not None or cpu_s - self._cpu_s > RESTING_CPU_S
            self._cpu_s = cpu_s
            self._changed = self._changed or active
            if self._changed and (not self.quotas or any(quota.due() for quota in self.quotas)):
                looked = await self._look()
                self._changed = active or not looked  # one more look when it has come to rest
                if looked:
                    self._judge()
            self.awake = self._changed
        finally:
            self._looking = False

    def explain(self, exit_status: ExitStatus) -> ExitStatus:
        """The same end with its cause, if a limit was."""
        if exit_status.signal != signal.SIGKILL:
            return exit_status
        cause = self._cause
        if not cause and self._gauge.starved() > 0:
            cause = self._gauge.out_of_memory()
        return replace(exit_status, cause=cause)

    async def aclose(self) -> None:
        """Give back what was reserved; all processes have ended."""
        self.awake = False
        self.kill = _nothing
        self._on_excess = None
        with Barrier("closing a kernel's quotas", self.session):
            await surely(self._close_files)
        self._forget(self)
        if self._membership is not None:
            self._membership.end()

    async def _look(self, *, processes: bool = True) -> bool:
        """Measure the folders, with what processes hold open unless they have run no code yet.

        Whether that was possible: otherwise there is nothing new to judge by.
        """

        def look() -> None:
            for number, quota in enumerate(self.quotas):
                # files without a name count once, for the first folder
                quota.look(self._processes if processes and not number else tuple)

        if self.quotas:
            with self._faults.kept("disk space"):
                await anyio.to_thread.run_sync(look)
                self._faults.unseen(sum(quota.measured.unseen for quota in self.quotas))
                return True
            return False
        return True

    def _close_files(self) -> None:
        for quota in self.quotas:
            quota.close()

    def _judge(self) -> None:
        """Stop what grows although it is too large."""
        if self._stopped:  # what the stopped cell has left is where the next one begins
            self._stopped = False
            for quota in self.quotas:
                quota.start()
            return
        growing = [quota for quota in self.quotas if quota.growing]
        if not growing:
            return
        quota = max(growing, key=lambda quota: quota.severe)
        self._cause = quota.sentence()
        if self._on_excess is not None:
            self._on_excess()
        if self._on_excess is None or quota.severe:
            self.kill()

    def _processes(self) -> list[int]:
        """Who the kernel consists of: its group, or whom the admitted processes have started."""
        if self.group is not None:
            return self.group.processes()[:MOST_PROCESSES]
        return list(family(self._roots))[:MOST_PROCESSES]


def _nothing() -> None:
    """How a kernel is ended that does not run."""
