"""Recovery of a session's kernel: restore a dead one from a checkpoint or from the last save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import KernelGone, LaunchError, UndoError
from kernel_mcp.sessions.events import SessionEvents
from kernel_mcp.sessions.hibernation import SavedState
from kernel_mcp.sessions.kernel_state import KernelState
from kernel_mcp.sessions.losses import FILES_KEPT, Rollback, cells_in_words
from kernel_mcp.sessions.snapshot import damage

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.launch.checkpoint import Checkpoint

DEATH_S = 5.0
"""Maximum wait, in seconds, for the end of a kernel that was killed."""
RESUME_ATTEMPTS = 2
"""Number of failed starts from one checkpoint after which it is dropped."""


class KernelRecovery:
    """Detects the death of one session's kernel, and restores its state."""

    def __init__(
        self,
        state: KernelState,
        events: SessionEvents,
        *,
        on_death: Callable[[], None],
        last_save: Callable[[], tuple[SavedState, int] | None],
        on_rollback: Callable[[], None],
    ) -> None:
        """`on_death` is called when a kernel has died between cells and can be restored.

        `on_rollback` is called when the variables return to an earlier state. `last_save` returns
        the last save of the kernel and the last cell in it; None for none.
        """
        self.state = state
        self.on_rollback = on_rollback
        self._events = events
        self._on_death = on_death
        self._last_save = last_save
        self._engaged = False
        self._tasks: anyio.abc.TaskGroup | None = None

    def watch_in(self, tasks: anyio.abc.TaskGroup) -> None:
        """Watch each kernel in this task group, to detect its death."""
        self._tasks = tasks
        if self.state.kernel is not None:
            self.watch(self.state.kernel)

    def watch(self, kernel: Kernel) -> None:
        """Watch a kernel until its end."""
        assert self._tasks is not None
        self._tasks.start_soon(self._watch, kernel)

    async def _watch(self, kernel: Kernel) -> None:
        await kernel.watch()
        self.check(kernel)

    @contextmanager
    def running_cell(self) -> Iterator[None]:
        """Report no death of the kernel inside this block: the running cell reports it."""
        used, self.state.used = self.state.used, True
        try:
            with self.unreported():
                yield
        except KernelGone:
            self.state.used = used
            raise
        finally:
            if self.state.kernel is not None:
                self.check(self.state.kernel)

    @contextmanager
    def unreported(self) -> Iterator[None]:
        """Report no death of the kernel inside this block."""
        engaged, self._engaged = self._engaged, True
        try:
            yield
        finally:
            self._engaged = engaged

    def check(self, kernel: Kernel) -> None:
        """Report the kernel's death, if it has died and nothing else reports that."""
        state = self.state
        if self._engaged or kernel is not state.kernel or not state.used or kernel.exit is None:
            return
        if state.checkpoints.newest is not None or self._saved() is not None:
            self._on_death()
        else:
            self._lose(kernel)

    async def note_death(self) -> None:
        """Restore a kernel that has died between cells, or drop it, and add a notice.

        It is restored from a checkpoint, else from the last save. A live kernel is left alone.
        """
        kernel = self.state.kernel
        if kernel is None or kernel.exit is None:
            return
        if self.state.used:
            if (back := await self.resume() or await self.fall_back_to_save()) is not None:
                cause = _between_cells(kernel)
                self._events.died(cause)
                self.report(cause, back)
                return
            self._lose(kernel)
        await self.state.drop()

    def report(self, cause: str, back: Rollback) -> None:
        """Add a notice that the variables are as before, because of `cause`."""
        text = f"{cause[0].upper()}{cause[1:]}. {back.words()}"
        self.state.notifications.add(text, back.loss(cause))

    async def undo(self, cells: int) -> Rollback:
        """Return to the state before the last `cells` cells, or to the next earlier checkpoint.

        Raises UndoError, and LaunchError if the variables were lost in the attempt.
        """
        state = self.state
        state.checkpoints.stir()
        await self.note_death()
        kernel, worked = state.kernel, state.worked
        if state.pending_restore is not None:
            raise UndoError(
                "Nothing was undone: what is kept of this session are its last variables alone, "
                "and the next cell brings them back. To begin anew, call reset."
            )
        if kernel is None or not state.used or not worked:
            raise UndoError("There is nothing to undo: no cell has run here with this kernel.")
        if cells > len(worked):
            raise UndoError(
                f"cells={cells} is more than there are: {cells_in_words(worked)} can be undone."
            )
        wanted = worked[-cells - 1] if cells < len(worked) else 0
        if state.checkpoints.at(wanted) is None:
            raise UndoError(
                f"No checkpoint reaches back before cell {worked[-cells]}: nothing was undone. "
                f"Checkpoints: {state.checkpoints.words(kernel)}. Set right by code what the cell "
                f"did, or call reset and run again what is wanted."
                f"{state.checkpoints.advice(kernel)}"
            )
        with self.unreported():
            kernel.kill()
            with anyio.move_on_after(DEATH_S):
                await kernel.dead.wait()
            back = await self.resume(wanted)
        if back is None:
            self.on_rollback()
            state.lose("An undo has failed", state.lost_state("undo failed"))
            await state.drop()
            raise LaunchError(
                "The checkpoint could not be woken, and the kernel was ended for it: all variables "
                f"are lost, {FILES_KEPT}. A fresh kernel starts with the next cell."
            )
        self._events.note("undo", cells=list(back.undone))
        return back

    async def resume(self, not_after: int | None = None) -> Rollback | None:
        """Restore a dead kernel from its newest checkpoint; return None if none can be used.

        With `not_after` it is the newest checkpoint without effects of cells after that number.
        """
        state, kernel, known = self.state, self.state.kernel, self.state.checkpoints
        if kernel is None or kernel.exit is None or kernel.handle.sandbox_group is None:
            return None
        known.stir()
        failures: Counter[Checkpoint] = Counter()
        while True:
            found = known.newest if not_after is None else known.at(not_after)
            if found is None:
                return None
            folder = state.branch_folder if found is state.branch_checkpoint else ""
            with Barrier("going on from a checkpoint", state.session) as barrier:
                await kernel.handle.sandbox_group.clear()
                fresh = await kernel.wake(found, folder)
            if barrier.failure is None:
                break
            failures[found] += 1
            if not found.usable or failures[found] == RESUME_ATTEMPTS:
                known.drop(kernel, found)
        state.kernel = fresh
        as_of = known.state_of(found)
        undone = state.take_back(as_of)
        self.on_rollback()
        known.back_at(fresh, found)
        gone = [name for name in kernel.names if name not in set(fresh.names)]
        self.watch(fresh)
        with Barrier("ending a kernel", state.session):
            await kernel.aclose()
        self._events.note("revival", cell=as_of)
        return Rollback(as_of, undone, tuple(gone), fresh.closed_files)

    async def fall_back_to_save(self) -> Rollback | None:
        """Drop a dead kernel, and set its last save for the next kernel to load.

        Returns None, and drops nothing, if there is no save or its file is damaged.
        """
        state, found = self.state, self._saved()
        if found is None or state.kernel is None:
            return None
        saved, as_of = found
        if saved.dump is None or await damage(saved.dump):
            return None
        gone = [name for name in state.kernel.names if name not in set(saved.back)]
        state.pending_restore = saved
        undone = state.take_back(as_of)
        await state.drop()
        return Rollback(as_of, undone, tuple(gone))

    def _saved(self) -> tuple[SavedState, int] | None:
        """Return the last save and the last cell in it; None without one, or if it was undone."""
        found = self._last_save() if self.state.used else None
        return found if found is not None and found[1] in self.state.worked else None

    def _lose(self, kernel: Kernel) -> None:
        cause = _between_cells(kernel)
        self._events.died(cause)
        self.state.lose(cause[0].upper() + cause[1:], self.state.lost_state(cause))
        self.state.used = False


def _between_cells(kernel: Kernel) -> str:
    assert kernel.exit is not None
    return f"{kernel.exit.story('the kernel')} between cells"
