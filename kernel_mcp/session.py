"""A session: a handle, a private workspace, a queue of cells and the kernel that runs them.

States: `new` (no kernel yet) → `idle` ⇄ `busy`; a session outlives its kernel, and ends only as
`closed`. Cells run one after the other in the session's own task, so that a call may give up
waiting without its cell being lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import anyio.abc

from kernel_mcp.cell import Cell, Outcome, Status, StopReason
from kernel_mcp.errors import KernelMcpError, LaunchError, SessionNotFound
from kernel_mcp.execution import run_cell
from kernel_mcp.gate import refuse
from kernel_mcp.displayindex import DisplayIndex
from kernel_mcp.outputs import OutputLog
from kernel_mcp.workspace import Workspace

if TYPE_CHECKING:
    from kernel_mcp.kernel import Kernel

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
Report = Callable[[str], Awaitable[None]]

RESTART_S = 0.7
"""How long an answer about a death may wait for the fresh kernel."""
PROGRESS_EVERY_S = 0.1
PROGRESS_CHARS = 2000
VARIABLES_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a session asks of its kernels: python and packages empty for the server's own."""

    session: str
    workspace: Path
    python: str = ""
    packages: tuple[str, ...] = ()

    @property
    def ordinary(self) -> bool:
        """Whether any kernel of the server will do."""
        return not (self.python or self.packages)


class KernelSource(Protocol):
    """Makes kernels that are ready to run cells."""

    async def start(self, demand: Demand, tell: Callable[[str], None]) -> Kernel:
        """Start a kernel, telling what is being done meanwhile. Raises KernelMcpError."""


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
        grace_s: float,
        cpu_s: float,
        clock: Clock,
    ) -> None:
        self.handle = demand.session
        self.demand = demand
        self.owner = owner
        self.name = name
        self.workspace = workspace
        self.cells: list[Cell] = []
        self.ended = anyio.Event()
        self.created = self.last_used = clock()
        self._cells_dir = cells_dir
        self._displays: DisplayIndex[OutputLog] = DisplayIndex()
        self._source = source
        self._grace_s = grace_s
        self._cpu_s = cpu_s
        self._clock = clock
        self._queue: deque[Cell] = deque()
        self._current: Cell | None = None
        self._kernel: Kernel | None = None
        self._ran_cells = False
        self._lost: str | None = None
        self._turn = anyio.Lock()
        self._wake = anyio.Event()
        self._closed = False
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def state(self) -> str:
        """One of new, idle, busy, closed."""
        if self._closed:
            return "closed"
        if self._current is not None or self._queue:
            return "busy"
        return "new" if self._kernel is None else "idle"

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
        return self._kernel

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Run queued cells until the session is closed; ends the kernel on the way out."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
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
            with anyio.CancelScope(shield=True):
                await self._drop_kernel()

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
                    await self._narrate(cell, report)
        finally:
            self.last_used = self._clock()

    async def _narrate(self, cell: Cell, report: Report) -> None:
        told = cell.reported
        steps = 0
        ended = False
        while not ended:
            await cell.heard()
            ended = cell.finished.is_set()
            for step in cell.steps[steps:]:
                await report(step)
            steps = len(cell.steps)
            text = cell.log.news(told, PROGRESS_CHARS).strip("\n")
            told = cell.log.position()
            if text:
                await report(text)
            if not ended:
                with anyio.move_on_after(PROGRESS_EVERY_S):
                    await cell.finished.wait()

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

    async def reset(self, *, files: bool) -> Kernel:
        """Drop the queue and the kernel and start a fresh one, with `files` in an empty workspace.

        Raises KernelMcpError when no kernel can be started.
        """
        self._halt(StopReason.RESET)
        async with self._turn:
            await self._drop_kernel()
            self._ran_cells = False
            if files:
                await anyio.to_thread.run_sync(self.workspace.clear)
            self.last_used = self._clock()
            return await self._ensure_kernel(lambda _text: None)

    def close(self) -> None:
        """Stop everything; `serve` returns soon after."""
        self._closed = True
        self._halt(StopReason.CLOSE)
        self._wake.set()

    async def variables(self) -> dict[str, Any]:
        """The user's variables as the kernel describes them; no variables without a kernel.

        Raises LaunchError when the kernel cannot answer because the running cell blocks it.
        """
        kernel = self._kernel
        if kernel is None or kernel.exit is not None:
            return {"variables": [], "omitted": 0}
        return await kernel.ask("kernel_mcp_variables_request", {}, timeout=VARIABLES_TIMEOUT_S)

    def _halt(self, reason: StopReason) -> None:
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
            await self._drop_kernel()
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
            self._current = None
            self.last_used = self._clock()

    async def _run(self, cell: Cell) -> Outcome:
        with anyio.CancelScope() as scope:
            cell.watch_stop(scope)
            kernel = await self._ensure_kernel(cell.step)
        cell.watch_stop(None)
        if scope.cancelled_caught:
            return Outcome(Status.INTERRUPTED, cause="it was stopped while its kernel was starting")
        refusal = await refuse(cell.code, kernel.policy, self.demand.workspace)
        if refusal is not None:
            cell.take(refusal)
            return Outcome(Status.ERROR, cause="refused by the import policy; nothing was run")
        lost, self._lost = self._lost, None
        if lost is not None:
            cell.notice(
                f"Before this cell, {lost}: all variables of earlier cells are lost, files in the "
                "workspace are kept. This cell ran in a fresh kernel"
            )
        self._ran_cells = True
        outcome = await run_cell(
            kernel, cell, grace_s=self._grace_s, cpu_s=self._cpu_s, clock=self._clock
        )
        if lost is not None and outcome.state_kept:
            outcome = replace(outcome, state_kept=False, cause=outcome.cause or lost)
        if outcome.status is Status.KILLED:
            await self._drop_kernel()
            self._ran_cells = False
            if cell.stop_reason not in (StopReason.RESET, StopReason.CLOSE):
                await self._replace_kernel(cell)
        return outcome

    async def _replace_kernel(self, cell: Cell) -> None:
        """Have a fresh kernel up by the time the answer about a death goes out, if it is quick."""
        try:
            with anyio.move_on_after(RESTART_S):
                await self._ensure_kernel(lambda _text: None)
        except KernelMcpError as error:
            cell.notice(f"A fresh kernel could not be started: {error}")

    async def _ensure_kernel(self, tell: Callable[[str], None]) -> Kernel:
        kernel = self._kernel
        if kernel is not None and kernel.exit is None:
            return kernel
        if kernel is not None:
            await self._mourn(kernel)
        kernel = await self._source.start(self.demand, tell)
        self._kernel = kernel
        assert self._tasks is not None
        self._tasks.start_soon(kernel.watch)
        return kernel

    async def _mourn(self, kernel: Kernel) -> None:
        """Remember for the next answer that a kernel died between cells."""
        exit_status = kernel.exit
        await self._drop_kernel()
        if self._ran_cells and exit_status is not None:
            self._ran_cells = False
            self._lost = f"the kernel was {exit_status.describe()} between cells"

    async def _drop_kernel(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            with anyio.CancelScope(shield=True):
                await kernel.aclose()
