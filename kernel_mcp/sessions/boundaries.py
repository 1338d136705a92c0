"""Places in the log of a session where the variables of earlier cells were lost."""

from __future__ import annotations

from collections.abc import Container

from kernel_mcp.sessions.cell import Cell


class Boundaries:
    """Finds the boundaries between cells, which are passed in order."""

    def __init__(self, undone: Container[int]) -> None:
        """`undone` are cells whose loss is known."""
        self._undone = undone
        self._held = 0

    def before(self, cell: Cell) -> str:
        """Return a sentence on the boundary before a cell; empty without one."""
        began, held = cell.began_as_of, self._held
        ended = cell.state_as_of or 0
        if began is not None:
            self._held = max(began, ended) if cell.outcome is not None else began
        if began is None or all(n in self._undone for n in range(began + 1, held + 1)):
            return ""
        cause = cell.lost_before or "The kernel was replaced"
        left = f"those of cell {began} and earlier ones are back" if began else "all are gone"
        return f"Kernel boundary. {cause}: of the variables of the cells above, {left}."
