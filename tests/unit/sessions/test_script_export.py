"""The code of a session's cells as a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.notebooks.metadata import PYTHON_METADATA, notebook_of
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.sessions.cell import Cell, CellOutcome, Status
from kernel_mcp.sessions.script_export import extension_of, script


def ran(folder: Path, *codes: tuple[str, Status]) -> list[Cell]:
    return [
        Cell.ended(number, code, OutputLog(folder, number), CellOutcome(status), 0.0)
        for number, (code, status) in enumerate(codes, 1)
    ]


def test_only_cells_that_ended_well_and_were_not_undone_are_in_it(tmp_path: Path) -> None:
    well, badly = Status.OK, Status.ERROR
    cells = ran(tmp_path, ("x = 1\n", well), ("1/0", badly), ("y = 2", well), ("x", well))
    code, left = script(cells, PYTHON_METADATA, undone={3})
    assert code == b"# %%\nx = 1\n\n# %%\nx\n"
    assert left == [2, 3]


def test_a_language_without_a_known_comment_has_no_marks(tmp_path: Path) -> None:
    cells = ran(tmp_path, ("a", Status.OK), ("b", Status.OK))
    assert script(cells, notebook_of("Brainfuck"))[0] == b"a\n\nb\n"


@pytest.mark.parametrize(
    ("given", "extension"), [(".R", ".R"), ("", ".txt"), ("py", ".txt"), ("./../x", ".txt")]
)
def test_the_extension_is_the_kernels_if_it_is_one(given: str, extension: str) -> None:
    spec = {"name": "x", "display_name": "x", "language": "x"}
    metadata = {"kernelspec": spec, "language_info": {"file_extension": given}}
    assert extension_of(metadata) == extension
