"""The cells of a session: those that wait for their turn, the one that has it, those before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from kernel_mcp.config.settings import MIB
from kernel_mcp.output.displayindex import DisplayIndex
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.sessions.cell import Cell, Outcome, Status, StopReason
from kernel_mcp.sessions.history import History
from kernel_mcp.sessions.ledger import Notice

RECORD_BYTES = 512 * MIB
"""Files that one session's cells and their outputs may take; the oldest make room."""


class CellQueue:
    """First come, first served. `cells` are all there have been, `current` is the one that runs.

    Their outputs go to files in `folder`; `clock` is the session's.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._displays: DisplayIndex[OutputLog] = DisplayIndex()
        self.cells = History(folder, self._displays)
        self.current: Cell | None = None
        self._folder = folder
        self._waiting: deque[Cell] = deque()
        self._clock = clock

    def __len__(self) -> int:
        """Cells waiting for their turn."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a cell runs or waits."""
        return self.current is not None or bool(self._waiting)

    def add(self, code: str, timeout_s: float) -> Cell:
        """Make a cell that waits behind all others."""
        number = len(self.cells) + 1
        cell = Cell(number, code, timeout_s, OutputLog(self._folder, number, index=self._displays))
        self.cells.append(cell)
        self._waiting.append(cell)
        return cell

    def begin(self) -> Cell | None:
        """Make the first cell that waits the running one; None when there is none."""
        if not self._waiting:
            return None
        cell = self.current = self._waiting.popleft()
        cell.begin(self._clock())
        return cell

    def end(self, cell: Cell) -> None:
        """Let the next one run after `cell`, whose output may make older ones go."""
        self.current = None
        self.cells.ended(cell, RECORD_BYTES)

    def place(self, cell: Cell) -> int:
        """How many cells have to end before `cell` begins; 0 once it runs."""
        if cell not in self._waiting:
            return 0
        return self._waiting.index(cell) + (self.current is not None)

    def withdraw(self, cause: str) -> Cell | None:
        """End the cell that would be the next to run; None when there is none."""
        return self._drop(self._waiting[0], cause) if self._waiting else None

    def abandon(self, cell: Cell) -> None:
        """Stop a cell whose caller has gone: at once when it waits, by interrupt when it runs."""
        if cell in self._waiting:
            self._drop(cell, "it was cancelled before it began")
        else:
            cell.stop(StopReason.CANCEL)
        cell.told = True  # nobody asks for it; what it cost is told with the next answer

    def halt(self, reason: StopReason, lost: Notice | None) -> None:
        """End every cell, because the session is reset or closed; `lost` is what that has cost."""
        what = "reset" if reason is StopReason.RESET else "closed"
        while self._waiting:
            cause = f"the session was {what} before this cell began"
            cell = self._waiting[0]
            cell.run_after([] if lost is None else [lost])
            self._drop(cell, cause).told = True
        if self.current is not None:
            self.current.own = lost
            self.current.stop(reason)
            self.current.told = True

    def file_away(self) -> list[int]:
        """Move ended cells to disk; the numbers of those whose end no answer has told of."""
        ended = [cell for cell in self.cells.untold if cell.finished.is_set()]
        for cell in ended:
            cell.told = True
        self.cells.settle()
        return [cell.number for cell in ended]

    def refuse(self, cause: str) -> list[int]:
        """End every cell that waits, because of `cause`, and move them to disk; their numbers."""
        while self._waiting:
            self._drop(self._waiting[0], f"it was not run: {cause}")
        return self.file_away()

    def _drop(self, cell: Cell, cause: str) -> Cell:
        """End a cell that waits."""
        self._waiting.remove(cell)
        cell.finish(Outcome(Status.INTERRUPTED, cause=cause), self._clock())
        return cell
