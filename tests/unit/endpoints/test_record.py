"""Past cells of a session, as clients ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.endpoints import record
from kernel_mcp.endpoints.record import as_json, begun_of, history_of, last_of, marked
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.verified import Verified


def cells(folder: Path, *codes: str) -> list[Cell]:
    """Cells that have begun."""
    made = [Cell(n, code, 0, OutputLog(folder, n)) for n, code in enumerate(codes, 1)]
    for cell in made:
        cell.started = 0.0
    return made


def test_what_has_not_begun_is_in_no_record(tmp_path: Path) -> None:
    made = cells(tmp_path, "1", "2")
    made[1].started = None
    assert begun_of(made) == made[:1]


def test_the_last_cells_that_fit_are_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cells(tmp_path, "a", "b", "c")
    sizes = [{"number": number, "text": "x" * 40} for number in (1, 2, 3)]
    monkeypatch.setattr(record, "MOST_RECORD_BYTES", 130)
    assert last_of(made, dict(zip((1, 2, 3), sizes, strict=True))) == sizes[1:]
    monkeypatch.setattr(record, "MOST_RECORD_BYTES", 1)
    assert last_of(made, dict(zip((1, 2, 3), sizes, strict=True))) == sizes[2:]
    assert as_json(made[0])["source"] in ("a", ["a"])


@pytest.mark.parametrize(
    ("wanted", "codes"),
    [
        ({"hist_access_type": "tail", "n": 2}, ["c", "ab"]),
        ({"hist_access_type": "tail", "n": 0}, []),
        ({"hist_access_type": "range", "start": 2, "stop": 3}, ["b"]),
        ({"hist_access_type": "range", "start": "x"}, ["a", "b", "c", "ab"]),
        ({"hist_access_type": "search", "pattern": "a*"}, ["a", "ab"]),
        ({"hist_access_type": "search", "pattern": "a*", "n": 1}, ["ab"]),
        ({}, ["a", "b", "c", "ab"]),
    ],
)
def test_history_is_chosen_as_jupyter_chooses(
    tmp_path: Path, wanted: dict[str, Any], codes: list[str]
) -> None:
    assert [row[2] for row in history_of(cells(tmp_path, "a", "b", "c", "ab"), wanted)] == codes


def test_history_has_outputs_where_they_are_asked_for(tmp_path: Path) -> None:
    assert history_of(cells(tmp_path, "a"), {"output": True}) == [[1, 1, ["a", None]]]


def test_verified_cells_have_the_result_as_a_tag(tmp_path: Path) -> None:
    made = [as_json(each) for each in cells(tmp_path, "a", "b", "c")]
    verified = Verified({1: "same", 2: "differs", 3: "skipped"}, b"")
    found = [marked(each, verified)["metadata"] for each in made]
    assert found == [{"tags": ["reproduced"]}, {"tags": ["differs when run again"]}, {}]
