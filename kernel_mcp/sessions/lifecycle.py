"""The kernel of a session: start, reset and hibernation, and the checkpoints before cells."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio

from kernel_mcp.environments.uv import ProgressCallback, silence
from kernel_mcp.errors import HibernationError, KernelMcpError, LaunchError
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.sessions.cell import Ahead, Cell
from kernel_mcp.sessions.events import SessionEvents
from kernel_mcp.sessions.hibernation import Hibernation, RestoreResult, SavedState
from kernel_mcp.sessions.notifications import Loss
from kernel_mcp.sessions.recovery import KernelRecovery
from kernel_mcp.sessions.snapshot import UnsavableError
from kernel_mcp.sessions.starter import REMOVED, KernelStarter, restore
from kernel_mcp.telemetry.spans import Span

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.sessions.session_save import SessionSave


T = TypeVar("T")


class KernelLifecycle:
    """Starts, replaces, saves and ends one session's kernel. Only one task at a time may use it.

    `request` describes the next kernel. `awake` is False for a hibernated session, which calls
    `admit` before it gets a kernel.
    """

    def __init__(
        self,
        request: KernelRequest,
        starter: KernelStarter,
        recovery: KernelRecovery,
        *,
        session_save: SessionSave,
        admit: Callable[[], Awaitable[None]],
        events: SessionEvents,
    ) -> None:
        self.request = request
        self.state = recovery.state
        self.recovery = recovery
        self.awake = True
        self._starter = starter
        self._admit = admit
        self._events = events
        self._missed = False
        self._preemptible: set[anyio.CancelScope] = set()
        self._hibernation = Hibernation(session_save, start=self._start_beside)

    async def ensure(self, progress: ProgressCallback = silence) -> Kernel:
        """Return the live kernel, or start one and load the saved variables.

        Raises KernelMcpError; a hibernated session then stays hibernated.
        """
        state = self.state
        if state.kernel is not None and state.kernel.exit is None:
            if self._missed or self.request.workspace.exists():
                return state.kernel
            if state.used:
                self._miss_workspace()
                return state.kernel
            await state.drop()
        await self.recovery.note_death()
        if state.kernel is not None:
            return state.kernel
        was_hibernated = not self.awake
        if was_hibernated:
            await self._admit()
        try:
            state.kernel = await self._begin(progress)
        except BaseException:
            self.awake = not was_hibernated
            raise
        return state.kernel

    async def start_fresh(self) -> Kernel:
        """Start a second kernel, to replace the live one or the saved variables.

        Raises KernelMcpError; the session is unchanged then.
        """
        was_hibernated = not self.awake
        if was_hibernated:
            await self._admit()
        try:
            return await self._start_beside()
        except KernelMcpError as error:
            self.awake = not was_hibernated
            raise LaunchError(
                f"No fresh kernel could be started: {error}\nNothing was reset: the session and "
                "its variables are as they were. Try again, or end it with close_session."
            ) from error
        except BaseException:
            self.awake = not was_hibernated
            raise

    async def forget(self, fresh: Kernel | None) -> None:
        """End the kernel, remove the save, and use the kernel `fresh` from now on.

        Earlier losses are not reported to later cells.
        """
        await self.state.drop()
        self.state.kernel = fresh
        await self._end_save()
        self.state.notifications.withdraw(self.state.forget_hibernation())
        self.state.notifications.accept_losses()

    async def hibernate(self, asked: SavedState, *, saved: SavedState | None = None) -> bool:
        """Save the variables and end the kernel; return False if `cancel_hibernation` was called.

        `asked` has the reason and the idle time. `saved` is the last save of the kernel if nothing
        has changed since, else None. Raises HibernationError if something would be lost and it is
        not forced. Raises KernelMcpError or OSError if the server cannot save. The kernel continues
        in these cases.
        """
        state = self.state
        with Span("hibernate", session=self.request.session) as span, self.preemptible() as scope:
            told = False
            try:
                if state.kernel is not None and state.kernel.exit is not None:
                    await self.recovery.note_death()
                with self.recovery.unreported():
                    left = state.pending_restore  # the save of a kernel that has died, if any
                    pending = left or await self._prepare(asked, saved)
                told = not scope.cancel_called
            finally:
                if not told and state.kernel is not None:
                    self.recovery.check(state.kernel)
        if scope.cancel_called:
            span.note(outcome="needed")
            if state.pending_restore is None:
                await self._hibernation.discard_save()
            return False
        if state.pending_restore is None and (pending.gone or pending.failure):
            state.report_hibernation(pending)
        state.pending_restore = pending
        self.awake = False
        count = len(pending.dump.names) if pending.dump is not None else 0
        self._events.note(
            "hibernate",
            saved=count,
            lost=len(pending.gone),
            size=pending.size,
            cause=pending.failure,
            reason=asked.reason,
            idle_s=round(asked.idle_s, 1),
        )
        await state.drop()
        return True

    async def _prepare(self, asked: SavedState, saved: SavedState | None) -> SavedState:
        """Save the variables; if forced, use a checkpoint or the last save of a lost kernel."""
        kernel = self.state.kernel if self.state.used else None
        if kernel is None:
            return asked
        try:
            return await self._hibernation.prepare(kernel, asked, saved)
        except HibernationError as error:
            well = kernel.exit is None
            if not asked.forced or (well and isinstance(error, UnsavableError)):
                raise
            with anyio.CancelScope(shield=True):
                back = None if well else await self.recovery.resume()
                if back is None:
                    back = await self.recovery.fall_back_to_save()
                if back is None:
                    return replace(asked, failure=str(error))
                self.recovery.report(f"the session could not be saved anew: {error}", back)
            if self.state.pending_restore is None:  # restored from a checkpoint: its kernel runs
                raise
            return self.state.pending_restore

    def continue_from(self, pending: SavedState, cell: int | None) -> None:
        """Restore `pending`, an earlier save, into the next kernel, and add a notice of it.

        `cell` is the last cell whose effects the variables have; None for none.
        """
        self.state.pending_restore = pending
        self.state.worked = [] if cell is None else [cell]
        self.awake = False
        self.state.report_hibernation(pending)

    async def unless_needed(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of `work`; None if `cancel_hibernation` was called before its end."""
        with self.preemptible():
            return await work()
        return None

    @contextmanager
    def preemptible(self) -> Iterator[anyio.CancelScope]:
        """Cancel this block, which may wait for a lock, when `cancel_hibernation` is called."""
        with anyio.CancelScope() as scope:
            self._preemptible.add(scope)
            try:
                yield scope
            finally:
                self._preemptible.discard(scope)

    def cancel_hibernation(self) -> None:
        """Cancel every `hibernate` and `unless_needed`, also those that wait for a lock."""
        for scope in self._preemptible:
            scope.cancel()

    async def checkpoint_ahead(self, cell: Cell) -> None:
        """Make a checkpoint before a cell, as `cell.ahead` requires.

        If it was requested and cannot be made, a notice of the cell gives the reason.
        """
        checkpoints = self.state.checkpoints
        checkpoints.stir()
        if cell.ahead is Ahead.NO:
            if checkpoints.owed:
                await self.checkpoint(checkpoints.pay)
            return
        if cell.ahead is not Ahead.ASKED:
            await self.checkpoint(checkpoints.ahead)
            return
        try:
            await self.checkpoint(checkpoints.asked)
        except LaunchError as error:
            cell.notice(f"No checkpoint was made before this cell: {error}")

    async def checkpoint(self, when: Callable[[Kernel, int], Awaitable[object]]) -> None:
        """Call `when`, a method of `checkpoints` that may copy the kernel, if the kernel is alive.

        A new checkpoint is an event. Raises LaunchError if `when` does.
        """
        state, kernel = self.state, self.state.kernel
        if kernel is None or kernel.exit is not None:
            return
        before = state.checkpoints.newest
        with self.recovery.unreported():
            await when(kernel, state.as_of or 0)
        if state.checkpoints.newest not in (None, before):
            self._events.note("checkpoint", cell=state.as_of or 0)
        self.recovery.check(kernel)

    async def take_over_kernel(self, kernel: Kernel, worked: Sequence[int]) -> list[int]:
        """Use a branch's kernel from now on, and return the cells that are thus undone.

        `worked` are the cells whose effects the branch had at its start.
        """
        state = self.state
        gone = [cell for cell in state.worked if cell not in worked]
        await state.drop()
        if state.pending_restore is not None:
            await self._end_save()
        state.notifications.withdraw(state.forget_hibernation())
        self.awake = True
        state.kernel, state.used = kernel, True
        state.worked = list(worked)
        self.recovery.on_rollback()
        state.checkpoints.worked(0.0)
        self.recovery.watch(kernel)
        return gone

    async def _begin(self, progress: ProgressCallback) -> Kernel:
        """Start a kernel, and load the save of a hibernated session."""
        start, pending = partial(self._start, self.request, progress), self.state.pending_restore
        if pending is None:
            return await start()
        with Span("wake", session=self.request.session):
            await progress("Bringing the hibernated session back")
            kernel, result = await self._hibernation.wake(pending, start)
            await self._end_save(used=True)
            self._note_restored(kernel, result)
            return kernel

    def _note_restored(self, kernel: Kernel, result: RestoreResult) -> None:
        self._events.note("wake", back=len(result.back), lost=len(result.lost))
        self.state.used = result.restored
        if not result.restored:
            self.state.worked.clear()
        kernel.names.add(result.back)
        notice = self.state.forget_hibernation()
        if result.notice:
            known = notice.loss if notice is not None else None
            self.state.notifications.withdraw(notice)
            self.state.notifications.add(result.notice, _loss_of(result, known))

    async def _end_save(self, *, used: bool = False) -> None:
        self.state.pending_restore = None
        await self._hibernation.end(used=used)

    async def _start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        for text in restore(request):
            self.state.notifications.add(text)
        self._missed = False
        kernel = await self._starter.start(request, progress, self.state.branch_folder)
        self.recovery.watch(kernel)
        return kernel

    async def _start_beside(self) -> Kernel:
        return await self._start(replace(self.request, beside=True), silence)

    def _miss_workspace(self) -> None:
        """Add a notice, once, that the workspace of the live kernel was removed."""
        self._missed = True
        self.state.notifications.add(
            f"{REMOVED}: its files are gone, and this kernel can write none. Variables are kept; "
            "save what you need, then call reset for a new workspace"
        )


def _loss_of(result: RestoreResult, known: Loss | None) -> Loss | None:
    """Return the loss of a restored session; None if nothing is lost.

    `known` is the loss that was reported at the hibernation. Its names are used if `result` has
    none.
    """
    if result.loss is None:
        return None
    if known is not None and not result.lost:
        return replace(known, cause=result.loss)
    return Loss.of(result.loss, result.lost)
