"""A session's past cells, as Jupyter clients and notebooks ask for them."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_mcp.endpoints.plain import plain_cell
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.notebook_export import cell_as_json
from kernel_mcp.sessions.verified import Verified

MOST_CELLS = 1000
"""Most cells, the last ones, in an answer about the history or the record."""
MOST_CELL_BYTES = 2 * 1024 * 1024
"""Most bytes of a cell in the record."""
MOST_RECORD_BYTES = 8 * 1024 * 1024


def begun_of(cells: Sequence[Cell]) -> list[Cell]:
    """Return the last cells, without those that have not begun."""
    return [cell for cell in cells[-MOST_CELLS:] if cell.started is not None or cell.outcome]


def last_of(cells: Sequence[Cell], known: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last cells as JSON, within `MOST_RECORD_BYTES`; `known` has some, by number."""
    found: list[dict[str, Any]] = []
    left = MOST_RECORD_BYTES
    for cell in reversed(cells):
        made = known.get(cell.number) or as_json(cell)
        left -= len(json.dumps(made))
        if left < 0 and found:
            break
        found.insert(0, made)
    return found


def as_json(cell: Cell) -> dict[str, Any]:
    """Return a cell as that of a notebook, without active content."""
    return plain_cell(cell_as_json(cell, MOST_CELL_BYTES))


def marked(cell: dict[str, Any], verified: Verified) -> dict[str, Any]:
    """Return a cell with the result of its verification as a tag, which JupyterLab shows."""
    number = cell["id"].removeprefix("cell-")
    mark = verified.mark(int(number)) if number.isdecimal() else ""
    return {**cell, "metadata": {**cell["metadata"], "tags": [mark]}} if mark else cell


def history_of(cells: Sequence[Cell], wanted: Mapping[str, Any]) -> list[Any]:
    """Return the cells that a history request asks for: session, number, code. Reads files."""
    last, first = len(cells), max(0, len(cells) - MOST_CELLS)
    if wanted.get("hist_access_type") == "range":
        begin, end = wanted.get("start"), wanted.get("stop")
        first = max(first, begin - 1) if isinstance(begin, int) else first
        last = min(last, end - 1) if isinstance(end, int) else last
    rows = [(each.number, each.code) for each in (cells[k] for k in range(first, last))]
    if wanted.get("hist_access_type") == "search":
        pattern = str(wanted.get("pattern") or "*")
        rows = [each for each in rows if fnmatch.fnmatchcase(each[1], pattern)]
    most = wanted.get("n")
    if isinstance(most, int) and most >= 0:
        rows = rows[-most:] if most else []
    output = wanted.get("output") is True
    return [[1, number, [code, None] if output else code] for number, code in rows if code]
