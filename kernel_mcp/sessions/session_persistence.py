"""The persistence of one session: its saves, and the restore of what an earlier server saved."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from kernel_mcp.barriers import Barrier, reason_of, run_in_thread
from kernel_mcp.linux.proc import thread_times, waits_for_machine
from kernel_mcp.sessions.compatibility import compatibility_check
from kernel_mcp.sessions.family import Family, FamilyMember
from kernel_mcp.sessions.forked_save import UnfitToFork
from kernel_mcp.sessions.hibernation import SavedState
from kernel_mcp.sessions.notebook_sinks import NotebookSinks
from kernel_mcp.sessions.notifications import NotificationQueue
from kernel_mcp.sessions.persistence import LookupResult, PreviousSession, lost_with
from kernel_mcp.sessions.saver import SaveCost, Saver
from kernel_mcp.sessions.session_save import NOTEBOOK, PersistedSave, SessionSave
from kernel_mcp.sessions.snapshot import SECONDS, Dump
from kernel_mcp.sessions.words import duration, listing
from kernel_mcp.sessions.writer import HERE_S, TOO_LARGE, write_forked, write_here

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.sessions.cell import Cell
    from kernel_mcp.sessions.store_entry import StoreEntry

RARELY = (
    "For its size this session is saved in the background every {} at most: what cells do "
    "meanwhile is lost if the server is killed. `del` what is large and not needed, or keep it in "
    "a file"
)
NO_ROOM = (
    "There was no room to save {} in the background: it is lost if the server or its kernel ends. "
    "Keep what is large in files, or `del` it; others are saved"
)
AGAIN = (
    "It is tried again; until then, what cells have done since the last save ends with the server, "
    "and with a kernel that has no checkpoint"
)
NOT_SAVED = "the server ended before what this cell did was saved"
NEVER_BEGUN = "the server ended before this cell began"
WAITS = "\0waits\n"
"""Mark before the code of a waiting cell in the journal. Code that runs has no NUL."""
NOT_BEGUN = f"{WAITS}# never begun"
"""Stands for a cell that the journal lacks, as it was never begun."""
SERVICE_THREAD = "kernel-service"
"""Name of the kernel's thread for control requests, which runs no user code."""
STILL_S = 0.5
"""Maximum wait, in seconds, for a kernel that has just answered to become idle."""
LOOK_S = 0.002
"""Seconds between two checks during `STILL_S`."""
COARSE_S = 0.01
"""Unit of processor time, in seconds, if the threads of a kernel cannot be read."""


class SavedSession(FamilyMember, Protocol):
    """The part of a session that its persistence uses."""

    notebooks: NotebookSinks
    notifications: NotificationQueue
    touched: bool
    """True once it was used."""

    @property
    def family(self) -> Family[Any]:
        """The session and its branches."""

    @property
    def can_hibernate(self) -> bool:
        """True if its kernel is not in use."""


class SessionPersistence:
    """Saves one session for later servers, and restores it from an earlier one.

    `entry` is its entry in the store. It is None for a session that is not persisted, of which
    nothing is saved.
    """

    def __init__(
        self,
        session: SavedSession,
        session_save: SessionSave,
        saver: Saver | None,
        clock: Callable[[], float],
    ) -> None:
        """`saver` calls `save` if `session_save` outlives the server. `clock` is the session's."""
        self.handle = session.handle
        self.trouble = ""
        """Reason why the last save in the background failed; empty if it succeeded."""
        self.saved_every_s = 0.0
        """Seconds between two saves, if its size makes them rare; else 0."""
        self.rolled_back = False
        """True if the variables returned to an earlier state, which may predate the last save."""
        self._session = session
        self._saver = saver
        self._clock = clock
        self._left_out: set[str] = set()
        """Names of variables that the last save left out for lack of room."""
        self._lock = anyio.Lock()
        self._undone_lock = anyio.Lock()
        self._scope: anyio.CancelScope | None = None
        self._waiting: anyio.CancelScope | None = None
        """Scope of a save that waits for the end of a cell."""
        self._computed: tuple[Kernel | None, Mapping[int, int]] = (None, {})
        """The kernel that was saved last, and processor times of its threads at that save."""
        self._save: PersistedSave | None = None
        if isinstance(session_save, PersistedSave):
            self._save = session_save
            session_save.cells = session.queue.cells
            session_save.last_cell = lambda: session.kernel_state.as_of
            session_save.holds = lambda cell: session.kernel_state.holds_cell(cell)
            session_save.notebook = lambda: session.notebooks.lasting_path
            session.queue.watchers.append(session_save.output)

    @property
    def entry(self) -> StoreEntry | None:
        """The entry in the store; None for a session that is not persisted."""
        return None if self._save is None else self._save.entry

    @property
    def last_used(self) -> float:
        """See `Saveable`."""
        return self._session.family.last_used

    @property
    def state(self) -> str:
        """See `Saveable`."""
        return self._session.state

    async def settle(self) -> bool:
        """See `Saveable`."""
        return await self._session.family.settle()

    @property
    def changed(self) -> bool:
        """True if the session is persisted and has changed since its last save."""
        if self._save is None or self.state == "closed":
            return False
        return self._save.dirty or self._has_computed()

    def _has_computed(self) -> bool:
        """Return True if code has run since the last save, as threads do between cells."""
        (kernel, times), live = self._computed, self._session.kernel
        return kernel is not None and kernel is live and not kernel.exit and _times(kernel) != times

    def touch(self) -> None:
        """Plan a save in the background, if the session is persisted."""
        if self._saver is not None and self._save is not None:
            self._saver.touch(self)

    def log_cell(self, cell: Cell) -> None:
        """Write a cell to the journal, if the session is persisted; once more when it begins."""
        if self._save is not None:
            code = cell.recorded if cell.started is not None else WAITS + cell.recorded
            with Barrier("keeping the code of a cell", self.handle):
                self._save.log_cell(cell.number, code)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Cancel a running save, wait until it no longer writes, and prevent others inside."""
        self._cancel()
        async with self._lock:
            yield

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def save(self, *, urgent: bool = False, most_bytes: int | None = None) -> SaveCost | None:
        """Save cells and variables for a later server, or return None while it is in use.

        Cells can run during the save, unless the kernel must not be forked. An `urgent` save waits
        for the running cell, and the next cell waits for the fork. With `most_bytes`, at the
        server's end, all variables are saved, or none if they do not fit. Raises HibernationError,
        OSError.
        """
        save, session = self._save, self._session
        if most_bytes is not None and self._waiting is not None:
            self._waiting.cancel()
        if save is None or self.state == "closed" or not (urgent or session.can_hibernate):
            return None
        async with self._lock:
            if self.state == "closed":
                return None
            kernel = session.kernel  # it may have been replaced during the wait for the lock
            with anyio.CancelScope() as scope:
                self._scope = scope
                try:
                    if kernel is None or not session.kernel_state.used or kernel.exit is not None:
                        await save.save_cells()
                        return SaveCost()
                    written = await self._written(save, kernel, urgent, most_bytes)
                    if written is None or kernel is not session.kernel:
                        return None
                    dump, cpu_s = written
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(save.commit_dump, dump)
                    save.trim_journal()
                    self._tell_left_out(dump)
                    return SaveCost(dump.size, cpu_s)
                finally:
                    self._scope = None
                    with anyio.CancelScope(shield=True), Barrier("tidying a store", self.handle):
                        await anyio.to_thread.run_sync(save.entry.tidy)
        return None

    async def _written(
        self, save: PersistedSave, kernel: Kernel, urgent: bool, most_bytes: int | None
    ) -> tuple[Dump, float] | None:
        turn, whole = partial(self._between_cells, kernel, urgent), most_bytes is not None
        room = (await anyio.to_thread.run_sync(save.room)).size
        most = room if most_bytes is None else min(room, most_bytes)
        try:
            return await write_forked(kernel, save, turn, max_bytes=most, whole=whole, hurry=whole)
        except UnfitToFork:
            async with turn() as free:
                if not free:
                    return None
                seconds = SECONDS if whole else min(HERE_S * 2**save.late, SECONDS)
                work = partial(
                    write_here, kernel, save, max_bytes=most, whole=whole, seconds=seconds
                )
                return await (work() if urgent else self._session.lifecycle.unless_needed(work))

    @asynccontextmanager
    async def _between_cells(self, kernel: Kernel, urgent: bool) -> AsyncIterator[bool]:
        """Hold `turn` inside this block, and yield True if the kernel may be saved now.

        False is yielded without the lock if the wait for it was cancelled. The same holds if the
        kernel is in use and the save is not `urgent`.
        """
        session = self._session
        if not urgent and not session.can_hibernate:
            yield False
            return
        with anyio.CancelScope() as waiting:
            self._waiting = waiting
            await session.turn.acquire()
        self._waiting = None
        if waiting.cancelled_caught:
            yield False
            return
        try:
            busy = session.installing.locked() or (session.queue.busy and not urgent)
            there = kernel is session.kernel and kernel.exit is None
            free = there and not (busy or self.state == "closed")
            times, pid = _times(kernel), kernel.handle.pid
            yield free
            if free:  # main thread: time after the save; others: before, they may have run code
                await _rests(pid)
                self._computed = kernel, {**times, pid: _times(kernel).get(pid, 0)}
        finally:
            session.turn.release()

    async def save_cells(self) -> None:
        """Save the cells and the open notebook alone, if it is persisted. Raises OSError."""
        if self._save is not None:
            async with self.paused():
                await self._save.save_cells()

    def trim_journal(self) -> None:
        """Remove saved cells from the journal."""
        if self._save is not None:
            self._save.trim_journal()

    def unsaved(self, reason: str) -> None:
        """Note the reason why the last save in the background failed; empty if it succeeded."""
        if reason and not self.trouble:
            self._session.notifications.add(
                f"This session could not be saved in the background: {reason}. {AGAIN}"
            )
        self.trouble = reason

    def rarely_saved(self, pause_s: float) -> None:
        """Report, once, that it can be saved only every `pause_s` seconds."""
        if pause_s and not self.saved_every_s:
            self._session.notifications.add(RARELY.format(duration(pause_s)))
        self.saved_every_s = pause_s

    def _tell_left_out(self, dump: Dump) -> None:
        """Add a notice of variables that a save left out for lack of room, once for each."""
        names = {name for name, why in dump.lost.items() if why.startswith(TOO_LARGE)}
        if names - self._left_out:
            self._session.notifications.add(NO_ROOM.format(listing(sorted(names))))
        self._left_out = names

    def last_save(self) -> tuple[SavedState, int] | None:
        """Return the last save of its kernel and the last cell in it; None for none."""
        if (
            self._save is None
            or (previous := self._save.last_save()) is None
            or previous.saved.cell is None
        ):
            return None
        return self._saved_state(previous, ""), previous.saved.cell

    def _saved_state(self, previous: PreviousSession, after: str) -> SavedState:
        saved, dump = previous.saved, previous.dump
        told = saved.variables.get("lost", {})
        return SavedState(
            self._clock(),
            0.0,
            dump=dump,
            lost=told if isinstance(told, dict) else {},
            failure=previous.failure,
            changed=dump.changed if dump is not None else {},
            files=dump.files if dump is not None else (),
            saved_when=previous.when,
            after=after,
            judge=compatibility_check(saved),
        )

    async def mark_undone(self) -> None:
        """Mark the last save as obsolete if the variables returned to an earlier state.

        A later server then restores them only on request. Also plans a new save.
        """
        if self._save is None or not (self.rolled_back or self._undone_lock.locked()):
            return
        with anyio.CancelScope(shield=True), Barrier("noting what was undone", self.handle):
            async with self._undone_lock:  # a second caller waits until the mark is written
                if not self.rolled_back:
                    return
                self.rolled_back = False
                async with self.paused():
                    if await self._save.mark_undone() and self._saver is not None:
                        self._saver.touch(self, at_once=True)

    async def note_adoption(self) -> None:
        """Note in the store that it uses the kernel of a branch, which was not saved yet."""
        if self._save is None:
            return
        with anyio.CancelScope(shield=True), Barrier("noting an adoption", self.handle):
            async with self.paused():
                await anyio.to_thread.run_sync(self._save.mark_adopted)

    async def restore(self, found: LookupResult) -> None:
        """Restore the cells of an earlier server's session; its next kernel loads the variables.

        Call it before anything else uses the session.
        """
        previous, note = found.previous, found.note
        if self._save is not None and previous is None:
            self._save.clear_journal()
        elif previous is not None:
            with Barrier("bringing back a kept session", self.handle) as barrier:
                await anyio.to_thread.run_sync(self._remember, previous)
            if barrier.failure is not None:
                unread = (
                    f"The cells of {previous.when} cannot be read: {reason_of(barrier.failure)}"
                )
                note = ". ".join(filter(None, (note, unread)))
            self._continue_from(previous)
            if previous.cells:
                with Barrier("keeping the cells of a session", self.handle):
                    await self.save_cells()
        if note:
            self._session.notifications.add(note, found.loss)

    def _remember(self, previous: PreviousSession) -> None:
        """Restore the cells and the open notebook. Blocking.

        Raises OSError, and ValueError for a malformed history.
        """
        session, saved = self._session, previous.saved
        if path := str(saved.asked.get(NOTEBOOK, "")):
            with Barrier("opening the notebook of a session again", self.handle) as barrier:
                session.notebooks.bound = session.notebooks.book(path)
                path = session.notebooks.path
            if barrier.failure is not None:
                session.notifications.add(
                    f"{path!r} is not open any more: {reason_of(barrier.failure)}"
                )
            else:
                session.notifications.add(
                    f"{path!r} is still open: what is executed is appended to it. open_notebook "
                    "with an empty path ends that"
                )
        cells = session.queue.cells
        if saved.history:
            cells.restore(saved.history)
        outputs = self._save.output.texts() if self._save is not None else {}
        for number in range(len(cells) + 1, max(previous.cells, default=0) + 1):
            code = previous.cells.get(number, NOT_BEGUN)
            began = not code.startswith(WAITS)
            session.queue.remember(
                code.removeprefix(WAITS),
                NOT_SAVED if began else NEVER_BEGUN,
                outputs.get(number, ""),
                began=began,
            )

    def _continue_from(self, previous: PreviousSession) -> None:
        """Set the variables for the next cell to restore."""
        session, saved = self._session, previous.saved
        ran = {cell.number for cell in session.queue.cells[saved.through :] if cell.numbered}
        begun = (n for n, code in previous.cells.items() if not code.startswith(WAITS))
        saved_state = self._saved_state(previous, lost_with(saved, sorted(ran.union(begun))))
        session.touched = True
        session.lifecycle.continue_from(saved_state, saved.cell)

    async def release(self, *, remove: bool) -> None:
        """Release the entry of a session that has ended, after its last cells were saved.

        With `remove` it is removed instead.
        """
        assert self._save is not None
        with Barrier("putting a kept session away", self.handle):
            async with self.paused():
                pass
            if remove:
                await run_in_thread(self._save.entry.remove)
            elif self._save.unlogged:
                await self._save.save_cells()
        self._save.close()


def _times(kernel: Kernel) -> Mapping[int, int]:
    """Return the processor time of each thread that may run user code, by thread id.

    If the threads cannot be read, it is one entry for the whole process.
    """
    pid = kernel.handle.pid
    times = thread_times(pid, besides=SERVICE_THREAD)
    return times or {pid: round(kernel.handle.usage().cpu_s / COARSE_S)}


async def _rests(pid: int) -> None:
    """Wait until a process that has just answered is idle, at most `STILL_S` seconds."""
    with anyio.move_on_after(STILL_S), suppress(ProcessLookupError):
        while waits_for_machine(pid):
            await anyio.sleep(LOOK_S)
