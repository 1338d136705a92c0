"""A cell: its code, output, notices and outcome, and progress reports while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.environments.progress import BEAT_S
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.identity import Principal
from kernel_mcp.kernels.run import CellUsage
from kernel_mcp.output.items import Event, Failure, Item, Stream
from kernel_mcp.output.outputs import OutputLog, Position
from kernel_mcp.output.text import one_line
from kernel_mcp.policy.missing import missing, missing_magic
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.notifications import Loss, Notice, NotificationQueue
from kernel_mcp.sessions.questions import Clock, Questions
from kernel_mcp.telemetry.origin import NOWHERE


class Status(str, Enum):
    """The status of a cell; all but the first two are final."""

    QUEUED = "queued"
    RUNNING = "running"
    OK = "ok"
    ERROR = "error"
    INTERRUPTED = "interrupted"
    TIMEOUT = "timeout"
    KILLED = "killed"


class Phase(str, Enum):
    """The phase of a cell. After its end a cell keeps the last phase."""

    QUEUE = "queue"
    START = "start"
    """Its kernel is being started or restored."""
    CHECK = "check"
    """Syntax and policy are checked; a cell that ended here was refused."""
    INSTALL = "install"
    """Packages that its code requests are being installed."""
    RUN = "run"
    """Its code was sent to the kernel."""


class Ahead(str, Enum):
    """The reason for a checkpoint before a cell."""

    NO = "no"
    LONG = "long"
    """The cell may take long."""
    ASKED = "asked"


class StopReason(str, Enum):
    """The reason for which the server stops a running cell."""

    TIMEOUT = "timeout"
    CPU = "cpu"
    DISK = "disk"
    INTERRUPT = "interrupt"
    CANCEL = "cancel"
    RESET = "reset"
    CLOSE = "close"
    END = "end"


FOLLOWED_S = 15.0
"""Seconds after a poll in which a client follows its tasks: three of the slowest polls."""
AT_ONCE = (StopReason.RESET, StopReason.CLOSE)
"""Reasons without a grace period. They replace any other reason."""


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """The outcome of a cell.

    `state_kept` is False if variables of this or earlier cells were lost. `cause` is the reason of
    the outcome, None without one. `exit_code` is that of a shell: 0, 1 for an exception, or 128
    plus a signal number. It is None if none of the code has run.
    """

    status: Status
    state_kept: bool = True
    cause: str | None = None
    exit_code: int | None = None


PERSON = "person"
"""The author of cells that are submitted through a session's endpoint, not by its agent."""


class Watcher(Protocol):
    """An observer of the cells of a session. Its methods raise nothing."""

    def begun(self, cell: Cell) -> None:
        """Note that a cell has begun to run."""

    def shown(self, cell: Cell, event: Event) -> None:
        """Note an output of a cell, possibly after its end."""

    def ended(self, cell: Cell) -> None:
        """Note that a cell has ended, possibly without a call of `begun`."""


class Cell:
    """One cell of a session. Times are seconds of the session's clock.

    recorded           the code as written to disk, with hidden values masked
    plain              the code for the kernel, without the installations that the server did
    installed          the result of those installations, as text
    notebook           path of its notebook, in whose folder it runs; empty for none
    author             empty for the agent; no answer reports the end of other authors' cells
    timeout_s          time limit; 0 for none
    since              number of the session's last notice when the cell was submitted
    before             notices of losses from before it began
    unreported_losses  the notices of `before` that no delivered answer has reported
    caused_loss        notice of the loss that it caused
    end_reported       True if a delivered answer has reported its end, or none will
    reported           position in the output up to which delivered answers have reported it
    late_since         position of the output since its end that no answer has had; None for none
    calls              number of calls that wait for it
    called             True if a call has ever waited for it
    telling            True while an answer that reports its end is being delivered
    abandoned          True if its call was cancelled
    state_as_of        last cell whose effects the variables had at its end, or before at its start
    began_as_of        the same at its start, 0 for no cell; None if its code was not run
    lost_before        reason why all variables were lost since the cell before; may be empty
    ahead              reason for a checkpoint before it
    rollback           text on the state restored after its kernel was killed; empty for none
    missing            module or magic that was not available, as named by `policy.missing`
    origin, who        the request that submitted it, and the principal of that
    questions          what its code asks a person; None if it may not ask
    """

    def __init__(
        self,
        number: int,
        code: str,
        timeout_s: float,
        log: OutputLog,
        *,
        author: str = "",
        watchers: Sequence[Watcher] = (),
        recorded: str | None = None,
    ) -> None:
        self.number = number
        self.recorded = code if recorded is None else recorded
        self.author = author
        self._watchers = watchers
        self.code = self.plain = code
        self.installed = self.notebook = ""
        self.timeout_s = timeout_s
        self.log = log
        self.started: float | None = None
        """Time of `begin`; None before."""
        self.duration_s = 0.0
        self.outcome: CellOutcome | None = None
        self.phase = Phase.QUEUE
        self.numbered = False
        self.state_as_of: int | None = None
        self.began_as_of: int | None = None
        self.lost_before = ""
        self.error: Exception | None = None
        self.finished = anyio.Event()
        self.since = 0
        self.before: list[Notice] = []
        self.caused_loss: Notice | None = None
        self.notices: list[str] = []
        self.steps: list[str] = []
        self.end_reported = bool(author)
        self.calls = 0
        self.called = self.telling = self.abandoned = False
        self.listens = False
        self.lasting = False
        """True if a task follows it, which later servers answer: its end is saved at once."""
        self.followed = False
        """True if a task follows it, until its end is a notice."""
        self.reported = Position()
        self.late_since: Position | None = None
        self.unreported_losses: list[Notice] = []
        self.stop_reason: StopReason | None = None
        self.missing = ""
        self.removed: tuple[int, list[str]] = (0, [])
        """Number of variables removed without a `del` that names them, and the first names."""
        self.usage = CellUsage()
        self.record: dict[str, Any] = {}
        """The record of its kernel; see `kernel_specs.restricted.record`."""
        self.ahead = Ahead.NO
        self.rollback = ""
        self.origin = NOWHERE
        self.who = Principal()
        self.questions: Questions | None = None
        self._asked = Position()
        self._scope: anyio.CancelScope | None = None
        self._clock: Clock | None = None
        self._changes = 0
        self._changed: anyio.Event | None = None

    @classmethod
    def ended(
        cls, number: int, code: str, log: OutputLog, outcome: CellOutcome, duration_s: float
    ) -> Cell:
        """Return a finished cell, restored from its row."""
        cell = cls(number, code, 0.0, log)
        cell.outcome, cell.duration_s, cell.end_reported = outcome, duration_s, True
        cell.finished.set()
        return cell

    @property
    def status(self) -> Status:
        """The status now."""
        if self.outcome is not None:
            return self.outcome.status
        return Status.QUEUED if self.started is None else Status.RUNNING

    @property
    def execution_count(self) -> int | None:
        """The number of the cell if its code was sent to the kernel, else None."""
        return self.number if self.numbered else None

    def begin(self, now: float) -> None:
        """Mark the cell as running since `now`."""
        self.started = now
        for each in self._watchers:
            each.begun(self)

    def finish(self, outcome: CellOutcome, now: float) -> None:
        """Record how the cell ended; only the first call counts."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        self.duration_s = 0.0 if self.started is None else now - self.started
        if self.questions is not None:
            self.questions.end()
        with Barrier(f"closing the output of cell {self.number}"):
            self.log.close()
        for each in self._watchers:
            each.ended(self)
        self.finished.set()
        self.note_change()

    def fail(self, error: Exception, now: float) -> None:
        """End the cell with `error`, which prevented its run, as its output."""
        self.error = error
        self._add(Failure(type(error).__name__, str(error), ()))
        self.finish(CellOutcome(Status.ERROR, cause=str(error)), now)

    def stop(self, reason: StopReason) -> None:
        """Cancel the scope of `watch_stop`. Only a reason in `AT_ONCE` replaces an earlier one."""
        if self.stop_reason is None or (reason in AT_ONCE and self.stop_reason not in AT_ONCE):
            self.stop_reason = reason
            if self._scope is not None:
                self._scope.cancel()

    def watch_stop(self, scope: anyio.CancelScope | None, known: StopReason | None = None) -> None:
        """Set the scope that `stop` cancels; None unsets it.

        The scope is cancelled at once if the cell already has a stop reason other than `known`.
        """
        self._scope, self._clock = scope, None if scope is None else Clock(scope)
        if scope is not None and self.stop_reason is not known:
            scope.cancel()

    def rest(self, *, resting: bool) -> None:
        """Stop the clock of the time limit, or start it again; see `AskingCell`."""
        if self._clock is not None:
            self._clock.rest(resting=resting)

    def printed(self) -> list[Item]:
        """Return the output since the last call; see `AskingCell`."""
        items, self._asked = self.log.since(self._asked), self.log.position()
        return items

    def listen(self) -> Callable[[Event], None]:
        """Return the callback for the kernel's output, which goes to this cell from now on."""
        self.listens = True
        return self.take

    def take(self, event: Event) -> None:
        """Add an output event, possibly of a thread or child process after the end of the cell."""
        if self.finished.is_set() and self.late_since is None:
            self.late_since = self.log.position()
        if isinstance(event, Failure):
            self.missing = missing(event) or self.missing
        elif isinstance(event, Stream) and (magic := missing_magic(event.text, self.code)):
            self.missing = magic
        self._add(event)
        self.note_change()

    def _add(self, event: Event) -> None:
        self.log.add(event)
        for each in self._watchers:
            each.shown(self, event)

    def notice(self, text: str) -> None:
        """Add a remark of the server to the next answer about this cell."""
        self.notices.append(text)
        self.note_change()

    def run_after(self, losses: list[Notice]) -> None:
        """Store losses from before this cell began, for the answers about it."""
        self.before = losses
        self.unreported_losses = list(losses)
        self.note_change()

    def delivered(
        self, *, ended: bool, to: Position, notices: int, losses: Sequence[Notice]
    ) -> None:
        """Record a delivered answer, which had output up to `to` and the first `notices` notices.

        `ended` is True if it reported the end of the cell. `losses` are those that it reported.
        """
        self.end_reported = self.end_reported or ended
        self.abandoned = self.abandoned and not ended
        self.reported = to
        self.tell_late(to)
        del self.notices[:notices]
        self.unreported_losses = [each for each in self.unreported_losses if each not in losses]

    def tell_late(self, to: Position) -> None:
        """Record a delivered answer that had the output since its end, up to `to`."""
        if self.late_since is not None:
            self.late_since = None if to == self.log.position() else to

    @property
    def losses(self) -> list[Loss]:
        """Losses from before the cell, then the loss that it caused."""
        found = [*self.before, *([self.caused_loss] if self.caused_loss is not None else [])]
        return [notice.loss for notice in found if notice.loss is not None]

    async def step(self, text: str) -> None:
        """Add a progress line on the start of the kernel or an installation before the run."""
        self.steps.append(text)
        self.note_change()

    async def changed(self, changes: int = 0) -> int:
        """Wait for a change (output, notice, end) after the first `changes`; return their count.

        Returns at once when the cell has ended.
        """
        while changes == self._changes and not self.finished.is_set():
            self._changed = self._changed or anyio.Event()
            await self._changed.wait()
        return self._changes

    def note_change(self) -> None:
        """Wake all who wait for a change."""
        self._changes += 1
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def meta(self, session: str, *, omitted: int, outputs: list[str]) -> dict[str, Any]:
        """Return the outcome under `kernel-mcp/cell`; `duration_s` in seconds, 0 until its end.

        `lost` names lost variables, `lost_omitted` counts further ones. `execution_count` equals
        `cell` if the code was sent to the kernel, else None.
        """
        outcome = self.outcome or CellOutcome(self.status)
        losses = self.losses
        cause = outcome.cause or (losses[0].cause if losses else None)
        return {
            "session": session,
            "cell": self.number,
            "status": outcome.status.value,
            "phase": self.phase.value,
            "execution_count": self.execution_count,
            "exit_code": outcome.exit_code,
            "duration_s": round(self.duration_s, 6),
            "cpu_s": None if self.usage.cpu_s is None else round(self.usage.cpu_s, 6),
            "peak_memory_bytes": self.usage.peak_bytes,
            "state_kept": outcome.state_kept and all(loss.kept for loss in losses),
            "lost": list(dict.fromkeys(name for loss in losses for name in loss.names)),
            "lost_omitted": sum(loss.more for loss in losses),
            "state_as_of": self.state_as_of,
            "cause": cause,
            "omitted": omitted,
            "outputs": outputs,
        }


SHOWN_ENDS = 5
SHOWN_CHARS = 80
"""Maximum characters of the first line of a person's cell that a notice shows."""


class News:
    """Reports cells that ended after their calls had returned, all in a single notice."""

    def __init__(self, notifications: NotificationQueue, clock: Callable[[], float]) -> None:
        """`clock` is the session's."""
        self._notifications = notifications
        self._clock = clock
        self._polled = -math.inf
        self._ends: dict[int, str] = {}
        self._notice: Notice | None = None

    def poll(self, cell: Cell) -> None:
        """Note a call of a task about `cell`; a client may poll its tasks one after the other."""
        cell.followed = cell.followed or not cell.finished.is_set()
        if cell.followed:
            self._polled = self._clock()

    def is_followed(self, cell: Cell) -> bool:
        """Return True if a task delivers the end of `cell`: tasks are polled, and it goes on."""
        polled = cell.followed and self._clock() - self._polled < FOLLOWED_S
        return polled and cell.stop_reason is not StopReason.INTERRUPT

    def ended(self, cell: Cell) -> None:
        """Report the end of `cell`, unless a call or the notice of its own loss reports it."""
        elsewhere = cell.calls or cell.telling or not cell.called or cell.caused_loss is not None
        known = (cell.end_reported and not cell.abandoned) or self.is_followed(cell)
        if cell.finished.is_set() and not (elsewhere or known):
            cell.followed = False
            which = "whose call was cancelled" if cell.abandoned else "which was running"
            end = f"cell {cell.number}, {which}, has ended: {cell.status.value}"
            self._tell({**self._unreported(), cell.number: end})

    def ran(self, cell: Cell) -> None:
        """Report a cell of another author that has just ended."""
        first = one_line(cell.code.strip().partition("\n")[0])[:SHOWN_CHARS]
        end = f"a {cell.author} ran cell {cell.number} ({cell.status.value}): {first}"
        self._tell({**self._unreported(), cell.number: end})

    def retract(self, cell: Cell) -> None:
        """Withdraw the report of `cell`, because an answer about the cell reports its end."""
        if cell.number in (ends := self._unreported()):
            self._tell({number: end for number, end in ends.items() if number != cell.number})

    def _unreported(self) -> dict[int, str]:
        return self._ends if self._notice in self._notifications.pending else {}

    def _tell(self, ends: dict[int, str]) -> None:
        self._notifications.withdraw(self._notice)
        self._ends = ends
        self._notice = self._notifications.add(_news(ends)) if ends else None


def _news(ends: dict[int, str]) -> str:
    parts = list(ends.values())[-SHOWN_ENDS:]
    if (more := len(ends) - SHOWN_ENDS) > 0:
        parts.insert(0, f"{more} other cell{'s have' if more > 1 else ' has'} ended")
    number = next(iter(ends)) if len(ends) == 1 else "N"
    return f"{'; '.join(parts)}; `wait` with cell={number} shows it"


EVERY_S = 0.1
CHARS = 2000


async def narrate(cell: Cell, report: ProgressCallback, clock: Callable[[], float]) -> None:
    """Report steps and new output until the cell ends, at most once every `EVERY_S` seconds.

    After `BEAT_S` seconds without a change the report is the time that the cell has been running,
    so that clients do not time out. `clock` is the session's.
    """
    began = clock()
    told = cell.reported
    steps, changes = len(cell.steps if cell.listens else cell.steps[:-1]), 0
    ended = False
    while not ended:
        with anyio.move_on_after(BEAT_S) as silence:
            changes = await cell.changed(changes)
        if silence.cancelled_caught:
            await report(_sign_of_life(cell, clock(), began))
            continue
        ended = cell.finished.is_set()
        news = [*cell.steps[steps:], cell.log.news(told, CHARS).strip("\n")]
        steps, told = len(cell.steps), cell.log.position()
        if text := "\n".join(filter(None, news)):
            await report(text)
        if not ended:
            with anyio.move_on_after(EVERY_S):
                await cell.finished.wait()


def _sign_of_life(cell: Cell, now: float, since: float) -> str:
    if cell.started is None:
        return f"cell {cell.number}: queued for {now - since:.0f} s"
    before = "installing" if cell.phase is Phase.INSTALL else "waiting for its kernel"
    doing = "running" if cell.listens else before
    return f"cell {cell.number}: {doing} for {now - cell.started:.0f} s"
