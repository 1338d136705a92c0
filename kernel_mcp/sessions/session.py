"""A session: a handle, a private workspace, a queue of cells and the kernel that runs them.

States: `new` (no kernel yet) → `idle` ⇄ `busy`, and `idle` → `hibernated` (no kernel, variables on
disk) → `busy`; a session outlives its kernel, and ends only as `closed`. Cells run one after the
other in the session's own task, so that a call may give up waiting without its cell being lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from kernel_mcp.audit import SILENT, Journal
from kernel_mcp.descriptions import counted, descriptions
from kernel_mcp.errors import KernelMcpError, LaunchError, SessionNotFound
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.output.displayindex import DisplayIndex
from kernel_mcp.output.outputs import OutputLog, make_room
from kernel_mcp.packages.layer import Layer
from kernel_mcp.sessions.cell import Cell, Outcome, Status, StopReason
from kernel_mcp.sessions.demand import Demand, KernelSource
from kernel_mcp.sessions.execution import run_cell
from kernel_mcp.sessions.gate import refuse
from kernel_mcp.sessions.hibernation import Sleep
from kernel_mcp.sessions.keeper import KernelKeeper
from kernel_mcp.sessions.narration import Report, narrate
from kernel_mcp.settings import MIB

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

RECORD_BYTES = 512 * MIB
"""Files that the outputs of one session's cells may take; the oldest make room."""
RESTART_S = 0.7
"""How long an answer about a death may wait for the fresh kernel."""
VARIABLES_TIMEOUT_S = 5.0


class Session:
    """One agent's notebook. `serve` runs its cells until the session is closed."""

    def __init__(
        self,
        *,
        demand: Demand,
        owner: str,
        name: str,
        workspace: Workspace,
        cells_dir: Path,
        source: KernelSource,
        admit: Callable[[Session], Awaitable[None]],
        grace_s: float,
        cpu_s: float,
        hibernate_bytes: int,
        clock: Clock,
        journal: Journal = SILENT,
    ) -> None:
        """`admit` lets a hibernated session have a kernel again."""
        self.handle = demand.session
        self.owner = owner
        self.name = name
        self.workspace = workspace
        self.journal = journal
        self.cells: list[Cell] = []
        self.ended = anyio.Event()
        self.closing = anyio.Event()
        self.installing = anyio.Lock()
        self.created = self.last_used = clock()
        self.spared_until = 0.0
        self._cells_dir = cells_dir
        self._displays: DisplayIndex[OutputLog] = DisplayIndex()
        self._keeper = KernelKeeper(
            demand,
            source,
            folder=cells_dir,
            max_bytes=hibernate_bytes,
            admit=lambda: admit(self),
            journal=journal,
        )
        self._grace_s = grace_s
        self._cpu_s = cpu_s
        self._clock = clock
        self._queue: deque[Cell] = deque()
        self._current: Cell | None = None
        self._turn = anyio.Lock()
        self._wake = anyio.Event()
        self._closed = False

    @property
    def demand(self) -> Demand:
        """What the session asks of its kernels."""
        return self._keeper.demand

    @property
    def state(self) -> str:
        """One of new, idle, busy, hibernated, closed."""
        if self._closed:
            return "closed"
        if self._current is not None or self._queue or self.installing.locked():
            return "busy"
        if not self._keeper.awake:
            return "hibernated"
        return "new" if self._keeper.kernel is None else "idle"

    @property
    def awake(self) -> bool:
        """Whether the session has a kernel or may start one; False when it is hibernated."""
        return self._keeper.awake

    @property
    def restful(self) -> bool:
        """Whether the session could be hibernated: awake, and nothing is being done in it."""
        return self.state in ("new", "idle") and not self._turn.locked()

    @property
    def sleep(self) -> Sleep | None:
        """What a hibernated session has saved."""
        return self._keeper.sleep

    @property
    def current(self) -> Cell | None:
        """The cell that is running, if any."""
        return self._current

    @property
    def unreported(self) -> Cell | None:
        """The oldest cell whose end no answer has told of yet."""
        return next((cell for cell in self.cells if not cell.told), None)

    @property
    def queued(self) -> int:
        """Cells waiting for their turn."""
        return len(self._queue)

    @property
    def kernel(self) -> Kernel | None:
        """The live kernel, if one has been started."""
        return self._keeper.kernel

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Run queued cells until the session is closed; ends the kernel on the way out."""
        try:
            async with anyio.create_task_group() as tasks:
                self._keeper.watch_in(tasks)
                task_status.started()
                while not self._closed:
                    await self._wake.wait()
                    self._wake = anyio.Event()
                    while self._queue and not self._closed:
                        async with self._turn:
                            await self._run_next()
                tasks.cancel_scope.cancel()
        finally:
            self._closed = True
            self.closing.set()
            with anyio.CancelScope(shield=True):
                async with self._turn:
                    await self._keeper.drop()

    def submit(self, code: str, timeout_s: float) -> Cell:
        """Queue one cell. Raises SessionNotFound once the session is closed."""
        if self._closed:
            raise SessionNotFound("This session has been closed. Open another with create_session.")
        number = len(self.cells) + 1
        cell = Cell(
            number, code, timeout_s, OutputLog(self._cells_dir, number, index=self._displays)
        )
        self.cells.append(cell)
        self._queue.append(cell)
        self._keeper.disturb()
        self._wake.set()
        self.last_used = self._clock()
        return cell

    def place(self, cell: Cell) -> int:
        """How many cells have to end before `cell` begins; 0 once it runs."""
        if cell not in self._queue:
            return 0
        return self._queue.index(cell) + (self._current is not None)

    async def follow(self, cell: Cell, wait_s: float, report: Report | None) -> None:
        """Wait until `cell` has ended, at most `wait_s` seconds, reporting new output meanwhile."""
        try:
            with anyio.move_on_after(wait_s):
                if report is None:
                    await cell.finished.wait()
                else:
                    await narrate(cell, report)
        finally:
            self.last_used = self._clock()

    def abandon(self, cell: Cell) -> None:
        """Stop a cell whose caller has gone: at once when queued, by interrupt when running."""
        if cell in self._queue:
            self._queue.remove(cell)
            cell.finish(
                Outcome(Status.INTERRUPTED, cause="it was cancelled before it began"), self._clock()
            )
            cell.told = True
        else:
            cell.stop(StopReason.CANCEL)

    async def interrupt(self) -> Cell | None:
        """Interrupt the running cell and wait for its end; None when nothing runs."""
        cell = self._current
        if cell is not None:
            cell.stop(StopReason.INTERRUPT)
            await cell.finished.wait()
        return cell

    async def reset(self, *, packages: bool, files: bool) -> Kernel:
        """Drop the queue and the kernel and start a fresh one.

        With `packages` it has none of those that were installed, with `files` an empty workspace.
        Raises KernelMcpError when no kernel can be started.
        """
        self._halt(StopReason.RESET)
        async with AsyncExitStack() as held:
            if packages:  # in the order in which an install takes them
                await held.enter_async_context(self.installing)
            await held.enter_async_context(self._turn)
            await self._keeper.forget()
            if files:
                await anyio.to_thread.run_sync(self.workspace.clear)
            if packages and self.demand.layer is not None:
                await anyio.to_thread.run_sync(Layer(self.demand.layer).clear)
            self.last_used = self._clock()
            return await self._keeper.ensure(lambda _text: None)

    async def ensure_kernel(self) -> Kernel:
        """The live kernel, without waiting for a cell that runs in it.

        Starts one where there is none. Raises KernelMcpError.
        """
        self._keeper.disturb()
        kernel = self.kernel
        if self._current is not None and kernel is not None and kernel.exit is None:
            return kernel
        async with self._turn:
            if self._closed:
                raise SessionNotFound("This session was closed meanwhile.")
            self.last_used = self._clock()
            return await self._keeper.ensure(lambda _text: None)

    async def hibernate(self, purpose: str = "") -> bool:
        """Save the variables and end the kernel; False when the session is in use, or is by now.

        Raises KernelMcpError or OSError when the server cannot do that now; nothing is lost then.
        """
        if not self.restful:
            return False
        now = self._clock()
        async with self._turn:
            return await self._keeper.hibernate(Sleep(now, now - self.last_used, purpose))

    def rouse(self) -> None:
        """Count as awake from now on, because room was made for a kernel."""
        self._keeper.awake = True

    def remark(self, text: str) -> None:
        """Have the answer of the next cell say this too."""
        self._keeper.news.append(text)

    def close(self) -> None:
        """Stop everything; `serve` returns soon after."""
        self._closed = True
        self.closing.set()
        self._halt(StopReason.CLOSE)
        self._wake.set()

    async def variables(self) -> dict[str, Any]:
        """The user's variables as the kernel describes them; no variables without a kernel.

        Those of a hibernated session are described as they were. Raises LaunchError when the kernel
        cannot answer because the running cell blocks it.
        """
        if self.sleep is not None:
            return {"variables": self.sleep.variables, "omitted": 0}
        kernel = self._keeper.kernel
        if kernel is None or kernel.exit is not None:
            return {"variables": [], "omitted": 0}
        reply = await kernel.ask("kernel_mcp_variables_request", {}, timeout=VARIABLES_TIMEOUT_S)
        return {
            "variables": descriptions(reply.get("variables")),
            "omitted": counted(reply.get("omitted")) or 0,
        }

    def _halt(self, reason: StopReason) -> None:
        self._keeper.disturb()
        what = "reset" if reason is StopReason.RESET else "closed"
        while self._queue:
            cause = f"the session was {what} before this cell began"
            self._queue.popleft().finish(Outcome(Status.INTERRUPTED, cause=cause), self._clock())
        if self._current is not None:
            self._current.stop(reason)

    async def _run_next(self) -> None:
        if not self._queue:
            return
        cell = self._current = self._queue.popleft()
        cell.begin(self._clock())
        try:
            cell.finish(await self._run(cell), self._clock())
        except KernelMcpError as error:
            cell.fail(error, self._clock())
        except Exception:
            logger.exception("cell %d of a session failed inside the server", cell.number)
            await self._keeper.drop()
            cell.fail(
                LaunchError(
                    "The server failed while running this cell; its kernel was ended and the "
                    "variables are lost. Run the cell again; the server's log says more."
                ),
                self._clock(),
            )
        finally:
            if cell.outcome is None:
                cell.finish(Outcome(Status.KILLED, False, "the session was closed"), self._clock())
            self.journal.ran(cell)
            if cell.log.disk_bytes:
                make_room([earlier.log for earlier in self.cells], RECORD_BYTES)
            self._current = None
            self.last_used = self._clock()

    async def _run(self, cell: Cell) -> Outcome:
        with anyio.CancelScope() as scope:
            cell.watch_stop(scope)
            kernel = await self._keeper.ensure(cell.step)
        cell.watch_stop(None)
        if scope.cancelled_caught:
            return Outcome(Status.INTERRUPTED, cause="it was stopped while its kernel was starting")
        loss = self._keeper.report(cell)
        outcome = await self._run_in(kernel, cell)
        if loss is not None and outcome.state_kept:
            outcome = replace(outcome, state_kept=False, cause=outcome.cause or loss)
        return outcome

    async def _run_in(self, kernel: Kernel, cell: Cell) -> Outcome:
        refusal = await refuse(cell.code, kernel.policy, self.demand.workspace)
        if refusal is not None:
            cell.take(refusal)
            self.journal.refused(cell, refusal.value)
            return Outcome(Status.ERROR, cause="refused by the import policy; nothing was run")
        self._keeper.used = True
        self.journal.begins(kernel.handle)
        outcome = await run_cell(
            kernel, cell, grace_s=self._grace_s, cpu_s=self._cpu_s, clock=self._clock
        )
        if outcome.status is Status.KILLED:
            await self._keeper.drop()
            if cell.stop_reason is StopReason.CANCEL:  # nobody waits for this cell's answer
                self._keeper.tell_loss(
                    "a cell whose call was cancelled did not react to its interrupt and was killed"
                )
            if cell.stop_reason not in (StopReason.RESET, StopReason.CLOSE):
                await self._replace_kernel(cell)
        return outcome

    async def _replace_kernel(self, cell: Cell) -> None:
        """Have a fresh kernel up by the time the answer about a death goes out, if it is quick."""
        try:
            with anyio.move_on_after(RESTART_S):
                await self._keeper.ensure(lambda _text: None)
        except KernelMcpError as error:
            cell.notice(f"A fresh kernel could not be started: {error}")
