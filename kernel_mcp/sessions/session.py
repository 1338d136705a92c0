"""A session: a handle, a private workspace, a queue of cells and the kernel that runs them.

States: `new` (no kernel yet) → `idle` ⇄ `busy`, and `idle` → `hibernated` (no kernel, variables on
disk) → `busy`. A session outlives its kernel, and ends only as `closed`. One task per session runs
its cells one after the other, so a cell continues when its call stops waiting.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.abc

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.environments.layer import Layer
from kernel_mcp.environments.uv import ProgressCallback, silence
from kernel_mcp.errors import (
    BranchError,
    HibernationError,
    InputError,
    LaunchError,
    SessionNotFound,
    UndoError,
)
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.kernels.factory import KernelRequest, KernelSource
from kernel_mcp.linux.proc import thread_times, waits_for_machine
from kernel_mcp.linux.process import free_descriptors
from kernel_mcp.output.text import Masks
from kernel_mcp.sessions.audit import SILENT, Journal
from kernel_mcp.sessions.branches import BranchOrigin, BranchStart, Family
from kernel_mcp.sessions.cell import Ahead, Cell, StopReason, narrate
from kernel_mcp.sessions.checking import Checks
from kernel_mcp.sessions.checkpoints import Checkpoints, IdleCheckpoints
from kernel_mcp.sessions.forked_save import UnfitToFork
from kernel_mcp.sessions.hibernation import HibernatedState
from kernel_mcp.sessions.kernel_state import KernelState
from kernel_mcp.sessions.lifecycle import KernelLifecycle
from kernel_mcp.sessions.losses import Rollback
from kernel_mcp.sessions.notebook_sinks import NotebookSinks
from kernel_mcp.sessions.notifications import Loss, Notice, NotificationQueue
from kernel_mcp.sessions.persistence import PreviousSession, compatibility_check, lost_with
from kernel_mcp.sessions.recovery import KernelRecovery
from kernel_mcp.sessions.runner import CellQueue, CellRunner
from kernel_mcp.sessions.saver import SaveCost, Saver
from kernel_mcp.sessions.session_save import NOTEBOOK, PersistedSave, SessionSave
from kernel_mcp.sessions.snapshot import SECONDS, Dump, counted, descriptions
from kernel_mcp.sessions.start_queue import CellStartQueue
from kernel_mcp.sessions.starter import KernelStarter
from kernel_mcp.sessions.words import duration, listing
from kernel_mcp.sessions.writer import HERE_S, TOO_LARGE, write_forked, write_here
from kernel_mcp.telemetry.spans import OriginContext, caught, of_session

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.notebooks.notebook_file import NotebookFile


Clock = Callable[[], float]


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


class Preparation(Protocol):
    """Work before some cells run: installing the packages that their code requests."""

    def concerns(self, code: str) -> bool:
        """Return True if a cell with this code may need preparation."""

    async def prepare(self, session: Session, cell: Cell) -> None:
        """Prepare a cell, and set its `plain` and `installed`.

        Raises KernelMcpError if the cell must not run.
        """


OWN_KERNEL = "create_session without attach gives one with a kernel of its own."
INSTEAD = {
    "reset": "Delete variables by code, or have its user restart it; close_session leaves it.",
    "install": "A cell with %pip install adds packages where that kernel runs.",
    "list_packages": "A cell with %pip list shows those of that kernel.",
    "write_file": "Write files by code: it runs where that kernel runs.",
    "list_files": "List folders by code: it runs where that kernel runs.",
}
"""Alternatives to tools that are not available with an attached kernel, by tool."""
ENDED = "the server ended before this cell began"
NOT_SAVED = "the server ended before what this cell did was saved"
VARIABLES_TIMEOUT_S = 5.0
INQUIRY_S = 2.0
"""Seconds after which a kernel that has not answered a front end's request is interrupted."""
SERVICE_THREAD = "kernel-service"
"""Name of the kernel's thread for control requests, which runs no user code."""
STILL_S = 0.5
"""Maximum wait, in seconds, for a kernel that has just answered to become idle."""
LOOK_S = 0.002
"""Seconds between two checks during `STILL_S`."""
COARSE_S = 0.01
"""Unit of processor time, in seconds, if the threads of a kernel cannot be read."""
RESTORE_DESCRIPTORS = 24
"""Maximum number of files that the server opens to start a kernel which loads a save."""
RETRY_S = 60.0
"""Pause after a failed hibernation; each further failure doubles it up to `RETRY_MOST_S`."""
RETRY_MOST_S = 3600.0


class Session:
    """One session. `serve` runs its cells until the session is closed.

    `kernel_state` holds the kernel, `lifecycle` replaces it, `recovery` restores it. `queue` holds
    the cells, `notifications` the notices.
    """

    def __init__(
        self,
        *,
        request: KernelRequest,
        owner: str,
        name: str,
        workspace: Workspace,
        cells_dir: Path,
        session_save: SessionSave,
        source: KernelSource,
        admit: Callable[[Session], Awaitable[None]],
        grace_s: float,
        cpu_s: float,
        timeout_s: float,
        clock: Clock,
        checks: Checks,
        start_queue: CellStartQueue,
        journal: Journal = SILENT,
        preparation: Preparation | None = None,
        saver: Saver | None = None,
        checkpoints: str = "off",
        idle_checkpoints: IdleCheckpoints | None = None,
        masks: Masks | None = None,
    ) -> None:
        """`admit` reserves a kernel for a hibernated session. Times are seconds of `clock`.

        `timeout_s` is the default time limit of cells. `saver` calls `save` if `session_save`
        outlives the server. `masks` hide values in code that is written to disk.
        """
        self.request = request
        self.timeout_s = timeout_s
        self.handle = request.session
        self.owner = owner
        self.name = name
        self.workspace = workspace
        self.notebooks = NotebookSinks(workspace, request.session, journal)
        self.journal = journal
        self.ended = anyio.Event()
        self.closing = anyio.Event()
        self.begun = anyio.Event()
        self.installing = anyio.Lock()
        self.installation: anyio.Event | None = None
        """Event that stops the installation for which a call waits; None without one."""
        self.created = clock()
        self.last_ran = -math.inf
        """Time of the end of its last cell, by `clock`."""
        self.family: Family[Session] = Family(self.created, [self], self)
        self.origin: BranchOrigin | None = None
        self.keep_record = False
        self.trouble = ""
        """Reason why the last save in the background failed; empty if it succeeded."""
        self.saved_every_s = 0.0
        """Seconds between two saves, if its size makes them rare; else 0."""
        self.forgotten = False
        """True if its persisted state is removed at its end."""
        self.postponed_until = 0.0
        self._postponed_s = 0.0
        self.notifications = NotificationQueue()
        self.persisted = persisted = (
            session_save if isinstance(session_save, PersistedSave) else None
        )
        self.queue = CellQueue(cells_dir, clock, self.notifications, masks)
        self.cells = self.queue.cells
        self.kernel_state = KernelState(
            request.session,
            self.notifications,
            Checkpoints(
                checkpoints,
                clock,
                self.notifications.add,
                lambda: self.persisted is not None,
                idle_checkpoints,
            ),
        )
        self.recovery = KernelRecovery(
            self.kernel_state,
            journal,
            on_death=self._look,
            last_save=self._last_save,
            on_rollback=self._note_rollback,
        )
        self.lifecycle = KernelLifecycle(
            request,
            KernelStarter(source, self.notifications, journal),
            self.recovery,
            session_save=session_save,
            admit=lambda: admit(self),
            journal=journal,
        )
        self._runner = CellRunner(
            self.lifecycle,
            grace_s=grace_s,
            cpu_s=cpu_s,
            clock=clock,
            journal=journal,
            checks=checks,
            start_queue=start_queue,
        )
        self._preparation = preparation
        if persisted is not None:
            persisted.cells, persisted.last_cell = self.cells, lambda: self.kernel_state.as_of
            persisted.holds = self.kernel_state.holds_cell
            persisted.notebook = lambda: self.notebooks.path
        self._saver = saver
        self._rolled_back = False
        """True if its variables returned to an earlier state, which may predate the last save."""
        self._left_out: set[str] = set()
        """Names of variables that the last save left out for lack of room."""
        self._needs = 0
        """Number of calls that use or replace the kernel, or wait to do so."""
        self._save_lock = anyio.Lock()
        self._undone_lock = anyio.Lock()
        self._save_scope: anyio.CancelScope | None = None
        self._waiting_save: anyio.CancelScope | None = None
        """Scope of a save that waits for the end of a cell."""
        self._computed: tuple[Kernel | None, Mapping[int, int]] = (None, {})
        """The kernel that was saved last, and processor times of its threads at that save."""
        self._clock = clock
        self._turn = self.turn = anyio.Lock(fast_acquire=True)
        """Lock of the kernel, held while it is used or replaced."""
        self._ahead: anyio.CancelScope | None = None
        self._wake = anyio.Event()
        self._closed = False
        self._gone: Loss | None = None
        self.held_back = False
        """True if it has persisted state that is restored only on request of its owner."""
        self._touched = False

    @property
    def state(self) -> str:
        """One of new, idle, busy, hibernated, closed."""
        if self._closed:
            return "closed"
        if self.queue.busy or self.installing.locked():
            return "busy"
        if not self.lifecycle.awake:
            return "hibernated"
        return "new" if self.kernel_state.kernel is None else "idle"

    @property
    def starting(self) -> bool:
        """True while its kernel is being started, by `begin`, before there is a cell."""
        return self._ahead is not None

    @property
    def can_hibernate(self) -> bool:
        """True if it can be hibernated: not hibernated, no cell, install or start in progress.

        False with an attached kernel, whose variables this server must not save.
        """
        return not self.turn.locked() and not self.starting and self._can_hibernate_now

    @property
    def stays_hibernated(self) -> bool:
        """True if it is hibernated and no call is restoring it."""
        return self.state == "hibernated" and not self._needs and not self.turn.locked()

    @property
    def _can_hibernate_now(self) -> bool:
        """The same as `can_hibernate`, for a caller that holds `turn`."""
        others = [each for each in self.family.members if each is not self]
        return (
            not self.request.attach
            and not self._needs
            and self.state in ("new", "idle")
            and all(each.state != "busy" and not each.turn.locked() for each in others)
        )

    @property
    def last_used(self) -> float:
        """Time of the last use of it or a branch, in seconds of its clock."""
        return self.family.last_used

    @last_used.setter
    def last_used(self, moment: float) -> None:
        self.family.last_used = moment

    def join(self, family: Family[Session], start: BranchStart, origin: BranchOrigin) -> None:
        """Make it a branch in `family`, before `serve` is called."""
        self.family, self.origin = family, origin
        family.members.append(self)
        self.kernel_state.start_as_branch(start.kernel, start.checkpoint, start.folder)
        self._touched = True

    @property
    def blank(self) -> bool:
        """True if its end loses nothing: it was not used, and its workspace is empty."""
        if self._touched:
            return False
        try:
            return not any(self.workspace.root.iterdir())
        except OSError:
            return True

    @property
    def changed(self) -> bool:
        """True if it is persisted and has changed since its last save."""
        if self.persisted is None or self._closed:
            return False
        return self.persisted.dirty or self._has_computed()

    def _has_computed(self) -> bool:
        """Return True if code has run since the last save, as threads do between cells."""
        kernel, times = self._computed
        if kernel is None or kernel is not self.kernel or kernel.exit is not None:
            return False
        return _times(kernel) != times

    @property
    def hibernated(self) -> HibernatedState | None:
        """The saved state of a hibernated session; None for others."""
        return self.kernel_state.hibernated

    @property
    def kernel(self) -> Kernel | None:
        """The kernel; None before its start and while hibernated."""
        return self.kernel_state.kernel

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Run queued cells until the session is closed, then end the kernel."""
        with OriginContext(
            of_session(self.handle, self.owner)
        ):  # not that of the call which opened it
            await self._serve(task_status)

    async def _serve(self, task_status: anyio.abc.TaskStatus[None]) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                self.recovery.watch_in(tasks)
                task_status.started()
                while not self._closed:
                    await self._next()
                    await self._start_ahead()
                    await self.mark_save_undone()
                    while self.queue and not self._closed:
                        await self._prepare_next()
                        async with self._turn:
                            await self._run_next()
                            await self._checkpoint(self.kernel_state.checkpoints.after)
                        await self.mark_save_undone()
                tasks.cancel_scope.cancel()
        finally:
            self.close()
            with anyio.CancelScope(shield=True):
                async with self._turn:
                    await self.kernel_state.drop()

    def begin(self) -> None:
        """Start the kernel before there is a cell; `begun` is set afterwards.

        A failure is reported by the first cell.
        """
        self._ahead = anyio.CancelScope()
        self._wake.set()

    def submit(
        self, code: str, timeout_s: float, *, checkpoint: bool = False, author: str = ""
    ) -> Cell:
        """Queue a cell and return it; `checkpoint` requests a checkpoint before it.

        An empty `author` stands for the agent. Raises SessionNotFound once the session is closed.
        """
        if self._closed:
            raise SessionNotFound("This session has been closed. Open another with create_session.")
        self._touched = True
        cell = self.queue.add(code, timeout_s, author)
        cell.since = self.notifications.number
        cell.origin = caught(self.handle, self.owner)
        if checkpoint:
            cell.ahead = Ahead.ASKED
        elif timeout_s > self.timeout_s:
            cell.ahead = Ahead.LONG
        self.lifecycle.cancel_hibernation()
        self._wake.set()
        self.last_used = self._clock()
        return cell

    async def follow(self, cell: Cell, wait_s: float, report: ProgressCallback | None) -> None:
        """Wait until `cell` has ended, at most `wait_s` seconds, reporting new output meanwhile."""
        try:
            with anyio.move_on_after(wait_s):
                if report is None:
                    await cell.finished.wait()
                else:
                    await narrate(cell, report, self._clock)
        finally:
            self.last_used = self._clock()

    async def interrupt(self, cell: Cell | None = None) -> Cell | None:
        """Interrupt `cell`, by default the running one, and wait for its end.

        A waiting cell is withdrawn. Returns the cell; None if nothing runs.
        """
        if cell is None and self.queue.current is None and self._ahead is not None:
            return self.queue.withdraw("it was stopped while its kernel was starting")
        if cell is not None and self.queue.withdraw("it was stopped before it began", cell):
            return cell
        cell = cell or self.queue.current
        if cell is not None:
            cell.stop(StopReason.INTERRUPT)
            await cell.finished.wait()
        return cell

    def stop_installation(self) -> bool:
        """Stop the installation for which a call waits; return False if there is none."""
        if self.installation is not None:
            self.installation.set()
        return self.installation is not None

    async def reset(
        self, *, packages: bool, files: bool, progress: ProgressCallback = silence
    ) -> Notice | None:
        """Empty the queue and replace the kernel; return the notice of the loss, None for none.

        `packages` removes the installed packages too, `files` the files of the workspace. The old
        kernel ends once the fresh one has started. Raises KernelMcpError if none can be started, or
        if files or packages cannot be removed.
        """
        self.require_own("reset")
        if (packages or files) and len(self.family.members) > 1:
            raise BranchError(
                "Nothing was reset: files and packages are those of "
                f"{len(self.family.members) - 1} other sessions too, which came of branch. Close "
                "them first, or adopt one; reset alone replaces this session's kernel."
            )
        async with AsyncExitStack() as held:
            held.enter_context(self.needed())
            if packages:  # lock order as in an install
                await held.enter_async_context(self.installing)
            layer = self._layer if packages else None
            if layer is not None:
                held.push_async_callback(_shielded, layer.take_back)
                await anyio.to_thread.run_sync(layer.set_aside)
            fresh = await self.lifecycle.start_fresh() if self.kernel_state.holds else None
            try:
                notice = await self._swap(held, fresh, layer, files=files)
                await self.lifecycle.ensure(progress)
                return notice
            except BaseException:
                if fresh is not None and fresh is not self.kernel:
                    await fresh.aclose()
                raise

    async def _swap(
        self, held: AsyncExitStack, fresh: Kernel | None, layer: Layer | None, *, files: bool
    ) -> Notice | None:
        notice = None
        self._cancel_save()
        await held.enter_async_context(self._save_lock)
        with anyio.CancelScope(shield=True):  # no notice without the loss, or the reverse
            if fresh is not None:
                loss = self.kernel_state.lost_state("the session was reset")
                notice = self.kernel_state.lose("The session was reset", loss)
            self._halt(StopReason.RESET, notice)
            await held.enter_async_context(self._turn)
            if self._closed:
                raise SessionNotFound("This session was closed meanwhile.")
            await self.lifecycle.forget(fresh)
            self.cells.settle(kernel_gone=True)
            if layer is not None:
                await anyio.to_thread.run_sync(layer.clear)
            if files:
                await anyio.to_thread.run_sync(self.workspace.clear)
        self.last_used = self._clock()
        return notice

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Cancel a running hibernation, and prevent others inside this block."""
        self._needs += 1
        self.lifecycle.cancel_hibernation()
        try:
            yield
        finally:
            self._needs -= 1

    async def attach(self, progress: ProgressCallback = silence) -> None:
        """Connect to the requested external kernel, and to no other from now on.

        Raises KernelMcpError.
        """
        kernel = await self.ensure_kernel(progress)
        self.request = replace(self.request, attach=kernel.place)
        self.lifecycle.request = self.request
        self.kernel_state.used = True  # it may have variables before the first cell

    def require_own(self, what: str) -> None:
        """Raise InputError if the kernel is attached; `what` names the tool, for the error text."""
        if self.request.attach:
            raise InputError(
                f"{what} is not available: this session is attached to an external kernel "
                f"({self.request.attach}). {INSTEAD.get(what, OWN_KERNEL)}"
            )

    async def ensure_kernel(self, progress: ProgressCallback = silence) -> Kernel:
        """Return the live kernel, or start one. Does not wait for a running cell.

        Raises KernelMcpError, SessionNotFound.
        """
        self._touched = True
        with self.needed():
            kernel = self.kernel
            if self.queue.current is not None and kernel is not None and kernel.exit is None:
                return kernel
            async with self._turn:
                if self._closed:
                    raise SessionNotFound("This session was closed meanwhile.")
                self.last_used = self._clock()
                return await self.lifecycle.ensure(progress)

    async def inquire(self, kind: str, content: dict[str, Any]) -> dict[str, Any] | None:
        """Send the kernel a shell request, such as one for completions, and return the reply.

        A kernel that has not answered after `INQUIRY_S` seconds is interrupted. Returns None
        without an answer, without a kernel, or while the kernel is in use.
        """
        kernel = self.kernel
        if kernel is None or self.queue.busy or self.turn.locked():
            return None
        async with self.turn:
            if kernel is not self.kernel or kernel.exit is not None:
                return None
            with kernel.asking("shell", kind, content) as answer:
                for _ in range(2):
                    with anyio.move_on_after(INQUIRY_S):
                        await answer.done.wait()
                    if answer.done.is_set():
                        break
                    kernel.interrupt(alone=True)
        return None if answer.message is None else answer.message.content

    async def bind(self, book: NotebookFile | None) -> None:
        """Append cells to a notebook from now on, also on later servers; None stops that."""
        self.notebooks.bound = book
        self._touched = True
        if self.persisted is not None:
            self._cancel_save()
            async with self._save_lock:
                with Barrier("noting the notebook of a session", self.handle):
                    await self.persisted.save_cells()

    async def hibernate(self, purpose: str = "") -> bool:
        """Save the variables and end the kernel; return False if the session is in use.

        A `purpose` forces it, whatever is lost. Without one, HibernationError is raised if
        something would be lost. Raises KernelMcpError or OSError if the server cannot save. The
        session is unchanged then.
        """
        if not self.can_hibernate:
            return False
        if (free := free_descriptors()) < RESTORE_DESCRIPTORS:
            raise HibernationError(
                f"the server can open only {free} more files (ulimit -n), too few to bring the "
                "session back"
            )
        now, used = self._clock(), self.last_used
        self._cancel_save()
        async with AsyncExitStack() as held:
            with self.lifecycle.preemptible() as waiting:
                await held.enter_async_context(self._save_lock)
                await held.enter_async_context(self._turn)
            used_since = self.last_used != used and not purpose
            if waiting.cancel_called or used_since or not self._can_hibernate_now:
                return False
            hibernated = HibernatedState(now, now - self.last_used, purpose)
            last = None if self.changed else self._last_save()
            done = await self.lifecycle.hibernate(
                hibernated, forced=bool(purpose), saved=last and last[0]
            )
            if done and self.persisted is not None:
                self.persisted.trim_journal()
            return done
        return False

    async def save(self, *, urgent: bool = False, most_bytes: int | None = None) -> SaveCost | None:
        """Save cells and variables for a later server, or return None while it is in use.

        Cells can run during the save, unless the kernel must not be forked. An `urgent` save waits
        for the running cell, and the next cell waits for the fork. With `most_bytes`, at the
        server's end, all variables are saved, or none if they do not fit. Raises HibernationError,
        OSError.
        """
        persisted = self.persisted
        if most_bytes is not None and self._waiting_save is not None:
            self._waiting_save.cancel()
        if persisted is None or self._closed or not (urgent or self.can_hibernate):
            return None
        async with self._save_lock:
            if self._closed:
                return None
            kernel = self.kernel  # it may have been replaced during the wait for the lock
            with anyio.CancelScope() as scope:
                self._save_scope = scope
                try:
                    if kernel is None or not self.kernel_state.used or kernel.exit is not None:
                        await persisted.save_cells()
                        return SaveCost()
                    written = await self._written(persisted, kernel, urgent, most_bytes)
                    if written is None or kernel is not self.kernel:
                        return None
                    dump, cpu_s = written
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(persisted.commit_dump, dump)
                    persisted.trim_journal()
                    self._tell_left_out(dump)
                    return SaveCost(dump.size, cpu_s)
                finally:
                    self._save_scope = None
                    with anyio.CancelScope(shield=True), Barrier("tidying a store", self.handle):
                        await anyio.to_thread.run_sync(persisted.entry.tidy)
        return None

    def _tell_left_out(self, dump: Dump) -> None:
        """Add a notice of variables that a save left out for lack of room, once for each."""
        names = {name for name, why in dump.lost.items() if why.startswith(TOO_LARGE)}
        if names - self._left_out:
            self.notifications.add(NO_ROOM.format(listing(sorted(names))))
        self._left_out = names

    async def settle(self) -> bool:
        """Stop the cells of its family at the server's end, and wait until they have ended.

        Running cells are interrupted, waiting ones are withdrawn. Return False if nothing was in
        progress.
        """
        held = [each for each in self.family.members if each.state == "busy" or each.turn.locked()]
        for each in held:
            while each.queue.withdraw(ENDED):
                pass
            if (cell := each.queue.current) is not None:
                cell.stop(StopReason.END)
        for each in held:
            if (cell := each.queue.current) is not None:
                await cell.finished.wait()
            async with each.installing, each.turn:
                await anyio.lowlevel.checkpoint()
        return bool(held)

    async def wait_until_free(self) -> bool:
        """Wait for the server's own work on it that prevents hibernation, such as a checkpoint.

        Return True if there was any. Do not wait for cells, which may never end.
        """
        members = self.family.members
        if any(each.state == "busy" for each in members):
            return False
        held = [each.turn for each in members if each.turn.locked()]
        for turn in held:
            async with turn:
                pass
        return bool(held)

    def unsaved(self, reason: str) -> None:
        """Note the reason why the last save in the background failed; empty if it succeeded."""
        if reason and not self.trouble:
            self.notifications.add(
                f"This session could not be saved in the background: {reason}. {AGAIN}"
            )
        self.trouble = reason

    def rarely_saved(self, pause_s: float) -> None:
        """Report, once, that it can be saved only every `pause_s` seconds."""
        if pause_s and not self.saved_every_s:
            self.notifications.add(RARELY.format(duration(pause_s)))
        self.saved_every_s = pause_s

    async def _written(
        self, persisted: PersistedSave, kernel: Kernel, urgent: bool, most_bytes: int | None
    ) -> tuple[Dump, float] | None:
        turn, whole = partial(self._between_cells, kernel, urgent), most_bytes is not None
        room = (await anyio.to_thread.run_sync(persisted.room)).size
        most = room if most_bytes is None else min(room, most_bytes)
        try:
            written = await write_forked(
                kernel, persisted, turn, max_bytes=most, whole=whole, hurry=whole
            )
        except UnfitToFork:
            async with turn() as free:
                if not free:
                    return None
                seconds = min(HERE_S * 2**persisted.late, SECONDS)
                work = partial(
                    write_here, kernel, persisted, max_bytes=most, whole=whole, seconds=seconds
                )
                written = await (work() if urgent else self.lifecycle.unless_needed(work))
        return written

    @asynccontextmanager
    async def _between_cells(self, kernel: Kernel, urgent: bool) -> AsyncIterator[bool]:
        """Hold `turn` inside this block, and yield True if the kernel may be saved now.

        False is yielded without the lock if the wait for it was cancelled. The same holds if the
        kernel is in use and the save is not `urgent`.
        """
        if not urgent and not self.can_hibernate:
            yield False
            return
        with anyio.CancelScope() as waiting:
            self._waiting_save = waiting
            await self._turn.acquire()
        self._waiting_save = None
        if waiting.cancelled_caught:
            yield False
            return
        try:
            busy = self.installing.locked() or (self.queue.busy and not urgent)
            free = kernel is self.kernel and kernel.exit is None and not (busy or self._closed)
            times, pid = _times(kernel), kernel.handle.pid
            yield free
            if free:  # main thread: time after the save; others: before, they may have run code
                await _rests(pid)
                self._computed = kernel, {**times, pid: _times(kernel).get(pid, 0)}
        finally:
            self._turn.release()

    def _last_save(self) -> tuple[HibernatedState, int] | None:
        """Return the last save of its kernel and the last cell in it; None for none."""
        if (
            self.persisted is None
            or (previous := self.persisted.last_save()) is None
            or previous.saved.cell is None
        ):
            return None
        return self._hibernated_state(previous, ""), previous.saved.cell

    def _hibernated_state(self, previous: PreviousSession, after: str) -> HibernatedState:
        saved, dump = previous.saved, previous.dump
        told = saved.variables.get("lost", {})
        return HibernatedState(
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

    async def stop_saving(self) -> None:
        """Cancel a running `save`, and wait until it no longer writes."""
        self._cancel_save()
        async with self._save_lock:
            pass

    async def undo(self, cells: int) -> Rollback:
        """Return to the state before the last `cells` cells. Raises UndoError, LaunchError."""
        if self.state == "busy":
            raise UndoError(
                "A cell or an install is under way: wait for its end, or interrupt it, then call "
                "undo again."
            )
        try:
            with self.needed():
                async with self._turn:
                    back = await self.recovery.undo(cells)
            self.cells.undone.update(back.undone)
        finally:
            await self.mark_save_undone()
        self.last_used = self._clock()
        self.touch()
        return back

    def touch(self) -> None:
        """Plan a save in the background, if it is persisted."""
        if self._saver is not None and self.persisted is not None:
            self._saver.touch(self)

    async def mark_save_undone(self) -> None:
        """Mark the last save as obsolete if the variables returned to an earlier state.

        A later server then restores them only on request. Also plans a new save.
        """
        if self.persisted is None or not (self._rolled_back or self._undone_lock.locked()):
            return
        with anyio.CancelScope(shield=True), Barrier("noting what was undone", self.handle):
            async with self._undone_lock:  # a second caller waits until the mark is written
                if not self._rolled_back:
                    return
                self._rolled_back = False
                self._cancel_save()
                async with self._save_lock:
                    if await self.persisted.mark_undone() and self._saver is not None:
                        self._saver.touch(self, at_once=True)

    async def note_adoption(self) -> None:
        """Note in the store that it uses the kernel of a branch, which was not saved yet."""
        if self.persisted is None:
            return
        with anyio.CancelScope(shield=True), Barrier("noting an adoption", self.handle):
            self._cancel_save()
            async with self._save_lock:
                await anyio.to_thread.run_sync(self.persisted.mark_adopted)

    def _note_rollback(self) -> None:
        self._rolled_back = True
        self._wake.set()

    def _cancel_save(self) -> None:
        if self._save_scope is not None:
            self._save_scope.cancel()

    def postpone_hibernation(self) -> None:
        """Postpone the next hibernation after a failed one, until `postponed_until`.

        The pause doubles with each failure, as long as the session is not used.
        """
        now = self._clock()
        unused = self.last_used < self.postponed_until
        self._postponed_s = min(2 * self._postponed_s, RETRY_MOST_S) if unused else RETRY_S
        self.postponed_until = now + self._postponed_s

    def remember(self, previous: PreviousSession) -> None:
        """Restore the cells and the open notebook of an earlier server's session. Blocking.

        Call it before anything else uses this session. Raises OSError, and ValueError for a
        malformed history.
        """
        if path := str(previous.saved.asked.get(NOTEBOOK, "")):
            with Barrier("opening the notebook of a session again", self.handle) as barrier:
                self.notebooks.bound = self.notebooks.book(path)
            if barrier.failure is not None:
                self.notifications.add(
                    f"{path!r} is not open any more: {reason_of(barrier.failure)}"
                )
            else:
                self.notifications.add(
                    f"{path!r} is still open: what is executed is appended to it. open_notebook "
                    "with an empty path ends that"
                )
        if previous.saved.history:
            self.cells.restore(previous.saved.history)
        for number, code in previous.cells.items():
            if number == len(self.cells) + 1:
                self.queue.remember(code, NOT_SAVED)

    def continue_from(self, previous: PreviousSession) -> None:
        """Set the variables of an earlier server's session for the next cell to restore."""
        saved = previous.saved
        ran = {cell.number for cell in self.cells[saved.through :] if cell.numbered}
        hibernated = self._hibernated_state(
            previous, lost_with(saved, sorted(ran.union(previous.cells)))
        )
        self._touched = True
        self.lifecycle.continue_from(hibernated, saved.cell)

    def lost_state(self, cause: str) -> Loss:
        """Return the loss by an end because of `cause`: variables, and undelivered losses.

        For a closed session it is the loss at the time of its end. `kept` is set if the kernel is
        attached.
        """
        if self._gone is not None:
            return replace(self._gone, cause=cause)
        loss = self.notifications.with_pending(self.kernel_state.lost_state(cause))
        return replace(loss, kept=bool(self.request.attach))

    def remark(self, text: str) -> None:
        """Add a text to the next answer."""
        self.notifications.add(text)

    @property
    def user(self) -> int:
        """Uid of the workspace's owner, as whom a root server runs the kernel; -1 if unknown."""
        try:
            return self.workspace.root.stat().st_uid
        except OSError:  # the workspace was removed
            return -1

    def end_kernel(self, cause: str) -> None:
        """Kill the kernel, with `cause` as the reason, unless it is attached."""
        if self.kernel is not None and not self.request.attach:
            self.kernel.handle.limits.give_up(cause)

    def close(self) -> None:
        """Stop all cells and refuse further ones; `serve` returns soon after."""
        notice = None
        if self.request.attach:  # the external kernel keeps its variables
            self.kernel_state.used = False
        self._gone = self.lost_state("it was closed")
        if self.kernel_state.holds and not self._closed:
            notice = self.kernel_state.lose(
                "The session was closed", self.kernel_state.lost_state("it was closed")
            )
        self._closed = True
        self.closing.set()
        self._halt(StopReason.CLOSE, notice)
        self._wake.set()

    async def variables(self) -> dict[str, Any]:
        """Return descriptions of the user's variables, and in `omitted` the number of others.

        There are none without a kernel. Those of a hibernated session are described as saved.
        Raises LaunchError if the kernel cannot answer because the running cell blocks it.
        """
        if self.hibernated is not None:
            return {"variables": self.hibernated.variables, "omitted": 0}
        kernel = self.kernel_state.kernel
        if kernel is None:
            return {"variables": [], "omitted": 0}
        try:
            reply = await kernel.ask(
                "kernel_mcp_variables_request", {}, timeout=VARIABLES_TIMEOUT_S
            )
        except LaunchError:
            if kernel.exit is None:
                raise
            async with self._turn:  # wait for the report of the running cell, if it died in one
                await self.recovery.note_death()
            if self.kernel not in (None, kernel):
                return await self.variables()
            return {"variables": [], "omitted": 0}
        return {
            "variables": descriptions(reply.get("variables")),
            "omitted": counted(reply.get("omitted")) or 0,
        }

    @property
    def _layer(self) -> Layer | None:
        return None if self.request.layer is None else Layer(self.request.layer)

    def _halt(self, reason: StopReason, lost: Notice | None) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
        self.lifecycle.cancel_hibernation()
        self.queue.halt(reason, lost)

    async def _next(self) -> None:
        """Wait for work; make a checkpoint in a pause, and restore a kernel that has died."""
        kernel, checkpoints = self.kernel, self.kernel_state.checkpoints
        pause_s = checkpoints.pause_s(kernel)
        with anyio.move_on_after(pause_s) as pause:
            await self._wake.wait()
            self._wake = anyio.Event()
        if pause.cancelled_caught:
            async with self._turn:
                if kernel is self.kernel and not self.queue:
                    await self._checkpoint(checkpoints.pause)
        elif (kernel := self.kernel) is not None and kernel.exit is not None:
            with Barrier("looking after a kernel that has ended", self.handle):
                async with self._turn:
                    await self.recovery.note_death()

    async def _checkpoint(self, when: Callable[[Kernel, int], Awaitable[object]]) -> None:
        if self.installing.locked():  # another thread of the kernel may be importing
            return
        with Barrier("making a checkpoint", self.handle):
            await self.lifecycle.checkpoint(when)

    def _look(self) -> None:
        self._wake.set()

    async def _start_ahead(self) -> None:
        if self._ahead is not None:
            with self._ahead, Barrier("starting a kernel ahead", self.handle):
                async with self._turn:
                    await self.lifecycle.ensure()
            self._ahead = None
            self.begun.set()

    async def _prepare_next(self) -> None:
        """Begin the next cell if it needs preparation, and prepare it without holding `turn`."""
        work, first = self._preparation, self.queue.first
        if self.request.attach or work is None or first is None or not work.concerns(first.code):
            return
        async with self._turn:  # wait for earlier users of the kernel
            cell = self.queue.begin()
        if cell is not None:
            await self._runner.prepare(cell, partial(work.prepare, self))

    async def _run_next(self) -> None:
        cell = self.queue.current or self.queue.begin()
        if cell is None:
            return
        if self.persisted is not None:
            self.persisted.log_cell(cell.number, cell.recorded)
        self.notebooks.begins(cell)
        try:
            if cell.outcome is None:
                await self._runner.run(cell)
        finally:
            with Barrier("putting a cell's output away", self.handle):
                self.queue.end(cell)
            self.last_used = self.last_ran = self._clock()
            if self.persisted is not None:
                self.touch()
        await self.notebooks.save()


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


async def _shielded(work: Callable[[], None]) -> None:
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(work)
