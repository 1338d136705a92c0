"""The kernel of a session: started when it is needed, missed when it died, put to sleep, woken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from kernel_mcp.audit import Journal
from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import HibernationError
from kernel_mcp.sessions.demand import Demand, KernelSource
from kernel_mcp.sessions.folders import REMOVED, restore
from kernel_mcp.sessions.hibernation import Hibernation, Sleep, nothing_back

if TYPE_CHECKING:
    from pathlib import Path

    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.sessions.cell import Cell


class KernelKeeper:
    """Keeps one session's kernel; for one task at a time.

    `demand` is what the next kernel has to be like.
    `awake` is False for a hibernated session, which has no kernel until `admit` lets it have one.
    `used` says that the kernel holds what cells have made. `news` is what the next answer has to
    tell, `loss` names in short what earlier cells have lost.
    """

    def __init__(
        self,
        demand: Demand,
        source: KernelSource,
        *,
        folder: Path,
        max_bytes: int,
        admit: Callable[[], Awaitable[None]],
        journal: Journal,
    ) -> None:
        self.demand = demand
        self.kernel: Kernel | None = None
        self.awake = True
        self.used = False
        self.news: list[str] = []
        self.loss: str | None = None
        self._source = source
        self._admit = admit
        self._journal = journal
        self._missed = False
        self._dozing: anyio.CancelScope | None = None
        self._hibernation = Hibernation(folder, max_bytes=max_bytes, start=self._start_beside)
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def sleep(self) -> Sleep | None:
        """What a hibernated session is instead of having a kernel."""
        return self._hibernation.sleep

    def watch_in(self, tasks: anyio.abc.TaskGroup) -> None:
        """Watch kernels for their death in this task group."""
        self._tasks = tasks

    async def ensure(self, tell: Callable[[str], None]) -> Kernel:
        """The live kernel, a fresh one or one with what a hibernated session had saved.

        Raises KernelMcpError; a hibernated session then goes on sleeping.
        """
        if self.kernel is not None and self.kernel.exit is None:
            if self._missed or self.demand.workspace.exists():
                return self.kernel
            if self.used:
                self._miss_workspace()
                return self.kernel
            await self.drop()
        await self._mourn()
        asleep = not self.awake
        if asleep:
            await self._admit()
        try:
            self.kernel = await self._begin(tell)
        except BaseException:
            self.awake = not asleep
            raise
        return self.kernel

    async def drop(self) -> None:
        """End the kernel."""
        kernel, self.kernel, self.used = self.kernel, None, False
        if kernel is not None:
            with Barrier("ending a kernel", self.demand.session):
                await _end(kernel)

    async def forget(self) -> None:
        """End the kernel with all that it held, saved or not, and all that was to be told of it."""
        await self.drop()
        await self._hibernation.end()
        self.news.clear()
        self.loss = None

    async def hibernate(self, sleep: Sleep, *, forced: bool) -> bool:
        """Save what the kernel holds and end it, unless `disturb` is called before that is done.

        Raises HibernationError when something would be lost and nothing is `forced`, KernelMcpError
        or OSError when the server cannot do it now; the kernel lives on.
        """
        with anyio.CancelScope() as scope:
            self._dozing = scope
            try:
                if self.kernel is not None and self.kernel.exit is not None:
                    await self._mourn()
                kernel = self.kernel if self.used else None
                sleep = await self._hibernation.prepare(kernel, sleep, forced=forced)
            finally:
                self._dozing = None
        if scope.cancel_called:
            await self._hibernation.end()
            return False
        self._hibernation.sleep = sleep
        self.awake = False
        saved = len(sleep.dump.names) if sleep.dump is not None else 0
        self._journal.hibernated(saved, len(sleep.gone), sleep.size, sleep.failure)
        await self.drop()
        return True

    def disturb(self) -> None:
        """Give up what `hibernate` is doing: the kernel is needed."""
        if self._dozing is not None:
            self._dozing.cancel()

    def tell_loss(self, cause: str) -> None:
        """Have the next answer tell that variables are lost."""
        self.loss = cause
        self.news.append(
            f"Before this cell, {cause}: all variables of earlier cells are lost, files in the "
            "workspace are kept. The kernel is a fresh one now"
        )

    def report(self, cell: Cell) -> str | None:
        """Tell with the answer of `cell` what has happened since the last one; what was lost."""
        for text in self.news:
            cell.notice(text)
        self.news.clear()
        loss, self.loss = self.loss, None
        return loss

    async def _begin(self, tell: Callable[[str], None]) -> Kernel:
        if self.sleep is None:
            return await self._start(self.demand, tell)
        tell("Bringing the hibernated session back")
        kernel = await self._start(self.demand, tell)
        try:
            waking = await self._hibernation.bring_back(kernel)
        except HibernationError as error:
            await _end(kernel)
            waking = nothing_back(self.sleep, str(error))
            kernel = await self._start(self.demand, tell)
        except BaseException:
            await _end(kernel)
            raise
        await self._hibernation.end()
        self._journal.woke(waking.back, len(waking.lost))
        self.used = waking.restored
        if waking.notice:
            self.news.append(waking.notice)
        self.loss = self.loss or waking.loss
        return kernel

    async def _start(self, demand: Demand, tell: Callable[[str], None]) -> Kernel:
        self.news += restore(demand)
        self._missed = False
        kernel = await self._source.start(demand, tell)
        assert self._tasks is not None
        self._tasks.start_soon(kernel.watch)
        return kernel

    async def _start_beside(self) -> Kernel:
        return await self._start(replace(self.demand, beside=True), lambda _text: None)

    def _miss_workspace(self) -> None:
        """Have the next answer tell, once, that the kernel's workspace is there no more."""
        self._missed = True
        self.news.append(
            f"{REMOVED}: its files are gone, and this kernel can write none. Variables are kept; "
            "save what you need, then call reset for a new workspace"
        )

    async def _mourn(self) -> None:
        """Have the next answer tell that the kernel died between cells."""
        if self.kernel is None:
            return
        exit_status, used = self.kernel.exit, self.used
        await self.drop()
        if used and exit_status is not None:
            cause = f"the kernel was {exit_status.describe()} between cells"
            self._journal.died(cause)
            self.tell_loss(cause)


async def _end(kernel: Kernel) -> None:
    with anyio.CancelScope(shield=True):
        await kernel.aclose()
