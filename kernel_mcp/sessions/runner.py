"""The queue of a session's cells, the policy check of each, and its run to an outcome."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio

from kernel_mcp.barriers import Barrier, explained, run_in_thread
from kernel_mcp.errors import KernelGone, KernelMcpError
from kernel_mcp.output.displays import DisplayIndex
from kernel_mcp.output.items import Failure, Stream
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.output.text import Masks
from kernel_mcp.policy import Policy
from kernel_mcp.policy.check import own_modules
from kernel_mcp.sessions.cell import (
    AT_ONCE,
    Cell,
    CellOutcome,
    News,
    Phase,
    Status,
    StopReason,
    Watcher,
)
from kernel_mcp.sessions.checking import Checks
from kernel_mcp.sessions.events import SessionEvents
from kernel_mcp.sessions.execution import run_cell, stop
from kernel_mcp.sessions.history import History
from kernel_mcp.sessions.lifecycle import KernelLifecycle
from kernel_mcp.sessions.notifications import Notice, NotificationQueue
from kernel_mcp.sessions.start_queue import CellStartQueue
from kernel_mcp.telemetry.spans import OriginContext, Span
from kernel_mcp.units import MIB

RECORD_BYTES = 512 * MIB
"""Maximum bytes of one session's record on disk; the oldest outputs are removed first."""


class CellQueue:
    """The cells of a session in order: `cells` are all of them, `current` is the running one.

    Outputs are written to files in `folder`; `clock` is the session's.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float],
        notifications: NotificationQueue,
        masks: Masks | None = None,
    ) -> None:
        """`masks` hide values in code that is written to disk."""
        self._masks = masks or Masks()
        self.news = News(notifications, clock)
        self._displays: DisplayIndex[OutputLog] = DisplayIndex()
        self.cells = History(folder, self._displays)
        self.current: Cell | None = None
        self.watchers: list[Watcher] = []
        self._folder = folder
        self._waiting: deque[Cell] = deque()
        self._clock = clock

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """True if a cell runs or waits."""
        return self.current is not None or bool(self._waiting)

    def add(self, code: str, timeout_s: float, author: str = "") -> Cell:
        """Append a cell to the queue, and return it."""
        number = len(self.cells) + 1
        log = OutputLog(self._folder, number, index=self._displays)
        cell = Cell(
            number,
            code,
            timeout_s,
            log,
            author=author,
            watchers=self.watchers,
            recorded=self._masks.masked(code),
        )
        self.cells.append(cell)
        self._waiting.append(cell)
        return cell

    def remember(self, code: str, cause: str, output: str, *, began: bool) -> None:
        """Add a cell of an earlier server, whose end caused its own, and what it had put out."""
        number = len(self.cells) + 1
        log = OutputLog(self._folder, number)
        if output:
            log.add(Stream("stdout", output))
        elif began:
            log.evict(f"[… {cause} …]")
        log.close()
        status = Status.KILLED if began else Status.INTERRUPTED
        cell = Cell.ended(number, code, log, CellOutcome(status, False, cause), 0.0)
        if began:
            cell.numbered, cell.phase = True, Phase.RUN
        self.cells.append(cell)

    @property
    def of_agent(self) -> Cell | None:
        """The agent's running cell, else its first waiting one; None without one."""
        there = [*([] if self.current is None else [self.current]), *self._waiting]
        return next((cell for cell in there if not cell.author), None)

    @property
    def first(self) -> Cell | None:
        """The cell that begins next; None for none."""
        return self._waiting[0] if self._waiting else None

    def begin(self) -> Cell | None:
        """Make the first waiting cell the running one and return it; None without one."""
        if not self._waiting:
            return None
        cell = self.current = self._waiting.popleft()
        cell.begin(self._clock())
        return cell

    def end(self, cell: Cell) -> None:
        """Clear `current`, report the end, and keep the record within `RECORD_BYTES`."""
        self.current = None
        if cell.author:
            self.news.ran(cell)
        else:
            self.news.ended(cell)
        self.cells.ended(cell, RECORD_BYTES)

    def place(self, cell: Cell) -> int:
        """Return the number of cells that must end before `cell` begins; 0 once it runs."""
        if cell not in self._waiting:
            return 0
        return self._waiting.index(cell) + (self.current is not None)

    def before(self, cell: Cell) -> Cell | None:
        """Return the cell after whose end `cell` begins; None if it waits for none."""
        place = self._waiting.index(cell) if cell in self._waiting else -1
        return self._waiting[place - 1] if place > 0 else self.current if place == 0 else None

    def withdraw(self, cause: str, cell: Cell | None = None) -> Cell | None:
        """End `cell` if it waits, by default the first waiting one; return it, None for none."""
        cell = cell or self.first
        return self._drop(cell, cause) if cell is not None and cell in self._waiting else None

    @contextmanager
    def attending(self, cell: Cell) -> Iterator[None]:
        """Count a call that waits for `cell` inside this block.

        If the call returns before the end of the cell, the session's next answer reports that end.
        """
        cell.called = True
        cell.calls += 1
        try:
            yield
        finally:
            cell.calls -= 1
            self.news.ended(cell)

    def tell_unfollowed(self) -> None:
        """Report the ends of cells with tasks, if none was polled for `FOLLOWED_S`."""
        for cell in self.cells.unreported:
            if cell.followed:
                self.news.ended(cell)

    def abandon(self, cell: Cell) -> None:
        """Stop a cell whose call was cancelled: at once when waiting, by interrupt when running."""
        if cell in self._waiting:
            self._drop(cell, "it was cancelled before it began")
        else:
            cell.stop(StopReason.CANCEL)
        cell.end_reported = cell.abandoned = (
            True  # no answer to its call follows; the next answer reports a loss
        )

    def halt(self, reason: StopReason, lost: Notice | None) -> None:
        """End every cell, because the session is reset or closed; `lost` is the notice of that."""
        what = "reset" if reason is StopReason.RESET else "closed"
        while self._waiting:
            cause = f"the session was {what} before this cell began"
            cell = self._waiting[0]
            cell.run_after([] if lost is None else [lost])
            self._drop(cell, cause).end_reported = True
        if self.current is not None:
            self.current.caused_loss = lost
            self.current.stop(reason)
            self.current.end_reported = True

    def file_away(self) -> list[int]:
        """Move ended cells to disk; return the numbers of those whose end was not reported."""
        ended = [cell for cell in self.cells.unreported if cell.finished.is_set()]
        for cell in (*ended, *self.cells.late):
            cell.end_reported, cell.late_since = True, None
            self.news.retract(cell)
        self.cells.settle()
        return [cell.number for cell in ended]

    def refuse(self, cause: str) -> list[int]:
        """End every waiting cell with `cause`, then call `file_away` and return its result."""
        while self._waiting:
            self._drop(self._waiting[0], f"it was not run: {cause}")
        return self.file_away()

    def _drop(self, cell: Cell, cause: str) -> Cell:
        self._waiting.remove(cell)
        cell.finish(CellOutcome(Status.INTERRUPTED, cause=cause), self._clock())
        return cell


async def refuse(
    code: str, policy: Policy, folders: Iterable[Path], *, checks: Checks, python: str = ""
) -> Failure | None:
    """Check code by the policy, and return the failure of a refused cell; None if it may run.

    Modules in `folders` may be imported. Code that does not parse is refused, unless the kernel's
    `python` is newer than the server's and may support more syntax. Then only the import guard in
    the kernel applies. Raises ServerFailure if the code cannot be checked.
    """
    if policy.allow_all:
        return None
    report = await checks.check(code, policy, compiled=False)
    if report.refusals:
        own = await run_in_thread(own_modules, folders)
        report = await checks.check(code, policy, own_modules=own)
    name, found = "PolicyError", report.refusals
    newer = python and tuple(map(int, python.split(".")[:2])) > sys.version_info[:2]
    if not found and not newer:
        name, found = "SyntaxError", report.syntax_errors
    if not found:
        return None
    text = replace(report, diagnostics=found).render()
    return Failure(name, f"nothing was run.\n{text}", ())


RESTART_S = 0.7
"""Maximum wait for a fresh kernel, in seconds, before the end of a killed cell is reported."""


NOT_PREPARED = "it was stopped while packages were being installed; no line of it was run"
NOT_STARTED = "it was stopped while its kernel was starting"
NOT_CHECKED = "it was stopped while its code was being checked; no line of it was run"


class CellRunner:
    """Runs one cell at a time on the kernel of `lifecycle`.

    `grace_s` and `cpu_s` are those of `run_cell`; `clock` is the session's. Modules that lie in
    `module_folders` may be imported.
    """

    def __init__(
        self,
        lifecycle: KernelLifecycle,
        *,
        grace_s: float,
        cpu_s: float,
        clock: Callable[[], float],
        events: SessionEvents,
        checks: Checks,
        start_queue: CellStartQueue,
        module_folders: Iterable[Path],
    ) -> None:
        self._module_folders = module_folders
        self._lifecycle = lifecycle
        self._state = lifecycle.state
        self._recovery = lifecycle.recovery
        self._grace_s = grace_s
        self._cpu_s = cpu_s
        self._clock = clock
        self._events = events
        self._checks = checks
        self._start_queue = start_queue

    async def prepare(self, cell: Cell, work: Callable[[Cell], Awaitable[None]]) -> None:
        """Call `work` before a cell runs; end the cell if `work` fails or is stopped."""
        handle, scope = self._lifecycle.request.session, anyio.CancelScope()
        cell.phase, cell.state_as_of = Phase.INSTALL, self._state.as_of
        doing = f"installing for cell {cell.number}"
        try:
            with OriginContext(cell.origin), Barrier(doing, handle) as barrier, scope:
                cell.watch_stop(scope)
                try:
                    await work(cell)
                except KernelMcpError as error:
                    cell.fail(error, self._clock())
        finally:
            cell.watch_stop(None)
        if barrier.failure is not None:
            cell.fail(explained(barrier.failure, "installing for this cell"), self._clock())
        if scope.cancelled_caught:
            cell.finish(CellOutcome(Status.INTERRUPTED, cause=NOT_PREPARED), self._clock())
        if cell.outcome is not None:
            self._events.ran(cell)

    async def run(self, cell: Cell) -> None:
        """Run `cell` until it has an outcome. Raises only a cancellation."""
        handle = self._lifecycle.request.session
        with OriginContext(cell.origin), Span("cell", session=handle, cell=cell.number) as span:
            try:
                await self._run_to_outcome(cell)
            finally:
                span.ended(cell.status.value, well=cell.status is Status.OK)

    async def _run_to_outcome(self, cell: Cell) -> None:
        try:
            with Barrier(f"running cell {cell.number}", self._lifecycle.request.session) as barrier:
                await self._run(cell)
            if barrier.failure is not None:
                with self._recovery.running_cell():
                    kept = await self._settle(cell)
                cell.fail(explained(barrier.failure, "running this cell", kept=kept), self._clock())
        finally:
            if cell.outcome is None:
                cell.finish(
                    CellOutcome(Status.KILLED, False, "the session was closed"), self._clock()
                )
            self._events.ran(cell)

    async def _run(self, cell: Cell) -> None:
        try:
            try:
                outcome = await self._attempt(cell)
            except KernelGone:  # nothing of the cell has run: a fresh kernel may run it
                outcome = await self._attempt(cell)
            cell.finish(outcome, self._clock())
        except KernelMcpError as error:
            cell.fail(error, self._clock())

    async def _attempt(self, cell: Cell) -> CellOutcome:
        cell.phase, cell.state_as_of = Phase.START, self._state.as_of
        refusal: Failure | None = None
        with anyio.CancelScope() as scope:
            cell.watch_stop(scope)
            kernel = await self._lifecycle.ensure(cell.step)
            cell.run_after(self._state.notifications.take_losses(cell.since))
            cell.phase, cell.state_as_of = Phase.CHECK, self._state.as_of
            refusal = await refuse(
                cell.plain,
                kernel.policy,
                self._module_folders,
                checks=self._checks,
                python=kernel.environment.version,
            )
        cell.watch_stop(None)
        if scope.cancelled_caught:
            why = NOT_CHECKED if cell.phase is Phase.CHECK else NOT_STARTED
            return CellOutcome(Status.INTERRUPTED, cause=why)
        if refusal is not None:
            return self._refused(cell, refusal)
        await self._lifecycle.checkpoint_ahead(cell)
        cell.began_as_of = self._state.as_of or 0
        cell.lost_before, self._state.lost = self._state.lost, ""
        self._events.begins(kernel.handle)
        began = self._clock()
        with self._recovery.running_cell():
            async with self._start_queue.slot():
                outcome = await run_cell(kernel, cell, grace_s=self._grace_s, cpu_s=self._cpu_s)
            if outcome.status is Status.KILLED:
                outcome = await self._after_kill(cell, outcome)
            elif cell.phase is Phase.RUN:
                self._state.note_cell_run(cell.number, self._clock() - began)
                self._state.note_removal(cell)
        cell.state_as_of = self._state.as_of
        return outcome

    async def _settle(self, cell: Cell) -> str:
        """Stop the cell after a failure of the server; return a sentence on its variables.

        The sentence is empty without a live kernel.
        """
        kernel = self._state.kernel
        if kernel is None or kernel.exit is not None:
            return ""
        run = kernel.running
        if run is None:
            return "Variables are kept."
        with Barrier("stopping a cell", self._lifecycle.request.session):
            if not await stop(kernel, run, self._grace_s, cell) and run.status is not None:
                return "The cell was interrupted; variables are kept."
        what = f"The server failed while running cell {cell.number} and ended its kernel"
        if (back := await self._recovery.resume()) is not None:
            return f"{what}. {back.words(cell.number)}"
        cell.caused_loss = self._state.lose(what, self._state.lost_state("the server failed"))
        await self._state.drop()
        return "The kernel was ended: all variables are lost, files in the workspace are kept."

    def _refused(self, cell: Cell, refusal: Failure) -> CellOutcome:
        cell.take(refusal)
        if cell.installed:
            cell.notice(cell.installed)
        if refusal.name != "PolicyError":
            return CellOutcome(Status.ERROR)
        self._events.note("refusal", cell=cell.number, reasons=refusal.value.splitlines())
        return CellOutcome(Status.ERROR, cause="refused by the import policy; nothing was run")

    async def _after_kill(self, cell: Cell, outcome: CellOutcome) -> CellOutcome:
        """Restore a killed kernel from a checkpoint or the last save, else start a fresh one.

        If the session is reset or closed, only drop the kernel. Returns the outcome, with
        `state_kept` set if variables were restored.
        """
        if cell.stop_reason in AT_ONCE:  # reset and close report the loss
            await self._state.drop()
            return outcome
        alive = await self._recovery.resume()
        if (back := alive or await self._recovery.fall_back_to_save()) is not None:
            cell.rollback = back.words(cell.number)
            if (loss := back.loss(outcome.cause or "its kernel is gone")) is not None:
                what = f"Cell {cell.number} was killed ({outcome.cause}). {cell.rollback}"
                cell.caused_loss = self._state.notifications.add(what, loss)
            if alive is None:
                await self._begin_anew(cell)
            return replace(outcome, state_kept=True)
        cause = outcome.cause or "its kernel is gone"
        loss = self._state.lost_state(cause)
        cell.caused_loss = self._state.lose(f"Cell {cell.number} was killed ({cause})", loss)
        await self._state.drop()
        await self._begin_anew(cell)
        return outcome

    async def _begin_anew(self, cell: Cell) -> None:
        try:
            with anyio.move_on_after(RESTART_S):
                await self._lifecycle.ensure()
        except KernelMcpError as error:
            cell.notice(f"A fresh kernel could not be started: {error}")
