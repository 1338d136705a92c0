from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.notebooks.metadata import PYTHON_METADATA
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.sessions.boundaries import Boundaries
from kernel_mcp.sessions.cell import Cell, CellOutcome, Status
from kernel_mcp.sessions.notebook_export import notebook
from kernel_mcp.sessions.script_export import script


def cells(folder: Path, *states: tuple[int | None, int | None], causes: Any = ()) -> list[Cell]:
    """Ended cells, by the last cells whose effects the variables had at their begin and end."""
    made = []
    for number, (began, ended) in enumerate(states, 1):
        log = OutputLog(folder, number)
        cell = Cell.ended(number, f"x = {number}", log, CellOutcome(Status.OK), 0.1)
        cell.began_as_of, cell.state_as_of = began, ended
        cell.lost_before = dict(causes).get(number, "")
        made.append(cell)
    return made


@pytest.mark.parametrize(
    ("states", "undone", "where"),
    [
        ([(0, 1), (1, 2), (2, 3)], (), []),
        ([(0, 1), (1, 2), (0, 3), (3, 4)], (), [3]),
        ([(0, 1), (1, 2), (0, 3), (0, 4)], (), [3, 4]),
        ([(0, 1), (1, None), (0, 3)], (), [3]),
        ([(0, None), (0, 2), (2, 3)], (), []),
        ([(0, 1), (1, 1), (1, 3)], (), []),
        ([(0, 1), (None, 1), (1, 3)], (), []),
        ([(0, 1), (None, None), (0, 3)], (), [3]),
        ([(0, 1), (1, 2), (2, 3), (1, 4)], (2, 3), []),
        ([(0, 1), (1, 2), (2, 3), (1, 4)], (), [4]),
        ([(None, 1), (None, 2)], (), []),
    ],
)
def test_a_boundary_is_where_the_state_of_earlier_cells_is_gone(
    tmp_path: Path, states: Any, undone: Any, where: list[int]
) -> None:
    found = Boundaries(undone)
    assert [each.number for each in cells(tmp_path, *states) if found.before(each)] == where


def test_a_notebook_and_a_script_show_it(tmp_path: Path) -> None:
    causes = {2: "The session was reset"}
    ran = cells(tmp_path, (0, 1), (0, 2), (2, 3), causes=causes)
    text = (
        "Kernel boundary. The session was reset: of the variables of the cells above, all are gone."
    )
    book = json.loads(notebook(ran, session="s-1"))["cells"]
    assert [each["cell_type"] for each in book] == ["code", "markdown", "code", "code"]
    assert book[1]["source"] == f"**{text}**"
    assert book[2]["metadata"]["kernel-mcp"] == {"status": "ok", "session": "s-1", "cell": 2}
    code, left = script(ran, PYTHON_METADATA)
    assert left == []
    assert code.decode() == f"# %%\nx = 1\n\n# {text}\n# %%\nx = 2\n\n# %%\nx = 3\n"


def test_a_boundary_before_a_cell_that_is_left_out_stands_before_the_next(tmp_path: Path) -> None:
    ran = cells(tmp_path, (0, 1), (0, 2), (2, 3))
    ran[1].outcome = CellOutcome(Status.ERROR)
    code, left = script(ran, PYTHON_METADATA)
    assert left == [2]
    assert code.decode().splitlines()[3].startswith("# Kernel boundary. The kernel was replaced: ")
