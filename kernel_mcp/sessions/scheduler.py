"""The scheduler of one session: a task that runs its cells one after the other."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import anyio
import anyio.abc

from kernel_mcp.barriers import Barrier
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.sessions.cell import Cell, StopReason, narrate
from kernel_mcp.sessions.notifications import Notice
from kernel_mcp.sessions.recovery import KernelRecovery
from kernel_mcp.sessions.runner import CellRunner
from kernel_mcp.sessions.session_persistence import SavedSession, SessionPersistence

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel


class ScheduledSession(SavedSession, Protocol):
    """The part of a session that its scheduler uses."""

    request: KernelRequest
    recovery: KernelRecovery
    persistence: SessionPersistence
    closing: anyio.Event
    """Set once the session is closed."""


S = TypeVar("S", bound=ScheduledSession)
S_contra = TypeVar("S_contra", contravariant=True)


class Preparation(Protocol[S_contra]):
    """Work before some cells run: installing the packages that their code requests."""

    def concerns(self, code: str) -> bool:
        """Return True if a cell with this code may need preparation."""

    async def prepare(self, session: S_contra, cell: Cell) -> None:
        """Prepare a cell, and set its `plain` and `installed`.

        Raises KernelMcpError if the cell must not run.
        """


class CellScheduler(Generic[S]):
    """Runs the cells of a session in order; makes checkpoints and restores the kernel in between.

    `begun` is set after a start of the kernel by `begin`.
    """

    def __init__(
        self,
        session: S,
        runner: CellRunner,
        preparation: Preparation[S] | None,
        clock: Callable[[], float],
    ) -> None:
        """`clock` is the session's."""
        self.begun = anyio.Event()
        self.last_ran = -math.inf
        """Time of the end of the last cell, by `clock`."""
        self._session = session
        self._queue = session.queue
        self._runner = runner
        self._preparation = preparation
        self._clock = clock
        self._ahead: anyio.CancelScope | None = None
        self._wake = anyio.Event()
        self._ended: Cell | None = None

    @property
    def starting(self) -> bool:
        """True while the kernel is being started, by `begin`, before there is a cell."""
        return self._ahead is not None

    def begin(self) -> None:
        """Start the kernel before there is a cell; `begun` is set afterwards.

        A failure is reported by the first cell.
        """
        self._ahead = anyio.CancelScope()
        self._wake.set()

    def wake(self) -> None:
        """Look for cells, for a kernel that has died, and whether the session is closed."""
        self._wake.set()

    async def interrupt(self, cell: Cell | None = None) -> Cell | None:
        """Interrupt `cell`, by default the running one, and wait for its end.

        A waiting cell is withdrawn. Returns the cell; None if nothing runs.
        """
        if cell is None and self._queue.current is None and self._ahead is not None:
            return self._queue.withdraw("it was stopped while its kernel was starting")
        if cell is not None and self._queue.withdraw("it was stopped before it began", cell):
            return cell
        cell = cell or self._queue.current
        if cell is not None:
            cell.stop(StopReason.INTERRUPT)
            await cell.finished.wait()
        return cell

    async def follow(
        self,
        cell: Cell,
        wait_s: float,
        report: ProgressCallback | None,
        within: Callable[[anyio.CancelScope], AbstractContextManager[None]] | None = None,
    ) -> float:
        """Wait until `cell` has ended, at most `wait_s` seconds, reporting new output meanwhile.

        `within` is entered with the scope of that, whose time it may change. Returns the seconds
        that are left.
        """
        try:
            with anyio.move_on_after(wait_s) as scope, ExitStack() as stack:
                if within is not None:
                    stack.enter_context(within(scope))
                if report is None:
                    await cell.finished.wait()
                else:
                    await narrate(cell, report, self._clock)
            return max(0.0, scope.deadline - anyio.current_time())
        finally:
            self._session.family.last_used = self._clock()

    def halt(self, reason: StopReason, lost: Notice | None) -> None:
        """End every cell, because the session is reset or closed; `lost` is the notice of that."""
        if self._ahead is not None:
            self._ahead.cancel()
        self._session.lifecycle.cancel_hibernation()
        self._queue.halt(reason, lost)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Run queued cells until the session is closed."""
        session, persistence = self._session, self._session.persistence
        closing = session.closing
        async with anyio.create_task_group() as tasks:
            session.recovery.watch_in(tasks)
            task_status.started()
            while not closing.is_set():
                await self._next()
                await self._start_ahead()
                await persistence.mark_undone()
                while self._queue and not closing.is_set():
                    await self._prepare_next()
                    async with session.turn:
                        await self._run_next()
                        await self._checkpoint(session.kernel_state.checkpoints.after)
                    await self._save_end()
                    await persistence.mark_undone()
            tasks.cancel_scope.cancel()

    async def _next(self) -> None:
        """Wait for work; make a checkpoint in a pause, and restore a kernel that has died."""
        session, checkpoints = self._session, self._session.kernel_state.checkpoints
        kernel = session.kernel
        with anyio.move_on_after(checkpoints.pause_s(kernel)) as pause:
            await self._wake.wait()
            self._wake = anyio.Event()
        if pause.cancelled_caught:
            async with session.turn:
                if kernel is session.kernel and not self._queue:
                    await self._checkpoint(checkpoints.pause)
        elif (kernel := session.kernel) is not None and kernel.exit is not None:
            with Barrier("looking after a kernel that has ended", session.handle):
                async with session.turn:
                    await session.recovery.note_death()

    async def _checkpoint(self, when: Callable[[Kernel, int], Awaitable[object]]) -> None:
        if self._session.installing.locked():  # another thread of the kernel may be importing
            return
        with Barrier("making a checkpoint", self._session.handle):
            await self._session.lifecycle.checkpoint(when)

    async def _start_ahead(self) -> None:
        if self._ahead is not None:
            with self._ahead, Barrier("starting a kernel ahead", self._session.handle):
                async with self._session.turn:
                    await self._session.lifecycle.ensure()
            self._ahead = None
            self.begun.set()

    async def _prepare_next(self) -> None:
        """Begin the next cell if it needs preparation, and prepare it without holding `turn`."""
        work, first, session = self._preparation, self._queue.first, self._session
        if work is None or first is None or not session.request.interpreter.offers("install"):
            return
        if not work.concerns(first.code):
            return
        async with session.turn:  # wait for earlier users of the kernel
            cell = self._queue.begin()
        if cell is not None:
            await self._runner.prepare(cell, partial(work.prepare, session))

    async def _save_end(self) -> None:
        """Save the end of a cell that a task follows, without `turn`: a reset waits for that."""
        if self._ended is not None and self._ended.lasting:
            with Barrier("saving the end of a task", self._session.handle):
                await self._session.persistence.save_cells()
        self._ended = None

    async def _run_next(self) -> None:
        cell = self._queue.current or self._queue.begin()
        if cell is None:
            return
        session = self._session
        session.persistence.log_cell(cell)
        session.notebooks.begins(cell)
        try:
            if cell.outcome is None:
                await self._runner.run(cell)
            if session.kernel is not None:
                self._queue.cells.notebook = session.kernel.notebook_metadata
        finally:
            with Barrier("putting a cell's output away", session.handle):
                self._queue.end(cell)
            session.family.last_used = self.last_ran = self._clock()
            session.persistence.touch()
        await session.notebooks.save()
        self._ended = cell
