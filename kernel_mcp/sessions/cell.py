"""A cell: code given to a session, what it printed and showed, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.output.items import Event
from kernel_mcp.output.outputs import OutputLog, Position
from kernel_mcp.sessions.losses import Loss, Notice


class Status(str, Enum):
    """Where a cell stands; every value but the first two is final."""

    QUEUED = "queued"
    RUNNING = "running"
    OK = "ok"
    ERROR = "error"
    INTERRUPTED = "interrupted"
    TIMEOUT = "timeout"
    KILLED = "killed"


class StopReason(str, Enum):
    """Why a running cell is made to stop."""

    TIMEOUT = "timeout"
    CPU = "cpu"
    DISK = "disk"
    INTERRUPT = "interrupt"
    CANCEL = "cancel"
    RESET = "reset"
    CLOSE = "close"


AT_ONCE = (StopReason.RESET, StopReason.CLOSE)
"""Reasons that leave a cell no time, whatever it had been told before."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a cell ended.

    `state_kept` is False when variables of this or earlier cells were lost; `cause` says why, and
    is None where there is nothing to explain.
    """

    status: Status
    state_kept: bool = True
    cause: str | None = None
    execution_count: int | None = None


class Cell:
    """One cell of a session. Times are seconds of the session's clock; `timeout_s` 0 is none.

    `since` is the number of the session's last notice when the cell was handed in; `before` are the
    losses it ran after, `own` is the one that was its doing. It is `told` when an answer about its
    end was delivered, and `reported` is how far delivered answers have told its output.
    """

    def __init__(self, number: int, code: str, timeout_s: float, log: OutputLog) -> None:
        self.number = number
        self.code = code
        self.timeout_s = timeout_s
        self.log = log
        self.started: float | None = None
        self.duration_s = 0.0
        self.outcome: Outcome | None = None
        self.error: Exception | None = None
        self.finished = anyio.Event()
        self.since = 0
        self.before: list[Notice] = []
        self.own: Notice | None = None
        self.notices: list[str] = []
        self.steps: list[str] = []
        self.told = False
        self.listens = False
        self.reported = Position()
        self._unsaid: list[Notice] = []
        self._stop: StopReason | None = None
        self._scope: anyio.CancelScope | None = None
        self._changes = 0
        self._heard: anyio.Event | None = None

    @classmethod
    def ended(
        cls, number: int, code: str, log: OutputLog, outcome: Outcome, duration_s: float
    ) -> Cell:
        """A cell as it was when its end had been told."""
        cell = cls(number, code, 0.0, log)
        cell.outcome, cell.duration_s, cell.told = outcome, duration_s, True
        cell.finished.set()
        return cell

    @property
    def status(self) -> Status:
        """The status as of now."""
        if self.outcome is not None:
            return self.outcome.status
        return Status.QUEUED if self.started is None else Status.RUNNING

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the cell was told to stop, or None."""
        return self._stop

    def begin(self, now: float) -> None:
        """Mark the cell as running."""
        self.started = now

    def finish(self, outcome: Outcome, now: float) -> None:
        """Record how the cell ended; the first outcome stands."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        self.duration_s = 0.0 if self.started is None else now - self.started
        with Barrier(f"closing the output of cell {self.number}"):
            self.log.close()
        self.finished.set()
        self._tell()

    def fail(self, error: Exception, now: float) -> None:
        """Record that the cell could not be run at all because of `error`."""
        self.error = error
        self.finish(Outcome(Status.ERROR, cause=str(error)), now)

    def stop(self, reason: StopReason) -> None:
        """Ask whoever runs the cell to end it; the first reason stands but for one `AT_ONCE`."""
        if self._stop is None or (reason in AT_ONCE and self._stop not in AT_ONCE):
            self._stop = reason
            if self._scope is not None:
                self._scope.cancel()

    def watch_stop(self, scope: anyio.CancelScope | None, known: StopReason | None = None) -> None:
        """Let `stop` cancel `scope`, at once when there is another reason than the `known` one."""
        self._scope = scope
        if scope is not None and self._stop is not known:
            scope.cancel()

    def listen(self) -> Callable[[Event], None]:
        """Where a kernel's output goes from now on: to this cell until another one listens."""
        self.listens = True
        return self.take

    def take(self, event: Event) -> None:
        """Add an output event."""
        self.log.add(event)
        self._tell()

    def notice(self, text: str) -> None:
        """Add a remark of the server that belongs to this cell's answer."""
        self.notices.append(text)
        self._tell()

    def run_after(self, losses: list[Notice]) -> None:
        """Have the answers about this cell tell what was lost before it began."""
        self.before = losses
        self._unsaid = list(losses)
        self._tell()

    @property
    def unsaid(self) -> tuple[Notice, ...]:
        """Of the losses it ran after, those that no delivered answer about it has told."""
        return tuple(self._unsaid)

    def delivered(self, *, ended: bool, to: Position, notices: int, said: Sequence[Notice]) -> None:
        """An answer has arrived: with output up to `to`, `ended` or not, and so many notices."""
        self.told = self.told or ended
        self.reported = to
        del self.notices[:notices]
        self._unsaid = [notice for notice in self._unsaid if notice not in said]

    @property
    def losses(self) -> list[Loss]:
        """What was lost before it began and by it."""
        found = [*self.before, *([self.own] if self.own is not None else [])]
        return [notice.loss for notice in found if notice.loss is not None]

    async def step(self, text: str) -> None:
        """Tell what is being done before the cell can run; shown as progress only."""
        self.steps.append(text)
        self._tell()

    async def heard(self, changes: int = 0) -> int:
        """Return when there was output, a remark or the end beyond the first `changes` of them.

        Returns how many there have been, for the next call.
        """
        while changes == self._changes and not self.finished.is_set():
            self._heard = self._heard or anyio.Event()
            await self._heard.wait()
        return self._changes

    def _tell(self) -> None:
        self._changes += 1
        if self._heard is not None:
            self._heard.set()
            self._heard = None

    def meta(self, session: str, *, omitted: int, outputs: list[str]) -> dict[str, Any]:
        """The machine-readable outcome under `kernel-mcp/cell`; durations in seconds.

        `lost` names variables that are gone, `lost_omitted` counts those without a name there.
        """
        outcome = self.outcome or Outcome(self.status)
        losses = self.losses
        cause = outcome.cause or (losses[0].cause if losses else None)
        return {
            "session": session,
            "cell": self.number,
            "status": outcome.status.value,
            "execution_count": outcome.execution_count,
            "duration_s": round(self.duration_s, 6),
            "state_kept": outcome.state_kept and not losses,
            "lost": list(dict.fromkeys(name for loss in losses for name in loss.names)),
            "lost_omitted": sum(loss.more for loss in losses),
            "cause": cause,
            "omitted": omitted,
            "outputs": outputs,
        }


# Telling whoever waits for a cell what is new, while it runs.

EVERY_S = 0.1
CHARS = 2000


async def narrate(cell: Cell, report: ProgressCallback) -> None:
    """Report the steps before the cell and its new output, at most ten times a second."""
    told = cell.reported
    steps = changes = 0
    ended = False
    while not ended:
        changes = await cell.heard(changes)
        ended = cell.finished.is_set()
        for step in cell.steps[steps:]:
            await report(step)
        steps = len(cell.steps)
        text = cell.log.news(told, CHARS).strip("\n")
        told = cell.log.position()
        if text:
            await report(text)
        if not ended:
            with anyio.move_on_after(EVERY_S):
                await cell.finished.wait()
