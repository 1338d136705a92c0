"""Two revisions side by side: what is a loss, and what is not compared."""

from __future__ import annotations

from typing import Any

from benchmarks.compare import compared

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
