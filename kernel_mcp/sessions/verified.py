"""The state of the last verification of a session."""

from __future__ import annotations

from collections.abc import Mapping

from kernel_mcp.records import dataclass

_WORDS = {
    "same": "reproduced",
    "differs": "differs when run again",
    "fragile": "depends on chance",
    "failed": "fails when run again",
}
"""Marks of cells by their results; others bear none."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A verification: the result of each cell by its number, and the receipt as JSON."""

    cells: Mapping[int, str]
    receipt: bytes

    def mark(self, cell: int) -> str:
        """Return the mark of a cell for people; empty if it was not compared."""
        return _WORDS.get(self.cells.get(cell, ""), "")
