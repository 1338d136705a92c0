from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.files.workspace import Workspace
from kernel_mcp.verification.comparison import Difference
from kernel_mcp.verification.issue import receipt_of
from kernel_mcp.verification.receipt import Receipt, read_receipt
from kernel_mcp.verification.report import CellResult, Report, Verdict
from kernel_mcp.verification.steps import Step

OTHER = Difference("stdout", 1, 1, "1", "2", 0)


def issued(
    folder: Path,
    records: list[dict[str, Any]],
    results: list[CellResult] | None = None,
    verdict: Verdict = Verdict.REPRODUCED,
    text: str = "words",
) -> Receipt:
    steps = [Step(f"In[{n}]", f"x = {n}", n, record=each) for n, each in enumerate(records, 1)]
    cells = tuple(results or [CellResult(each.name, same=True) for each in steps])
    made = receipt_of(Workspace(folder), steps, Report(verdict, text, cells=cells), ())
    assert read_receipt(made.as_json()) == made
    return made


def test_files_are_named_with_the_cells_that_opened_them(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a")
    (tmp_path / "out.txt").write_text("b")
    made = issued(
        tmp_path,
        [
            {"files": [["in.txt", "r", "0" * 16], ["gone.txt", "r", "0" * 16]]},
            {"files": [["out.txt", "w", ""], ["in.txt", "r", "0" * 16], ["new", "d", ""]]},
            {"files": [["out.txt", "r", "0" * 16]]},
        ],
    )
    assert [(each.path, each.cells) for each in made.inputs] == [("in.txt", (1, 2))]
    assert [(each.path, each.cells) for each in made.outputs] == [("out.txt", (2, 3))]


@pytest.mark.parametrize(
    "record",
    [
        {"files": "none"},
        {"files": [["in.txt", 1, None], [], ["a" * 10_000, "r", ""], ["\udc80", "r", ""]]},
        {"files": [[f"./{n}", "r", ""] for n in range(5000)]},
        {"files": [["in.txt\n", "r", ""], ["../../etc/passwd", "r", ""], ["/etc/passwd", "r", ""]]},
        {"seed": 10**30, "env": ["x"], "python": None},
        {"seed": True},
        {"seed": "5"},
    ],
)
def test_a_forged_record_gives_a_valid_receipt(tmp_path: Path, record: dict[str, Any]) -> None:
    made = issued(tmp_path, [record], text="\ud800" * 300, verdict=Verdict.DIFFERS)
    assert (made.inputs, made.hash_seeds) == ((), (0, 0))


@pytest.mark.parametrize(
    ("verdict", "result"),
    [
        (Verdict.REPRODUCED, "incomplete"),
        (Verdict.DIFFERS, "differs"),
        (Verdict.FRAGILE, "fragile"),
        (Verdict.FAILED, "does not run"),
    ],
)
def test_results_of_cells(tmp_path: Path, verdict: Verdict, result: str) -> None:
    results = [
        CellResult("In[1]", same=True),
        CellResult("In[2]", same=False, difference=OTHER),
        CellResult("In[3]", same=False),
        CellResult("In[4]", same=False, note="not compared"),
        CellResult("In[5]", same=False, note="not repeated: it ended as killed"),
    ]
    made = issued(tmp_path, [{}] * 5, results, verdict)
    second = "fragile" if verdict is Verdict.FRAGILE else "differs"
    assert [each.result for each in made.cells] == [
        "same",
        second,
        "failed",
        "skipped",
        "not repeated",
    ]
    assert made.result == result
    assert bool(made.differences) is (verdict is not Verdict.REPRODUCED)
