"""Two revisions side by side, and the ledger of tokens."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import compared
from benchmarks.tokens import RECORDED, Ledger, Shown, recorded, table, with_needed
from tests.unit.tools.served import served

KEY = ("Warm cell", "kernel-mcp, stdio", 0)


def row(value: float, times: float | None = None, *, higher: bool = False) -> dict[str, Any]:
    return {"median": value, "times_better_than_floor": times, "higher_is_better": higher}


def test_a_figure_counts_by_its_floor_where_it_has_one() -> None:
    slow_machine = [{KEY: row(4.0, 2.0)}, {KEY: row(4.2, 2.0)}]
    quick_machine = [{KEY: row(2.0, 2.0)}, {KEY: row(2.1, 1.98)}]
    lines, lost = compared(slow_machine, quick_machine)
    assert not lost
    (line,) = lines
    assert line.endswith(("0.99", "1.00"))


def test_a_loss_is_named_whichever_way_is_better() -> None:
    lines, lost = compared([{KEY: row(2.0)}], [{KEY: row(3.0)}])
    assert lost
    assert lines[0].endswith("0.67  LOSS")
    lines, lost = compared([{KEY: row(2.0, higher=True)}], [{KEY: row(3.0, higher=True)}])
    assert not lost
    assert lines[0].endswith("1.50")


def test_what_one_of_them_has_not_is_left_out_and_so_are_others() -> None:
    peer = ("Warm cell", "another server", 0)
    assert compared([{KEY: row(1.0)}], [{peer: row(1.0)}]) == ([], False)
    assert compared([{peer: row(1.0)}], [{peer: row(9.0)}]) == ([], False)


@pytest.mark.anyio
async def test_recorded_analyses_are_twelve_and_call_tools_that_are_there(tmp_path: Path) -> None:
    analyses = recorded(RECORDED.read_text("utf-8"))
    async with served(tmp_path) as server:
        tools = {each.name: each for each in (await server.agent.client.list_tools()).tools}
    assert len(analyses) == 12
    for title, steps in analyses.items():
        assert len(steps) >= 5, title
        for step in steps:
            assert step.arguments.keys() <= tools[step.tool].input_schema["properties"].keys()
            ast.parse(step.code)


def test_a_command_has_the_code_that_it_depends_on_and_prints_its_value() -> None:
    before = [
        ast.parse("import numpy as np\nx = np.ones(3)\nx"),
        ast.parse("unused = 1"),
        ast.parse("y = x.sum()\nfor each in x:\n    print(each)"),
    ]
    assert with_needed(before, "y + 1") == (
        "import numpy as np\nx = np.ones(3)\ny = x.sum()\nprint(y + 1)"
    )
    assert with_needed(before, "print(x)") == "import numpy as np\nx = np.ones(3)\nprint(x)"
    assert with_needed([ast.parse("d = {}"), ast.parse("d['a'] = 1")], "d") == (
        "d = {}\nd['a'] = 1\nprint(d)"
    )


def test_the_ledger_adds_up_calls_errors_and_characters_by_tool() -> None:
    ledger = Ledger(definitions=1234)
    ledger.enter("Iris", "execute", {"code": "1"}, Shown("1"))
    ledger.enter("Iris", "execute", {"code": "1/0"}, Shown("error", failed=True))
    ledger.enter("Iris", "info", {}, Shown("", pictures=1))
    lines = [*table({"ours": ledger})]
    assert lines[1].split() == ["ours", "execute", "2", "1", "26", "6", "0"]
    assert lines[3].split() == ["ours", "all", "3", "1", "28", "6", "1"]
    assert lines[4].split() == ["ours", "(definitions)", "1,234"]
    assert lines[-1].split() == ["Iris", "34"]
