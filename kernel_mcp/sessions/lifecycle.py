"""The kernel of a session: start, death between cells, hibernation, and the notice of each loss."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.abc

from kernel_mcp.barriers import Barrier
from kernel_mcp.environments.layer import Layer
from kernel_mcp.environments.uv import ProgressCallback, silence
from kernel_mcp.errors import (
    HibernationError,
    KernelGone,
    KernelMcpError,
    LaunchError,
    UndoError,
)
from kernel_mcp.kernels.factory import KernelRequest, KernelSource
from kernel_mcp.linux.safe_tree import make_private
from kernel_mcp.output.text import one_line
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.audit import Journal
from kernel_mcp.sessions.cell import Ahead, Cell
from kernel_mcp.sessions.checkpoints import Checkpoints
from kernel_mcp.sessions.hibernation import (
    HibernatedState,
    Hibernation,
    RestoreResult,
    nothing_restored,
)
from kernel_mcp.sessions.notifications import Loss, Notice, NotificationQueue
from kernel_mcp.sessions.snapshot import UnsavableError, damage
from kernel_mcp.sessions.words import listing
from kernel_mcp.telemetry.spans import Span

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.launch.checkpoint import Checkpoint
    from kernel_mcp.sessions.session_save import SessionSave


T = TypeVar("T")

REMOVED = "The workspace folder of this session has been removed from outside"


def restore(request: KernelRequest) -> list[str]:
    """Create missing folders of a session again; return a sentence for each. Raises OSError."""
    lost = []
    if not request.workspace.exists():
        make_private(request.workspace)
        lost.append(f"{REMOVED}: its files are gone, and it has a new, empty one")
    if request.layer is not None and not request.layer.exists():
        Layer(request.layer).make()
        lost.append(
            "The folder of this session's own packages has been removed from outside: any packages "
            "that were installed have to be installed again"
        )
    return lost


class ForeignCells:
    """Reports code that other clients of an attached kernel have run, in one notice for all."""

    def __init__(self, notifications: NotificationQueue) -> None:
        self._notifications = notifications
        self._notice: Notice | None = None
        self._count = 0
        self._last: deque[str] = deque(maxlen=SHOWN_FOREIGN)

    def ran(self, code: str) -> None:
        """Report code that another client has run."""
        if self._notice not in self._notifications.pending:
            self._count = 0
            self._last.clear()
        self._count += 1
        self._last.append(one_line(code.strip()[:MOST_READ].partition("\n")[0])[:FOREIGN_CHARS])
        more = self._count - len(self._last)
        parts = [f"{more} other cell{'s' if more > 1 else ''}"] if more else []
        self._notifications.withdraw(self._notice)
        self._notice = self._notifications.add(
            f"another client of this kernel ran: {'; '.join([*parts, *self._last])}"
        )


DEATH_S = 5.0
"""Maximum wait, in seconds, for the end of a kernel that was killed."""
RESUME_ATTEMPTS = 2
"""Number of failed starts from one checkpoint after which it is dropped."""
NOT_ROLLED_BACK = "Files were not rolled back; programs that code had started have ended"
MOST_RUNS = 12
SHOWN_FOREIGN = 5
FOREIGN_CHARS = 120
MOST_READ = 10 * FOREIGN_CHARS
"""Characters of other clients' code that are read to find its first line."""
FILES_KEPT = "files in the workspace are kept"
SHOWN_NAMES = 50
"""Maximum number of lost variables in the text of a notice. The structured result has up to
`notifications.MOST_NAMES`."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """The return of a kernel to an earlier state: that after cell `as_of`, 0 for before all cells.

    `undone` are the cells whose effects are lost, `names` the variables that no longer exist.
    `closed` are files that libraries had open and that have changed since.
    """

    as_of: int
    undone: tuple[int, ...]
    names: tuple[str, ...]
    closed: tuple[str, ...] = ()

    def words(self, killed: int | None = None) -> str:
        """Return a text on the state of the variables and the cells to run again.

        `killed` is the number of a cell that was killed, to run again too; None for none.
        """
        where = f"as after cell {self.as_of}" if self.as_of else "as before the first cell"
        again = [*self.undone, *([killed] if killed is not None else [])]
        text = f"Variables are {where}"
        if again:
            text += f"; run {cells_in_words(again)} again to have what came after it"
        names = f" Gone with that: {listing(self.names[:SHOWN_NAMES])}." if self.names else ""
        return f"{text}. {NOT_ROLLED_BACK}.{names}{closed_words(self.closed)}"

    def loss(self, cause: str) -> Loss | None:
        """Return the loss to report to waiting cells; None if no cell was undone."""
        return Loss(cause, self.names, kept=True) if self.undone else None


def closed_words(paths: Sequence[str]) -> str:
    """Return a sentence on files that libraries no longer have open; empty for none."""
    if not paths:
        return ""
    why = "they have changed since or will change, and what had them open does not know of that"
    return f" Closed, as {why}: {', '.join(paths)}. Close that, and open them or connect anew."


def cells_in_words(numbers: Sequence[int]) -> str:
    """Return numbers of cells in words, neighbours joined to ranges."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]  # noqa: RUF001
    shown = ", ".join(parts[:MOST_RUNS]) + (", …" if len(parts) > MOST_RUNS else "")
    return f"{'cell' if len(numbers) == 1 else 'cells'} {shown}"


class KernelLifecycle:
    """Owns one session's kernel. Only one task at a time may use it.

    `request` describes the next kernel. `awake` is False for a hibernated session, which calls
    `admit` before it gets a kernel. `used` is True if the kernel has variables of cells. Every loss
    becomes a notice in `notifications`.
    """

    def __init__(
        self,
        request: KernelRequest,
        source: KernelSource,
        *,
        session_save: SessionSave,
        admit: Callable[[], Awaitable[None]],
        notifications: NotificationQueue,
        journal: Journal,
        checkpoints: Checkpoints | None = None,
        on_death: Callable[[], None] = lambda: None,
        last_save: Callable[[], tuple[HibernatedState, int] | None] = lambda: None,
        on_rollback: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_death` is called when a kernel has died between cells and can be restored.

        `on_rollback` is called when the variables return to an earlier state. `last_save` returns
        the last save of the kernel and the last cell in it; None for none.
        """
        self._last_save = last_save
        self._on_rollback = on_rollback
        self.checkpoints = checkpoints or Checkpoints("off", time.monotonic, notifications.add)
        self._on_death = on_death
        self.request = request
        self.kernel: Kernel | None = None
        self.awake = True
        self.used = False
        self.notifications = notifications
        self._source = source
        self._admit = admit
        self._journal = journal
        self._worked: list[int] = []
        self._missed = False
        self._begun: Checkpoint | None = None
        self._folder = ""
        self._engaged = False
        self._hibernation_notice: Notice | None = None
        self._preemptible: set[anyio.CancelScope] = set()
        self._hibernation = Hibernation(session_save, start=self._start_beside)
        self._foreign_cells = ForeignCells(notifications)
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def hibernated(self) -> HibernatedState | None:
        """The saved state of a hibernated session; None for others."""
        return self._hibernation.hibernated

    @property
    def holds(self) -> bool:
        """True if variables of cells exist, in a kernel or in a save."""
        return self.used or self.hibernated is not None

    @property
    def state_as_of(self) -> int | None:
        """The last cell whose effects the variables have; None without variables."""
        return self._worked[-1] if self.holds and self._worked else None

    def note_cell_run(self, cell: int, seconds: float) -> None:
        """Note that the variables have the effects of `cell`, which ran for `seconds`."""
        self._worked.append(cell)
        self.checkpoints.worked(seconds)

    def note_removal(self, cell: Cell) -> None:
        """Add notices of variables that `cell` has removed without a `del` that names them."""
        count, names = cell.removed
        if not count:
            return
        loss = Loss.of(f"cell {cell.number} removed them", names, count - len(names))
        what = "1 variable" if count == 1 else f"{count:,} variables"
        text = f"Cell {cell.number} removed {what} without a `del` of them.{lost_names(loss)}"
        before = self._worked[-2] if len(self._worked) > 1 else 0
        checkpoint = self.checkpoints.at(before)
        if checkpoint is not None and (as_of := self.checkpoints.state_of(checkpoint)):
            text = f"{text} undo brings variables back as they were after cell {as_of}."
        cell.own = self.notifications.add(text, loss)
        cell.notice(text)

    def lost_state(self, cause: str) -> Loss:
        """Return the loss if all variables were lost now, because of `cause`."""
        if self.hibernated is not None:
            untold = (
                self.hibernated.gone
                if self._hibernation_notice in self.notifications.pending
                else ()
            )
            return Loss.of(cause, dict.fromkeys((*untold, *self.hibernated.names)))
        if self.kernel is None or not self.used:
            return Loss(cause)
        return Loss.of(cause, self.kernel.names, self.kernel.names.more)

    @contextmanager
    def engaged(self) -> Iterator[None]:
        """Report no death of the kernel inside this block: the running cell reports it."""
        used, self.used = self.used, True
        self._engaged = True
        try:
            yield
        except KernelGone:
            self.used = used
            raise
        finally:
            self._engaged = False
            if self.kernel is not None:
                self._miss(self.kernel)

    def watch_in(self, tasks: anyio.abc.TaskGroup) -> None:
        """Watch each kernel in this task group, to detect its death."""
        self._tasks = tasks
        if self.kernel is not None:
            tasks.start_soon(self._watch, self.kernel)

    async def ensure(self, progress: ProgressCallback = silence) -> Kernel:
        """Return the live kernel, or start one and load the saved variables.

        Raises KernelMcpError; a hibernated session then stays hibernated.
        """
        if self.kernel is not None and self.kernel.exit is None:
            if self._missed or self.request.workspace.exists():
                return self.kernel
            if self.used:
                self._miss_workspace()
                return self.kernel
            await self.drop()
        await self.note_death()
        if self.kernel is not None:
            return self.kernel
        was_hibernated = not self.awake
        if was_hibernated:
            await self._admit()
        try:
            self.kernel = await self._begin(progress)
        except BaseException:
            self.awake = not was_hibernated
            raise
        return self.kernel

    async def drop(self) -> None:
        """End the kernel."""
        kernel, self.kernel, self.used = self.kernel, None, False
        if self.hibernated is None:
            self._worked.clear()
        if kernel is not None:
            self.checkpoints.drop_all(kernel)
        if kernel is not None:
            with Barrier("ending a kernel", self.request.session):
                await kernel.aclose()

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
        await self.drop()
        self.kernel = fresh
        await self._hibernation.end()
        self.notifications.withdraw(self._hibernation_notice)
        self._hibernation_notice = None
        self.notifications.accept_losses()

    async def hibernate(
        self, hibernated: HibernatedState, *, forced: bool, saved: HibernatedState | None = None
    ) -> bool:
        """Save the variables and end the kernel; return False if `cancel_hibernation` was called.

        `saved` is the last save of the kernel if nothing has changed since, else None. Raises
        HibernationError if something would be lost and it is not `forced`. Raises KernelMcpError or
        OSError if the server cannot save. The kernel continues in these cases.
        """
        with Span("hibernate", session=self.request.session) as span, self.preemptible() as scope:
            told = False
            try:
                if self.kernel is not None and self.kernel.exit is not None:
                    await self.note_death()
                self._engaged = True
                left = self.hibernated  # the save of a kernel that has died, if any
                hibernated = left or await self._prepare(hibernated, forced=forced, saved=saved)
                told = not scope.cancel_called
            finally:
                self._engaged = False
                if not told and self.kernel is not None:
                    self._miss(self.kernel)
        if scope.cancel_called:
            span.note(outcome="needed")
            if self.hibernated is None:
                await self._hibernation.give_up()
            return False
        if self.hibernated is None and (hibernated.gone or hibernated.failure):
            self._hibernation_notice = self._report_hibernation(hibernated)
        self._hibernation.hibernated = hibernated
        self.awake = False
        count = len(hibernated.dump.names) if hibernated.dump is not None else 0
        self._journal.hibernated(count, len(hibernated.gone), hibernated.size, hibernated.failure)
        await self.drop()
        return True

    async def _prepare(
        self, hibernated: HibernatedState, *, forced: bool, saved: HibernatedState | None
    ) -> HibernatedState:
        """Save the variables; if `forced`, use a checkpoint or the last save of a lost kernel."""
        kernel = self.kernel if self.used else None
        if kernel is None:
            return hibernated
        try:
            return await self._hibernation.prepare(kernel, hibernated, forced=forced, saved=saved)
        except HibernationError as error:
            well = kernel.exit is None
            if not forced or (well and isinstance(error, UnsavableError)):
                raise
            with anyio.CancelScope(shield=True):
                back = None if well else await self.resume_from_checkpoint()
                if back is None:
                    back = await self.fall_back_to_save()
                if back is None:
                    return replace(hibernated, failure=str(error))
                cause = f"the session could not be saved anew: {error}"
                self.notifications.add(
                    f"{cause[0].upper()}{cause[1:]}. {back.words()}", back.loss(cause)
                )
            if self.hibernated is None:  # restored from a checkpoint: its kernel runs
                raise
            return self.hibernated

    def continue_from(self, hibernated: HibernatedState, cell: int | None) -> None:
        """Set `hibernated`, an earlier save, for the next kernel to load, and add a notice of it.

        `cell` is the last cell whose effects the variables have; None for none.
        """
        self._hibernation.hibernated = hibernated
        self._worked = [] if cell is None else [cell]
        self.awake = False
        self._hibernation_notice = self._report_hibernation(hibernated)

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

    def lose(self, what: str, loss: Loss) -> Notice:
        """Add a notice that all variables are lost; `what` is a sentence with the reason."""
        text = f"{what}: all variables, imports and definitions made before are lost; {FILES_KEPT}"
        return self.notifications.add(f"{text}.{lost_names(loss)}", loss)

    async def note_death(self) -> None:
        """Restore a kernel that has died between cells, or drop it, and add a notice.

        It is restored from a checkpoint, else from the last save. A live kernel is left alone.
        """
        kernel = self.kernel
        if kernel is None or kernel.exit is None:
            return
        if self.used:
            cause = f"{kernel.exit.story('the kernel')} between cells"
            if (
                back := await self.resume_from_checkpoint() or await self.fall_back_to_save()
            ) is not None:
                self._journal.died(cause)
                self.notifications.add(
                    f"{cause[0].upper()}{cause[1:]}. {back.words()}", back.loss(cause)
                )
                return
            self._lose_dead(kernel)
        await self.drop()

    async def checkpoint_ahead(self, cell: Cell) -> None:
        """Make a checkpoint before a cell, as `cell.ahead` requires.

        If it was requested and cannot be made, a notice of the cell gives the reason.
        """
        self.checkpoints.stir()
        if cell.ahead is Ahead.NO:
            if self.checkpoints.owed:
                await self.checkpoint(self.checkpoints.pay)
            return
        if cell.ahead is not Ahead.ASKED:
            await self.checkpoint(self.checkpoints.ahead)
            return
        try:
            await self.checkpoint(self.checkpoints.asked)
        except LaunchError as error:
            cell.notice(f"No checkpoint was made before this cell: {error}")

    async def checkpoint(self, when: Callable[[Kernel, int], Awaitable[object]]) -> None:
        """Call `when`, a method of `checkpoints` that may copy the kernel, if the kernel is alive.

        A new checkpoint is recorded in the journal. Raises LaunchError if `when` does.
        """
        kernel = self.kernel
        if kernel is None or kernel.exit is not None:
            return
        before = self.checkpoints.newest
        self._engaged, engaged = True, self._engaged
        try:
            await when(kernel, self.state_as_of or 0)
        finally:
            self._engaged = engaged
        if self.checkpoints.newest not in (None, before):
            self._journal.checkpointed(self.state_as_of or 0)
        if not engaged:
            self._miss(kernel)

    def holds_cell(self, number: int) -> bool:
        """Return True if the variables have the effects of a cell."""
        return self.holds and number in self._worked

    @property
    def cells_held(self) -> list[int]:
        """The cells whose effects the variables have, in order."""
        return list(self._worked)

    def start_as_branch(self, kernel: Kernel, checkpoint: Checkpoint, folder: str) -> None:
        """Use a kernel that was restored from another session's `checkpoint`.

        `folder` is the branch's own folder, relative to the workspace.
        """
        self.kernel, self.used = kernel, True
        self.checkpoints.share(checkpoint, 0)
        self._begun, self._folder = checkpoint, folder
        if words := closed_words(kernel.closed_files):
            self.notifications.add(words.strip(), None)

    def release_kernel(self) -> None:
        """Release the kernel without ending it, because another session takes it over."""
        assert self.kernel is not None
        self.checkpoints.drop_all(self.kernel)
        self.kernel, self.used = None, False
        self._worked.clear()

    async def take_over_kernel(self, kernel: Kernel, worked: Sequence[int]) -> list[int]:
        """Use a branch's kernel from now on, and return the cells that are thus undone.

        `worked` are the cells whose effects the branch had at its start.
        """
        gone = [cell for cell in self._worked if cell not in worked]
        await self.drop()
        if self.hibernated is not None:
            await self._hibernation.end()
        self.notifications.withdraw(self._hibernation_notice)
        self.awake, self._hibernation_notice = True, None
        self.kernel, self.used = kernel, True
        self._worked = list(worked)
        self._on_rollback()
        self.checkpoints.worked(0.0)
        assert self._tasks is not None
        self._tasks.start_soon(self._watch, kernel)
        return gone

    async def undo(self, cells: int) -> Rollback:
        """Return to the state before the last `cells` cells, or to the next earlier checkpoint.

        Raises UndoError, and LaunchError if the variables were lost in the attempt.
        """
        self.checkpoints.stir()
        await self.note_death()
        kernel, worked = self.kernel, self._worked
        if self.hibernated is not None:
            raise UndoError(
                "Nothing was undone: what is kept of this session are its last variables alone, "
                "and the next cell brings them back. To begin anew, call reset."
            )
        if kernel is None or not self.used or not worked:
            raise UndoError("There is nothing to undo: no cell has run here with this kernel.")
        if cells > len(worked):
            raise UndoError(
                f"cells={cells} is more than there are: {cells_in_words(worked)} can be undone."
            )
        wanted = worked[-cells - 1] if cells < len(worked) else 0
        if self.checkpoints.at(wanted) is None:
            raise UndoError(
                f"No checkpoint reaches back before cell {worked[-cells]}: nothing was undone. "
                f"Checkpoints: {self.checkpoints.words(kernel)}. Set right by code what the cell "
                f"did, or call reset and run again what is wanted.{self.checkpoints.advice(kernel)}"
            )
        self._engaged = True
        try:
            kernel.kill()
            with anyio.move_on_after(DEATH_S):
                await kernel.dead.wait()
            back = await self.resume_from_checkpoint(wanted)
        finally:
            self._engaged = False
        if back is None:
            self._on_rollback()
            self.lose("An undo has failed", self.lost_state("undo failed"))
            await self.drop()
            raise LaunchError(
                "The checkpoint could not be woken, and the kernel was ended for it: all variables "
                f"are lost, {FILES_KEPT}. A fresh kernel starts with the next cell."
            )
        self._journal.undone(back.undone)
        return back

    async def resume_from_checkpoint(self, not_after: int | None = None) -> Rollback | None:
        """Restore a dead kernel from its newest checkpoint; return None if none can be used.

        With `not_after` it is the newest checkpoint without effects of cells after that number.
        """
        kernel, known = self.kernel, self.checkpoints
        if kernel is None or kernel.exit is None or kernel.handle.sandbox_group is None:
            return None
        known.stir()
        failures: Counter[Checkpoint] = Counter()
        while True:
            found = known.newest if not_after is None else known.at(not_after)
            if found is None:
                return None
            with Barrier("going on from a checkpoint", self.request.session) as barrier:
                await kernel.handle.sandbox_group.clear()
                fresh = await kernel.wake(found, self._folder if found is self._begun else "")
            if barrier.failure is None:
                break
            failures[found] += 1
            if not found.usable or failures[found] == RESUME_ATTEMPTS:
                known.drop(kernel, found)
        self.kernel = fresh
        as_of = known.state_of(found)
        undone = tuple(cell for cell in self._worked if cell > as_of)
        del self._worked[len(self._worked) - len(undone) :]
        self._on_rollback()
        known.back_at(fresh, found)
        gone = [name for name in kernel.names if name not in set(fresh.names)]
        assert self._tasks is not None
        self._tasks.start_soon(self._watch, fresh)
        with Barrier("ending a kernel", self.request.session):
            await kernel.aclose()
        self._journal.revived(as_of)
        return Rollback(as_of, undone, tuple(gone), fresh.closed_files)

    async def fall_back_to_save(self) -> Rollback | None:
        """Drop a dead kernel, and set its last save for the next kernel to load.

        Returns None, and drops nothing, if there is no save or its file is damaged.
        """
        found = self._saved()
        if found is None or self.kernel is None:
            return None
        hibernated, as_of = found
        if hibernated.dump is None or await damage(hibernated.dump):
            return None
        undone = tuple(cell for cell in self._worked if cell > as_of)
        gone = [name for name in self.kernel.names if name not in set(hibernated.back)]
        self._hibernation.hibernated = hibernated
        await self.drop()
        del self._worked[len(self._worked) - len(undone) :]
        return Rollback(as_of, undone, tuple(gone))

    def _saved(self) -> tuple[HibernatedState, int] | None:
        """Return the last save and the last cell in it; None without one, or if it was undone."""
        found = self._last_save() if self.used else None
        return found if found is not None and found[1] in self._worked else None

    def _miss(self, kernel: Kernel) -> None:
        if kernel is self.kernel and self.used and kernel.exit is not None:
            if self.checkpoints.newest is not None or self._saved() is not None:
                self._on_death()
                return
            self._lose_dead(kernel)

    def _lose_dead(self, kernel: Kernel) -> None:
        assert kernel.exit is not None
        cause = f"{kernel.exit.story('the kernel')} between cells"
        self._journal.died(cause)
        self.lose(cause[0].upper() + cause[1:], self.lost_state(cause))
        self.used = False

    def _report_hibernation(self, hibernated: HibernatedState) -> Notice:
        """Add a notice of a hibernated or persisted session, with the loss if any."""
        loss: Loss | None
        if hibernated.failure:
            loss = self.lost_state(f"the session was hibernated, and {hibernated.failure}")
        elif hibernated.gone:
            loss = Loss.of(
                f"hibernation could not keep {listing(hibernated.gone)}", hibernated.gone
            )
        else:
            loss = Loss(hibernated.after) if hibernated.after else None
        return self.notifications.add(hibernated.remark(), loss)

    async def _begin(self, progress: ProgressCallback) -> Kernel:
        if self.hibernated is None:
            return await self._start(self.request, progress)
        with Span("wake", session=self.request.session):
            return await self._restore(self.hibernated, progress)

    async def _restore(self, hibernated: HibernatedState, progress: ProgressCallback) -> Kernel:
        await progress("Bringing the hibernated session back")
        kernel = await self._start(self.request, progress)
        try:
            result = await self._hibernation.restore(kernel)
        except HibernationError as error:
            await kernel.aclose()
            kernel, result = await self._restore_some(hibernated, str(error), progress)
        except BaseException:
            await kernel.aclose()
            raise
        await self._hibernation.end(used=True)
        self._journal.woke(len(result.back), len(result.lost))
        self.used = result.restored
        if not result.restored:
            self._worked.clear()
        kernel.names.add(result.back)
        was_hibernated, self._hibernation_notice = self._hibernation_notice, None
        if result.notice:
            known = was_hibernated.loss if was_hibernated is not None else None
            self.notifications.withdraw(was_hibernated)
            self.notifications.add(result.notice, _loss_of(result, known))
        return kernel

    async def _restore_some(
        self, hibernated: HibernatedState, failure: str, progress: ProgressCallback
    ) -> tuple[Kernel, RestoreResult]:
        """Start a kernel with the variables that do not crash it, or with none.

        `failure` is the reason why the last attempt failed. It is reported if none are loaded.
        """
        fatal: dict[str, str] | None = None
        with suppress(HibernationError):
            fatal = await self._hibernation.find_fatal()
        kernel = await self._start(self.request, progress)
        if fatal is not None:
            try:
                return kernel, await self._hibernation.restore(kernel, fatal)
            except HibernationError as error:
                failure = str(error)
                await kernel.aclose()
                kernel = await self._start(self.request, progress)
            except BaseException:
                await kernel.aclose()
                raise
        return kernel, nothing_restored(hibernated, failure)

    async def _start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        for text in restore(request):
            self.notifications.add(text)
        self._missed = False
        kernel = await self._launch(request, progress)
        kernel.tell, kernel.overheard = self.notifications.add, self._foreign_cells.ran
        kernel.handle.egress.open(request.network, self._journal.connected)
        if self._folder:
            try:
                await kernel.become_branch(self._folder)
            except BaseException:
                await kernel.aclose()
                raise
        assert self._tasks is not None
        self._tasks.start_soon(self._watch, kernel)
        return kernel

    async def _launch(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        began = time.monotonic()
        with Span("launch", session=request.session) as span:
            try:
                kernel = await self._source.start(request, progress)
            except Exception:
                self._journal.not_started()
                raise
            kind = kernel.handle.kind
            span.note(kind=kind)
        self._journal.started(kind, time.monotonic() - began)
        return kernel

    async def _watch(self, kernel: Kernel) -> None:
        await kernel.watch()
        if not self._engaged:
            self._miss(kernel)

    async def _start_beside(self) -> Kernel:
        return await self._start(replace(self.request, beside=True), silence)

    def _miss_workspace(self) -> None:
        """Add a notice, once, that the workspace of the live kernel was removed."""
        self._missed = True
        self.notifications.add(
            f"{REMOVED}: its files are gone, and this kernel can write none. Variables are kept; "
            "save what you need, then call reset for a new workspace"
        )


def lost_names(loss: Loss) -> str:
    """Return a sentence with up to `SHOWN_NAMES` names; empty without names."""
    if not loss.names:
        return ""
    more = loss.more + max(0, len(loss.names) - SHOWN_NAMES)
    others = f" and {more:,} more" if more else ""
    return f" Lost: {listing(loss.names[:SHOWN_NAMES])}{others}."


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
