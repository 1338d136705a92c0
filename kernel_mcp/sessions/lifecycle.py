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
    Hibernation,
    Sleep,
    Waking,
    nothing_back,
)
from kernel_mcp.sessions.losses import Ledger, Loss, Notice
from kernel_mcp.sessions.snapshot import UnsavableError, damage
from kernel_mcp.sessions.words import listing
from kernel_mcp.telemetry.spans import Span

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.launch.checkpoint import Checkpoint
    from kernel_mcp.sessions.shelf import Shelf


T = TypeVar("T")

REMOVED = "The workspace folder of this session has been removed from outside"


def restore(request: KernelRequest) -> list[str]:
    """Create missing folders of a session, and return a sentence for each. Raises OSError."""
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


class Overheard:
    """Reports code that other clients of an attached kernel have run, in one notice for all."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._notice: Notice | None = None
        self._count = 0
        self._last: deque[str] = deque(maxlen=SHOWN_OVERHEARD)

    def ran(self, code: str) -> None:
        """Report code that another client has run."""
        if self._notice not in self._ledger.pending:
            self._count = 0
            self._last.clear()
        self._count += 1
        self._last.append(one_line(code.strip()[:MOST_READ].partition("\n")[0])[:OVERHEARD_CHARS])
        more = self._count - len(self._last)
        parts = [f"{more} other cell{'s' if more > 1 else ''}"] if more else []
        self._ledger.withdraw(self._notice)
        self._notice = self._ledger.add(
            f"another client of this kernel ran: {'; '.join([*parts, *self._last])}"
        )


DEATH_S = 5.0
"""Longest wait, in seconds, for the end of a kernel that was killed."""
WAKES = 2
"""Failed starts from one checkpoint after which it is given up."""
NOT_ROLLED_BACK = "Files were not rolled back; programs that code had started have ended"
MOST_RUNS = 12
SHOWN_OVERHEARD = 5
OVERHEARD_CHARS = 120
MOST_READ = 10 * OVERHEARD_CHARS
"""Characters of other clients' code that are searched for its first line."""
FILES_KEPT = "files in the workspace are kept"
SHOWN_NAMES = 50
"""Names of lost variables in a notice; the structured result has up to `losses.MOST_NAMES`."""


@dataclass(frozen=True, slots=True)
class Return:
    """The return of a kernel to an earlier state: that after cell `as_of`, 0 for before all cells.

    `undone` are the cells whose effects are gone with it, `names` the variables that no longer
    exist, `closed` files that libraries had open and that have changed since.
    """

    as_of: int
    undone: tuple[int, ...]
    names: tuple[str, ...]
    closed: tuple[str, ...] = ()

    def words(self, killed: int | None = None) -> str:
        """Return which state the variables have and which cells to run again, `killed` included."""
        where = f"as after cell {self.as_of}" if self.as_of else "as before the first cell"
        again = [*self.undone, *([killed] if killed is not None else [])]
        text = f"Variables are {where}"
        if again:
            text += f"; run {cells_in_words(again)} again to have what came after it"
        names = f" Gone with that: {listing(self.names[:SHOWN_NAMES])}." if self.names else ""
        return f"{text}. {NOT_ROLLED_BACK}.{names}{closed_words(self.closed)}"

    def loss(self, cause: str) -> Loss | None:
        """Return the loss that waiting cells would run after; None if no cell was undone."""
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
    """Owns one session's kernel; for one task at a time.

    `request` describes the next kernel. `awake` is False for a hibernated session, which gets a
    kernel after `admit`. `used` says that the kernel holds variables of cells. Every loss goes to
    `ledger`.
    """

    def __init__(
        self,
        request: KernelRequest,
        source: KernelSource,
        *,
        shelf: Shelf,
        admit: Callable[[], Awaitable[None]],
        ledger: Ledger,
        journal: Journal,
        checkpoints: Checkpoints | None = None,
        on_death: Callable[[], None] = lambda: None,
        last_save: Callable[[], tuple[Sleep, int] | None] = lambda: None,
        on_return: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_death` is called when a kernel has died between cells and can be restored.

        `on_return` is called when the variables went back to an earlier state. `last_save` returns
        the last save of the kernel and the last cell in it; None for none.
        """
        self._last_save = last_save
        self._on_return = on_return
        self.checkpoints = checkpoints or Checkpoints("off", time.monotonic, ledger.add)
        self._on_death = on_death
        self.request = request
        self.kernel: Kernel | None = None
        self.awake = True
        self.used = False
        self.ledger = ledger
        self._source = source
        self._admit = admit
        self._journal = journal
        self._worked: list[int] = []
        self._missed = False
        self._begun: Checkpoint | None = None
        self._folder = ""
        self._engaged = False
        self._asleep: Notice | None = None
        self._giving_way: set[anyio.CancelScope] = set()
        self._hibernation = Hibernation(shelf, start=self._start_beside)
        self._overheard = Overheard(ledger)
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def sleep(self) -> Sleep | None:
        """The saved state of a hibernated session; None for others."""
        return self._hibernation.sleep

    @property
    def holds(self) -> bool:
        """True if there are variables of cells, in a kernel or saved."""
        return self.used or self.sleep is not None

    @property
    def state_as_of(self) -> int | None:
        """The last cell whose effects the variables hold; None when there are none."""
        return self._worked[-1] if self.holds and self._worked else None

    def note_work(self, cell: int, seconds: float) -> None:
        """Note that the variables hold the effects of a cell, which ran for so many seconds."""
        self._worked.append(cell)
        self.checkpoints.worked(seconds)

    def note_removal(self, cell: Cell) -> None:
        """Report the variables that `cell` has removed without a `del` that names them."""
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
        cell.own = self.ledger.add(text, loss)
        cell.notice(text)

    def lost_state(self, cause: str) -> Loss:
        """Return the variables that would be lost if the session ended now, because of `cause`."""
        if self.sleep is not None:
            untold = self.sleep.gone if self._asleep in self.ledger.pending else ()
            return Loss.of(cause, dict.fromkeys((*untold, *self.sleep.names)))
        if self.kernel is None or not self.used:
            return Loss(cause)
        return Loss.of(cause, self.kernel.names, self.kernel.names.more)

    @contextmanager
    def engaged(self) -> Iterator[None]:
        """Leave it to the running cell to report a death of the kernel inside this block."""
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
        """Watch each kernel for its death, in this task group."""
        self._tasks = tasks
        if self.kernel is not None:
            tasks.start_soon(self._watch, self.kernel)

    async def ensure(self, progress: ProgressCallback = silence) -> Kernel:
        """Return the live kernel, or start one, which loads the variables if some were saved.

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
        asleep = not self.awake
        if asleep:
            await self._admit()
        try:
            self.kernel = await self._begin(progress)
        except BaseException:
            self.awake = not asleep
            raise
        return self.kernel

    async def drop(self) -> None:
        """End the kernel."""
        kernel, self.kernel, self.used = self.kernel, None, False
        if self.sleep is None:
            self._worked.clear()
        if kernel is not None:
            self.checkpoints.drop_all(kernel)
        if kernel is not None:
            with Barrier("ending a kernel", self.request.session):
                await kernel.aclose()

    async def start_fresh(self) -> Kernel:
        """Start a second kernel, to replace the live one or the saved variables.

        Raises KernelMcpError; nothing has changed then.
        """
        asleep = not self.awake
        if asleep:
            await self._admit()
        try:
            return await self._start_beside()
        except KernelMcpError as error:
            self.awake = not asleep
            raise LaunchError(
                f"No fresh kernel could be started: {error}\nNothing was reset: the session and "
                "its variables are as they were. Try again, or end it with close_session."
            ) from error
        except BaseException:
            self.awake = not asleep
            raise

    async def forget(self, fresh: Kernel | None) -> None:
        """End the kernel, remove what was saved and use `fresh` from now on.

        Later cells do not run after a loss.
        """
        await self.drop()
        self.kernel = fresh
        await self._hibernation.end()
        self.ledger.withdraw(self._asleep)
        self._asleep = None
        self.ledger.forgive()

    async def hibernate(self, sleep: Sleep, *, forced: bool, saved: Sleep | None = None) -> bool:
        """Save the variables and end the kernel, unless `cancel_hibernation` is called before.

        `saved` is what was saved of the kernel if nothing has changed since. Raises
        HibernationError when something would be lost and it is not `forced`, KernelMcpError or
        OSError when the server cannot save; the kernel then stays.
        """
        with Span("hibernate", session=self.request.session) as span, self.giving_way() as scope:
            told = False
            try:
                if self.kernel is not None and self.kernel.exit is not None:
                    await self.note_death()
                self._engaged = True
                left = self.sleep  # what a kernel that has died has left
                sleep = left or await self._prepare(sleep, forced=forced, saved=saved)
                told = not scope.cancel_called
            finally:
                self._engaged = False
                if not told and self.kernel is not None:
                    self._miss(self.kernel)
        if scope.cancel_called:
            span.note(outcome="needed")
            if self.sleep is None:
                await self._hibernation.give_up()
            return False
        if self.sleep is None and (sleep.gone or sleep.failure):
            self._asleep = self._tell_sleep(sleep)
        self._hibernation.sleep = sleep
        self.awake = False
        count = len(sleep.dump.names) if sleep.dump is not None else 0
        self._journal.hibernated(count, len(sleep.gone), sleep.size, sleep.failure)
        await self.drop()
        return True

    async def _prepare(self, sleep: Sleep, *, forced: bool, saved: Sleep | None) -> Sleep:
        """Save the variables; if `forced`, use a checkpoint or the last save of a lost kernel."""
        kernel = self.kernel if self.used else None
        if kernel is None:
            return sleep
        try:
            return await self._hibernation.prepare(kernel, sleep, forced=forced, saved=saved)
        except HibernationError as error:
            well = kernel.exit is None
            if not forced or (well and isinstance(error, UnsavableError)):
                raise
            with anyio.CancelScope(shield=True):
                back = None if well else await self.revive()
                if back is None:
                    back = await self.fall_back()
                if back is None:
                    return replace(sleep, failure=str(error))
                cause = f"the session could not be saved anew: {error}"
                self.ledger.add(f"{cause[0].upper()}{cause[1:]}. {back.words()}", back.loss(cause))
            if self.sleep is None:  # a checkpoint goes on
                raise
            return self.sleep

    def continue_from(self, sleep: Sleep, cell: int | None) -> None:
        """Let the next kernel load an earlier save, `sleep`, and add a notice of it.

        `cell` is the last one whose effects the variables hold; None for none.
        """
        self._hibernation.sleep = sleep
        self._worked = [] if cell is None else [cell]
        self.awake = False
        self._asleep = self._tell_sleep(sleep)

    async def unless_needed(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of `work`; None if `cancel_hibernation` was called before its end."""
        with self.giving_way():
            return await work()
        return None

    @contextmanager
    def giving_way(self) -> Iterator[anyio.CancelScope]:
        """Cancel this block, which may wait for its turn, when the kernel is needed."""
        with anyio.CancelScope() as scope:
            self._giving_way.add(scope)
            try:
                yield scope
            finally:
                self._giving_way.discard(scope)

    def cancel_hibernation(self) -> None:
        """Cancel every `hibernate` and `unless_needed`, also those that wait; the kernel stays."""
        for scope in self._giving_way:
            scope.cancel()

    def lose(self, what: str, loss: Loss) -> Notice:
        """Add a notice that all variables are lost; `what` is a sentence with the reason."""
        text = f"{what}: all variables, imports and definitions made before are lost; {FILES_KEPT}"
        return self.ledger.add(f"{text}.{lost_names(loss)}", loss)

    async def note_death(self) -> None:
        """Restore a kernel that died between cells, or drop it, and add a notice.

        It is restored from a checkpoint, else from the last save. Does nothing for a live kernel.
        """
        kernel = self.kernel
        if kernel is None or kernel.exit is None:
            return
        if self.used:
            cause = f"{kernel.exit.story('the kernel')} between cells"
            if (back := await self.revive() or await self.fall_back()) is not None:
                self._journal.died(cause)
                self.ledger.add(f"{cause[0].upper()}{cause[1:]}. {back.words()}", back.loss(cause))
                return
            self._lose_dead(kernel)
        await self.drop()

    async def checkpoint_ahead(self, cell: Cell) -> None:
        """Make a checkpoint before a cell where one is wanted.

        If one was asked for and none can be made, that is a notice of the cell.
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
        """Call `when`, a method of `checkpoints` that may copy the kernel, if that is alive.

        A checkpoint that it makes is recorded in the journal. Raises LaunchError where `when` does.
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
        """Return True if the variables hold the effects of a cell."""
        return self.holds and number in self._worked

    @property
    def cells_held(self) -> list[int]:
        """The cells whose effects the variables hold, in order."""
        return list(self._worked)

    def begin_as_branch(self, kernel: Kernel, checkpoint: Checkpoint, folder: str) -> None:
        """Take over a kernel that was restored from another session's `checkpoint`.

        `folder` is the branch's own, relative to the workspace.
        """
        self.kernel, self.used = kernel, True
        self.checkpoints.share(checkpoint, 0)
        self._begun, self._folder = checkpoint, folder
        if words := closed_words(kernel.closed_files):
            self.ledger.add(words.strip(), None)

    def give_away(self) -> None:
        """Give up the kernel, which another session takes over."""
        assert self.kernel is not None
        self.checkpoints.drop_all(self.kernel)
        self.kernel, self.used = None, False
        self._worked.clear()

    async def go_on_with(self, kernel: Kernel, worked: Sequence[int]) -> list[int]:
        """Use a branch's kernel from now on, and return the cells that this undoes.

        `worked` are the cells whose effects the branch began with.
        """
        gone = [cell for cell in self._worked if cell not in worked]
        await self.drop()
        if self.sleep is not None:
            await self._hibernation.end()
        self.ledger.withdraw(self._asleep)
        self.awake, self._asleep = True, None
        self.kernel, self.used = kernel, True
        self._worked = list(worked)
        self._on_return()
        self.checkpoints.worked(0.0)
        assert self._tasks is not None
        self._tasks.start_soon(self._watch, kernel)
        return gone

    async def undo(self, cells: int) -> Return:
        """Go back to before the last `cells` cells, or further to the next earlier checkpoint.

        Raises UndoError, and LaunchError when the variables were lost in the attempt.
        """
        self.checkpoints.stir()
        await self.note_death()
        kernel, worked = self.kernel, self._worked
        if self.sleep is not None:
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
            back = await self.revive(wanted)
        finally:
            self._engaged = False
        if back is None:
            self._on_return()
            self.lose("An undo has failed", self.lost_state("undo failed"))
            await self.drop()
            raise LaunchError(
                "The checkpoint could not be woken, and the kernel was ended for it: all variables "
                f"are lost, {FILES_KEPT}. A fresh kernel starts with the next cell."
            )
        self._journal.undone(back.undone)
        return back

    async def revive(self, not_after: int | None = None) -> Return | None:
        """Restore a dead kernel from its newest checkpoint; return None where none can be used.

        With `not_after` it is the newest one without effects of cells after that.
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
            if not found.usable or failures[found] == WAKES:
                known.drop(kernel, found)
        self.kernel = fresh
        as_of = known.state_of(found)
        undone = tuple(cell for cell in self._worked if cell > as_of)
        del self._worked[len(self._worked) - len(undone) :]
        self._on_return()
        known.back_at(fresh, found)
        gone = [name for name in kernel.names if name not in set(fresh.names)]
        assert self._tasks is not None
        self._tasks.start_soon(self._watch, fresh)
        with Barrier("ending a kernel", self.request.session):
            await kernel.aclose()
        self._journal.revived(as_of)
        return Return(as_of, undone, tuple(gone), fresh.closed_files)

    async def fall_back(self) -> Return | None:
        """Drop a dead kernel, and let the next one load its last save.

        Returns None, and drops nothing, where there is no save or its file is damaged.
        """
        found = self._saved()
        if found is None or self.kernel is None:
            return None
        sleep, as_of = found
        if sleep.dump is None or await damage(sleep.dump):
            return None
        undone = tuple(cell for cell in self._worked if cell > as_of)
        gone = [name for name in self.kernel.names if name not in set(sleep.back)]
        self._hibernation.sleep = sleep
        await self.drop()
        del self._worked[len(self._worked) - len(undone) :]
        return Return(as_of, undone, tuple(gone))

    def _saved(self) -> tuple[Sleep, int] | None:
        """Return the last save and the last cell in it; None if that was undone, or none exists."""
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

    def _tell_sleep(self, sleep: Sleep) -> Notice:
        """Add a notice of a hibernated or persisted session, with the loss if there is one."""
        loss: Loss | None
        if sleep.failure:
            loss = self.lost_state(f"the session was hibernated, and {sleep.failure}")
        elif sleep.gone:
            loss = Loss.of(f"hibernation could not keep {listing(sleep.gone)}", sleep.gone)
        else:
            loss = Loss(sleep.after) if sleep.after else None
        return self.ledger.add(sleep.remark(), loss)

    async def _begin(self, progress: ProgressCallback) -> Kernel:
        if self.sleep is None:
            return await self._start(self.request, progress)
        with Span("wake", session=self.request.session):
            return await self._bring_back(self.sleep, progress)

    async def _bring_back(self, sleep: Sleep, progress: ProgressCallback) -> Kernel:
        await progress("Bringing the hibernated session back")
        kernel = await self._start(self.request, progress)
        try:
            waking = await self._hibernation.bring_back(kernel)
        except HibernationError as error:
            await kernel.aclose()
            kernel, waking = await self._bring_back_some(sleep, str(error), progress)
        except BaseException:
            await kernel.aclose()
            raise
        await self._hibernation.end(used=True)
        self._journal.woke(len(waking.back), len(waking.lost))
        self.used = waking.restored
        if not waking.restored:
            self._worked.clear()
        kernel.names.add(waking.back)
        asleep, self._asleep = self._asleep, None
        if waking.notice:
            known = asleep.loss if asleep is not None else None
            self.ledger.withdraw(asleep)
            self.ledger.add(waking.notice, _loss_of(waking, known))
        return kernel

    async def _bring_back_some(
        self, sleep: Sleep, failure: str, progress: ProgressCallback
    ) -> tuple[Kernel, Waking]:
        """Start a kernel with the variables that do not end it, or with none.

        `failure` is the reason of the last attempt, which is reported where none are loaded.
        """
        deadly: dict[str, str] | None = None
        with suppress(HibernationError):
            deadly = await self._hibernation.deadly()
        kernel = await self._start(self.request, progress)
        if deadly is not None:
            try:
                return kernel, await self._hibernation.bring_back(kernel, deadly)
            except HibernationError as error:
                failure = str(error)
                await kernel.aclose()
                kernel = await self._start(self.request, progress)
            except BaseException:
                await kernel.aclose()
                raise
        return kernel, nothing_back(sleep, failure)

    async def _start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        for text in restore(request):
            self.ledger.add(text)
        self._missed = False
        kernel = await self._launch(request, progress)
        kernel.tell, kernel.overheard = self.ledger.add, self._overheard.ran
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
        self.ledger.add(
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


def _loss_of(waking: Waking, known: Loss | None) -> Loss | None:
    """Return the loss of a restored session; None where nothing is lost.

    `known` is the loss that was reported when it hibernated, whose names are used where `waking`
    has none.
    """
    if waking.loss is None:
        return None
    if known is not None and not waking.lost:
        return replace(known, cause=waking.loss)
    return Loss.of(waking.loss, waking.lost)
