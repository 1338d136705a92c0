"""Lost variables and undone cells as text."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_mcp.records import dataclass
from kernel_mcp.sessions.notifications import Loss
from kernel_mcp.sessions.words import listing

FILES_KEPT = "files in the workspace are kept"
NOT_ROLLED_BACK = "Files were not rolled back; programs that code had started have ended"
MOST_RUNS = 12
SHOWN_NAMES = 50
"""Maximum number of lost variables in the text of a notice. The structured result has up to
`notifications.MOST_NAMES`."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """The return of a kernel to an earlier state: that after cell `as_of`, 0 for before all cells.

    `undone` are the cells whose effects are lost, `names` the variables that no longer exist.
    `closed` are files that libraries had open and that have changed since.
    """

    as_of: int
    undone: tuple[int, ...]
    names: tuple[str, ...]
    closed: tuple[str, ...] = ()

    def words(self, killed: int | None = None) -> str:
        """Return a text on the state of the variables and the cells to run again.

        `killed` is the number of a cell that was killed, to run again too; None for none.
        """
        where = f"as after cell {self.as_of}" if self.as_of else "as before the first cell"
        again = [*self.undone, *([killed] if killed is not None else [])]
        text = f"Variables are {where}"
        if again:
            text += f"; run {cells_in_words(again)} again to have what came after it"
        names = f" Gone with that: {listing(self.names[:SHOWN_NAMES])}." if self.names else ""
        return f"{text}. {NOT_ROLLED_BACK}.{names}{closed_words(self.closed)}"

    def loss(self, cause: str) -> Loss | None:
        """Return the loss to report to waiting cells; None if no cell was undone."""
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


def lost_names(loss: Loss) -> str:
    """Return a sentence with up to `SHOWN_NAMES` names; empty without names."""
    if not loss.names:
        return ""
    more = loss.more + max(0, len(loss.names) - SHOWN_NAMES)
    others = f" and {more:,} more" if more else ""
    return f" Lost: {listing(loss.names[:SHOWN_NAMES])}{others}."
