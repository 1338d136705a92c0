"""Bounds of a figure's numbers: what exceeds them is said, and waiting does not count."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from kernel_specs.restricted.display import charts


def shown(seconds: float, clock: Any) -> Any:
    """Axes of no known kind, which are asked for `seconds` of a clock."""

    def visible() -> bool:
        start = clock()
        while clock() - start < seconds:
            time.sleep(0.01) if clock is time.monotonic else None
        return True

    return SimpleNamespace(get_visible=visible, name="rectilinear", get_title=lambda: "")


def figure(*axes: Any) -> Any:
    return SimpleNamespace(axes=axes)


def test_numbers_that_take_too_much_work_are_said_to_be_left_out() -> None:
    chart, words = charts.described(figure(shown(charts.MOST_S + 0.1, time.thread_time)))
    assert chart == {}
    assert words.startswith("[the numbers of this figure are left out: more than 0.25 s of")


def test_time_that_a_figure_only_waits_costs_no_numbers() -> None:
    heatmap = SimpleNamespace(
        **vars(shown(charts.MOST_S * 3, time.monotonic)),
        patches=[],
        images=[],
        collections=[],
        containers=[],
        get_lines=list,
    )
    assert charts.described(figure(heatmap)) == ({}, "")  # of no known kind, but in time


def test_more_charts_than_are_read_are_said_to_be_too_many() -> None:
    many = [shown(0, time.monotonic)] * (charts.MOST_CHARTS + 1)
    assert charts.described(figure(*many)) == (
        {},
        "[the numbers of this figure are left out: more than 16 parts]",
    )
    assert charts.chart_of(figure(*many)) == {}
