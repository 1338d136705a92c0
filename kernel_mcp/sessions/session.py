"""A session: a handle, a private workspace, a queue of cells and the kernel that runs them.

States: `new` (no kernel yet) → `idle` ⇄ `busy`, and `idle` → `hibernated` (no kernel, variables on
disk) → `busy`. A session outlives its kernel, and ends only as `closed`. One task per session runs
its cells one after the other, so a cell continues when its call stops waiting.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from kernel_mcp.barriers import Barrier, run_in_thread
from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.layer import Layer
from kernel_mcp.environments.uv import ProgressCallback, silence
from kernel_mcp.errors import (
    BranchError,
    HibernationError,
    SessionNotFound,
    UndoError,
)
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.kernels.factory import KernelRequest, KernelSource
from kernel_mcp.launch.tool_gateway import ToolGateway
from kernel_mcp.linux.process import free_descriptors
from kernel_mcp.output.text import Masks
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell import Ahead, Cell, StopReason
from kernel_mcp.sessions.checkpoints import Checkpoints, IdleCheckpoints
from kernel_mcp.sessions.family import BranchOrigin, BranchStart, Family
from kernel_mcp.sessions.hibernation import IDLE, SavedState
from kernel_mcp.sessions.kernel_state import KernelState
from kernel_mcp.sessions.lifecycle import KernelLifecycle
from kernel_mcp.sessions.losses import Rollback
from kernel_mcp.sessions.notebook_sinks import NotebookSinks
from kernel_mcp.sessions.notifications import Loss, Notice, NotificationQueue
from kernel_mcp.sessions.recovery import KernelRecovery
from kernel_mcp.sessions.runner import CellQueue, CellRunner
from kernel_mcp.sessions.saver import Saver
from kernel_mcp.sessions.scheduler import CellScheduler, Preparation
from kernel_mcp.sessions.session_persistence import SessionPersistence
from kernel_mcp.sessions.session_save import SessionSave
from kernel_mcp.sessions.shared_context import SharedContext
from kernel_mcp.sessions.starter import KernelStarter
from kernel_mcp.sessions.tool_calls import SessionTools
from kernel_mcp.sessions.verified import Verified
from kernel_mcp.telemetry.spans import OriginContext, caught, of_session

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.notebooks.notebook_file import NotebookFile


RESTORE_DESCRIPTORS = 24
"""Maximum number of files that the server opens to start a kernel which loads a save."""


@dataclass(frozen=True, slots=True)
class SessionContext:
    """The objects that the sessions of one tenant pool share.

    `masks` hide values in code that is written to disk. `admit` reserves a kernel for a hibernated
    session. `saver` saves sessions that outlive the server. `idle_checkpoints` are those of a
    principal. `tools` calls tools of MCP servers.
    """

    settings: Settings
    source: KernelSource
    shared: SharedContext[Session]
    preparation: Preparation[Session] | None
    masks: Masks
    admit: Callable[[Session], Awaitable[None]]
    saver: Saver
    idle_checkpoints: Callable[[str], IdleCheckpoints]
    tools: ToolGateway


class Session:
    """One session. `serve` runs its cells until the session is closed.

    `kernel_state` holds the kernel, `lifecycle` replaces it, `recovery` restores it. `queue` holds
    the cells, `scheduler` runs them. `notifications` holds the notices, `persistence` saves the
    session.
    """

    def __init__(
        self,
        context: SessionContext,
        request: KernelRequest,
        *,
        owner: str,
        name: str,
        workspace: Workspace,
        cells_dir: Path,
        session_save: SessionSave,
        timeout_s: float,
    ) -> None:
        """`timeout_s` is the default time limit of cells."""
        shared, settings, clock = context.shared, context.settings, context.shared.clock
        self.request = request
        self.timeout_s = timeout_s
        self.handle = request.session
        self.owner = owner
        self.name = name
        self.workspace = workspace
        self.events = shared.events.of_session(owner, request.session)
        self.ended = anyio.Event()
        self.closing = anyio.Event()
        self.installing = anyio.Lock()
        self.installation: anyio.Event | None = None
        """Event that stops the installation for which a call waits; None without one."""
        self.verification: anyio.Event | None = None
        """Event that stops the verification of its cells; None while there is none."""
        self.created = clock()
        self.family: Family[Session] = Family(self.created, [self], self)
        self.origin: BranchOrigin | None = None
        self.keep_record = False
        self.forgotten = False
        """True if its persisted state is removed at its end."""
        self.notifications = NotificationQueue()
        self.queue = CellQueue(cells_dir, clock, self.notifications, context.masks)
        self.cells = self.queue.cells
        self.cells.notebook = request.interpreter.notebook
        self.notebooks = NotebookSinks(workspace, request.session, self.events, self.cells)
        self.persistence = SessionPersistence(self, session_save, context.saver, clock)
        self.kernel_state = KernelState(
            request.session,
            self.notifications,
            Checkpoints(
                settings.checkpoints,
                clock,
                self.notifications.add,
                lambda: self.persistence.entry is not None,
                context.idle_checkpoints(owner),
            ),
            request.interpreter.state,
        )
        self.recovery = KernelRecovery(
            self.kernel_state,
            self.events,
            on_death=lambda: self.scheduler.wake(),
            last_save=self.persistence.last_save,
            on_rollback=self._note_rollback,
        )
        alone = "" if not settings.several else owner
        self.tools = SessionTools(self, context.tools, alone)
        self.lifecycle = KernelLifecycle(
            request,
            KernelStarter(context.source, self.notifications, self.events, self.tools),
            self.recovery,
            session_save=session_save,
            admit=partial(context.admit, self),
            events=self.events,
        )
        runner = CellRunner(
            self.lifecycle,
            grace_s=settings.grace_s,
            cpu_s=(request.limits or settings.limits).cpu_seconds,
            clock=clock,
            events=self.events,
            checks=shared.checks,
            start_queue=shared.start_queue,
            module_folders=workspace.module_folders,
        )
        self.scheduler: CellScheduler[Session] = CellScheduler(
            self, runner, context.preparation, clock
        )
        self._needs = 0
        """Number of calls that use or replace the kernel, or wait to do so."""
        self._clock = clock
        self.turn = anyio.Lock(fast_acquire=True)
        """Lock of the kernel, held while it is used or replaced."""
        self._gone: Loss | None = None
        self.locks = ExitStack()
        """Locks on its workspace and its persisted entry."""
        self.held_back = False
        """True if it has persisted state that is restored only on request of its owner."""
        self.verified: Verified | None = None
        """The last verification of its cells; None without one."""
        self.touched = False
        """True once it was used."""

    @property
    def state(self) -> str:
        """One of new, idle, busy, hibernated, closed."""
        if self.closing.is_set():
            return "closed"
        if self.queue.busy or self.installing.locked():
            return "busy"
        if not self.lifecycle.awake:
            return "hibernated"
        return "new" if self.kernel_state.kernel is None else "idle"

    @property
    def can_hibernate(self) -> bool:
        """True if it can be hibernated: not hibernated, no cell, install or start in progress.

        False with an interpreter whose variables this server cannot or must not save.
        """
        return not self.turn.locked() and not self.scheduler.starting and self._can_hibernate_now

    @property
    def stays_hibernated(self) -> bool:
        """True if it is hibernated and no call is restoring it."""
        return self.state == "hibernated" and not self._needs and not self.turn.locked()

    @property
    def _can_hibernate_now(self) -> bool:
        """The same as `can_hibernate`, for a caller that holds `turn`."""
        others = [each for each in self.family.members if each is not self]
        return (
            self.request.interpreter.saves
            and not self._needs
            and self.state in ("new", "idle")
            and all(each.state != "busy" and not each.turn.locked() for each in others)
        )

    def join(self, family: Family[Session], start: BranchStart, origin: BranchOrigin) -> None:
        """Make it a branch in `family`, before `serve` is called."""
        self.family, self.origin = family, origin
        family.members.append(self)
        self.kernel_state.start_as_branch(start.kernel, start.checkpoint, start.folder)
        start.kernel.tools = self.tools
        start.kernel.hear(self.cells.begin_again().take)
        self.touched = True

    @property
    def blank(self) -> bool:
        """True if its end loses nothing: it was not used, and its workspace is empty."""
        if self.touched:
            return False
        try:
            return not any(self.workspace.root.iterdir())
        except OSError:
            return True

    @property
    def kernel(self) -> Kernel | None:
        """The kernel; None before its start and while hibernated."""
        return self.kernel_state.kernel

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Run queued cells until the session is closed, then end the kernel."""
        own = of_session(self.handle, self.owner)  # not that of the call which opened it
        with OriginContext(own):
            try:
                await self.scheduler.run(task_status=task_status)
            finally:
                self.close()
                with anyio.CancelScope(shield=True):
                    async with self.turn:
                        await self.kernel_state.drop()

    def submit(
        self, code: str, timeout_s: float, *, checkpoint: bool = False, author: str = ""
    ) -> Cell:
        """Queue a cell and return it; `checkpoint` requests a checkpoint before it.

        An empty `author` stands for the agent. Raises SessionNotFound once the session is closed.
        """
        if self.closing.is_set():
            raise SessionNotFound("This session has been closed. Open another with create_session.")
        self.touched = True
        cell = self.queue.add(code, timeout_s, author)
        cell.since = self.notifications.number
        cell.origin = caught(self.handle, self.owner)
        if checkpoint:
            cell.ahead = Ahead.ASKED
        elif timeout_s > self.timeout_s:
            cell.ahead = Ahead.LONG
        self.lifecycle.cancel_hibernation()
        self.scheduler.wake()
        self.family.last_used = self._clock()
        return cell

    async def reset(
        self, *, packages: bool, files: bool, progress: ProgressCallback = silence
    ) -> Notice | None:
        """Empty the queue and replace the kernel; return the notice of the loss, None for none.

        `packages` removes the installed packages too, `files` the files of the workspace. The old
        kernel ends once the fresh one has started. Raises KernelMcpError if none can be started, or
        if files or packages cannot be removed.
        """
        self.request.interpreter.require("reset")
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
            layer = Layer(self.request.layer) if packages and self.request.layer else None
            if layer is not None:
                held.push_async_callback(run_in_thread, layer.take_back)
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
        await held.enter_async_context(self.persistence.paused())
        with anyio.CancelScope(shield=True):  # no notice without the loss, or the reverse
            if fresh is not None:
                loss = self.kernel_state.lost_state("the session was reset")
                notice = self.kernel_state.lose("The session was reset", loss)
            self.scheduler.halt(StopReason.RESET, notice)
            await held.enter_async_context(self.turn)
            if self.closing.is_set():
                raise SessionNotFound("This session was closed meanwhile.")
            await self.lifecycle.forget(fresh)
            self.cells.settle(kernel_gone=True)
            if layer is not None:
                await anyio.to_thread.run_sync(layer.clear)
            if files:
                await anyio.to_thread.run_sync(self.workspace.clear)
        self.family.last_used = self._clock()
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

    async def open_kernel(self, progress: ProgressCallback = silence) -> Kernel:
        """Start or join the requested kernel; an external one is the only one from now on.

        Raises KernelMcpError.
        """
        kernel = await self.ensure_kernel(progress)
        self.cells.notebook = kernel.notebook_metadata
        if not self.request.interpreter.external:
            return kernel
        joined = kernel.joined or self.request.interpreter
        self.request = replace(self.request, interpreter=joined)
        self.lifecycle.request = self.request
        self.kernel_state.contents = joined.state
        self.kernel_state.used = True  # it may have variables before the first cell
        return kernel

    async def ensure_kernel(self, progress: ProgressCallback = silence) -> Kernel:
        """Return the live kernel, or start one. Does not wait for a running cell.

        Raises KernelMcpError, SessionNotFound.
        """
        self.touched = True
        with self.needed():
            kernel = self.kernel
            if self.queue.current is not None and kernel is not None and kernel.exit is None:
                return kernel
            async with self.turn:
                if self.closing.is_set():
                    raise SessionNotFound("This session was closed meanwhile.")
                self.family.last_used = self._clock()
                return await self.lifecycle.ensure(progress)

    async def bind(self, book: NotebookFile | None) -> None:
        """Append cells to a notebook from now on, also on later servers; None stops that."""
        self.notebooks.bound = book
        self.touched = True
        with Barrier("noting the notebook of a session", self.handle):
            await self.persistence.save_cells()

    async def hibernate(self, reason: str = IDLE) -> bool:
        """Save the variables and end the kernel; return False if the session is in use.

        Any `reason` but `IDLE` forces it, whatever is lost. Raises HibernationError if something
        would be lost and it is not forced. Raises KernelMcpError or OSError if the server cannot
        save. The session is unchanged then.
        """
        if not self.can_hibernate:
            return False
        if (free := free_descriptors()) < RESTORE_DESCRIPTORS:
            raise HibernationError(
                f"the server can open only {free} more files (ulimit -n), too few to bring the "
                "session back"
            )
        now, used = self._clock(), self.family.last_used
        async with AsyncExitStack() as held:
            with self.lifecycle.preemptible() as waiting:
                await held.enter_async_context(self.persistence.paused())
                await held.enter_async_context(self.turn)
            used_since = self.family.last_used != used and reason == IDLE
            if waiting.cancel_called or used_since or not self._can_hibernate_now:
                return False
            asked = SavedState(now, now - self.family.last_used, reason)
            last = None if self.persistence.changed else self.persistence.last_save()
            done = await self.lifecycle.hibernate(asked, saved=last and last[0])
            if done:
                self.persistence.trim_journal()
            return done
        return False

    async def undo(self, cells: int) -> Rollback:
        """Return to the state before the last `cells` cells. Raises UndoError, LaunchError."""
        if self.state == "busy":
            raise UndoError(
                "A cell or an install is under way: wait for its end, or interrupt it, then call "
                "undo again."
            )
        try:
            with self.needed():
                async with self.turn:
                    back = await self.recovery.undo(cells)
            self.cells.undone.update(back.undone)
        finally:
            await self.persistence.mark_undone()
        self.family.last_used = self._clock()
        self.persistence.touch()
        return back

    def _note_rollback(self) -> None:
        self.persistence.rolled_back = True
        if self.kernel is not None:
            self.kernel.hear(self.cells.begin_again().take)
        self.scheduler.wake()

    def lost_state(self, cause: str) -> Loss:
        """Return the loss by an end because of `cause`: variables, and undelivered losses.

        For a closed session it is the loss at the time of its end. `kept` is set if the kernel is
        attached.
        """
        if self._gone is not None:
            return replace(self._gone, cause=cause)
        loss = self.notifications.with_pending(self.kernel_state.lost_state(cause))
        return replace(loss, kept=self.request.interpreter.external)

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
        if self.kernel is not None and not self.request.interpreter.external:
            self.kernel.handle.limits.kill_for(cause)

    def close(self) -> None:
        """Stop all cells and refuse further ones; `serve` returns soon after."""
        notice = None
        if self.request.interpreter.external:  # which keeps its variables
            self.kernel_state.used = False
        self._gone = self.lost_state("it was closed")
        if self.kernel_state.holds and not self.closing.is_set():
            loss = self.kernel_state.lost_state("it was closed")
            notice = self.kernel_state.lose("The session was closed", loss)
        self.closing.set()
        self.scheduler.halt(StopReason.CLOSE, notice)
        self.scheduler.wake()
