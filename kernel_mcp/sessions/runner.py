"""Seeing one cell of a session through: its kernel, the policy's say, its run, its outcome."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from kernel_mcp.audit import Journal
from kernel_mcp.barriers import Barrier, explained
from kernel_mcp.errors import KernelGone, KernelMcpError
from kernel_mcp.output.events import Failure
from kernel_mcp.sessions.cell import Cell, Outcome, Status, StopReason
from kernel_mcp.sessions.execution import run_cell, stop
from kernel_mcp.sessions.gate import refuse
from kernel_mcp.sessions.keeper import KernelKeeper

RESTART_S = 0.7
"""How long an answer about a death may wait for the fresh kernel."""


class CellRunner:
    """Runs cells that have begun, one at a time, on the kernel of `keeper`.

    `grace_s` and `cpu_s` are those of `run_cell`; `clock` is the session's.
    """

    def __init__(
        self,
        keeper: KernelKeeper,
        *,
        grace_s: float,
        cpu_s: float,
        clock: Callable[[], float],
        journal: Journal,
    ) -> None:
        self._keeper = keeper
        self._grace_s = grace_s
        self._cpu_s = cpu_s
        self._clock = clock
        self._journal = journal

    async def run(self, cell: Cell) -> None:
        """Bring `cell` to its end, whatever happens on the way."""
        try:
            with Barrier(f"running cell {cell.number}", self._keeper.demand.session) as barrier:
                await self._run(cell)
            if barrier.failure is not None:
                with self._keeper.engaged():
                    kept = await self._settle(cell)
                cell.fail(explained(barrier.failure, "running this cell", kept=kept), self._clock())
        finally:
            if cell.outcome is None:
                cell.finish(Outcome(Status.KILLED, False, "the session was closed"), self._clock())
            self._journal.ran(cell)

    async def _run(self, cell: Cell) -> None:
        try:
            cell.finish(await self._outcome(cell), self._clock())
        except KernelMcpError as error:
            cell.fail(error, self._clock())

    async def _outcome(self, cell: Cell) -> Outcome:
        try:
            return await self._attempt(cell)
        except KernelGone:  # nothing of the cell has run: a fresh kernel may run it
            return await self._attempt(cell)

    async def _attempt(self, cell: Cell) -> Outcome:
        with anyio.CancelScope() as scope:
            cell.watch_stop(scope)
            kernel = await self._keeper.ensure(cell.step)
        cell.watch_stop(None)
        if scope.cancelled_caught:
            return Outcome(Status.INTERRUPTED, cause="it was stopped while its kernel was starting")
        cell.run_after(self._keeper.ledger.place(cell.since))
        refusal = await refuse(cell.code, kernel.policy, self._keeper.demand.workspace)
        if refusal is not None:
            return self._refused(cell, refusal)
        self._journal.begins(kernel.handle)
        with self._keeper.engaged():
            outcome = await run_cell(
                kernel, cell, grace_s=self._grace_s, cpu_s=self._cpu_s, clock=self._clock
            )
            if outcome.status is Status.KILLED:
                await self._after_kill(cell, outcome)
        return outcome

    async def _settle(self, cell: Cell) -> str:
        """Bring the kernel to rest after a failure in the midst of a cell; what that has cost."""
        kernel = self._keeper.kernel
        if kernel is None or kernel.exit is not None:
            return ""
        run = kernel.running
        if run is None:
            return "Variables are kept."
        with Barrier("stopping a cell", self._keeper.demand.session):
            if not await stop(kernel, run, self._grace_s) and run.status is not None:
                return "The cell was interrupted; variables are kept."
        what = f"The server failed while running cell {cell.number} and ended its kernel"
        cell.own = self._keeper.lose(what, self._keeper.loss("the server failed"))
        await self._keeper.drop()
        return "The kernel was ended: all variables are lost, files in the workspace are kept."

    def _refused(self, cell: Cell, refusal: Failure) -> Outcome:
        cell.take(refusal)
        self._journal.refused(cell, refusal.value)
        return Outcome(Status.ERROR, cause="refused by the import policy; nothing was run")

    async def _after_kill(self, cell: Cell, outcome: Outcome) -> None:
        """Drop the dead kernel and, unless the session ends or resets, have a fresh one."""
        ends = cell.stop_reason in (StopReason.RESET, StopReason.CLOSE)  # which tell it themselves
        if not ends:
            cause = outcome.cause or "its kernel is gone"
            loss = self._keeper.loss(cause)
            cell.own = self._keeper.lose(f"Cell {cell.number} was killed ({cause})", loss)
        await self._keeper.drop()
        if not ends:
            await self._replace_kernel(cell)

    async def _replace_kernel(self, cell: Cell) -> None:
        """Have a fresh kernel up by the time the answer about a death goes out, if it is quick."""
        try:
            with anyio.move_on_after(RESTART_S):
                await self._keeper.ensure(lambda _text: None)
        except KernelMcpError as error:
            cell.notice(f"A fresh kernel could not be started: {error}")
