"""Scenes of charts: round ticks, gaps, colors; a picture where a figure shows something else."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.tools.scenes import Clock, moment_ticks, round_ticks, scene

JANUARY = 1_704_067_200.0
DAY = 86_400.0


def line(*values: float | None, **fields: Any) -> dict[str, Any]:
    points = [[place, value] for place, value in enumerate(values)]
    return {"type": "line", "elements": [{"label": "1", "points": points}], **fields}


def drawn(chart: dict[str, Any]) -> dict[str, Any]:
    found = scene(chart)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("low", "high", "count", "labels"),
    [
        (0.25, 2.5, 3, ["1", "2"]),
        (27776.1, 27790.3, 5, ["27780", "27785", "27790"]),
        (0, 1, 5, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-0.3, 0.1, 4, ["-0.3", "-0.2", "-0.1", "0", "0.1"]),
        (0, 2.5e9, 5, ["0", "0.5B", "1.0B", "1.5B", "2.0B", "2.5B"]),
        (2777600.1, 2777600.3, 2, ["2777600.1", "2777600.2", "2777600.3"]),
        (1e-7, 2e-7, 2, ["1.0e-7", "1.5e-7", "2.0e-7"]),
        (0, 3e16, 3, ["0", "1e16", "2e16", "3e16"]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, count: int, labels: list[str]) -> None:
    assert [label for _, label in round_ticks(low, high, count)] == labels


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12), st.sampled_from((12, 5, 2, 1)))
def test_ticks_lie_between_the_ends_and_have_labels_that_differ(
    low: float, size: float, count: int
) -> None:
    if low + size <= low + abs(low) * 1e-9:
        return
    ticks = round_ticks(low, low + size, count)
    slack = size * 1e-4
    assert len(ticks) <= 2 * count + 2
    assert len({label for _, label in ticks}) == len(ticks)
    assert all(low - slack <= at <= low + size + slack for at, _ in ticks)


@pytest.mark.parametrize(
    ("size", "count", "first", "number"),
    [
        (4 * DAY, 5, "2024-01-01", 5),
        (DAY, 4, "00:00", 5),
        (2 * DAY, 4, "01-01 00:00", 5),
        (60, 4, "00:00:00", 5),
        (2, 4, "00:00.000", 5),
        (400 * DAY, 5, "2024-01", 5),
        (5000 * DAY, 5, "2025", 3),
    ],
)
def test_moments_are_whole_ones(size: float, count: int, first: str, number: int) -> None:
    found = [label for _, label in moment_ticks(JANUARY, JANUARY + size, count, Clock())]
    assert found[0] == first
    assert len(found) == number


@pytest.mark.parametrize(
    ("begin", "change", "labels", "hours"),
    [
        ("2024-10-27T00:00:00+02:00", -3, ["00:00", "01:00", "02:00", "03:00"], [0, 1, 2, 4]),
        ("2024-03-31T00:00:00+01:00", 2, ["00:00", "01:00", "03:00", "04:00", "05:00"], None),
    ],
)
def test_an_axis_on_which_clocks_change_has_true_distances_and_each_local_time_once(
    begin: str, change: int, labels: list[str], hours: list[int] | None
) -> None:
    first = datetime.fromisoformat(begin)
    moments = [first + timedelta(hours=hour) for hour in range(5)]
    for hour in range(abs(change), 5):
        moved = first.utcoffset() or timedelta()
        zone = timezone(moved + timedelta(hours=1 if change > 0 else -1))
        moments[hour] = moments[hour].astimezone(zone)
    places = [each.isoformat() for each in moments]
    chart = line(*range(5), x_limits=[places[0], places[-1]])
    chart["elements"][0]["points"] = list(map(list, zip(places, range(5), strict=True)))
    found = drawn(chart)
    ticks = [(at, label) for at, label in found["x"]["ticks"][0] if label.endswith(":00")]
    assert [label for _, label in ticks] == labels
    assert [(at - first.timestamp()) / 3600 for at, _ in ticks] == (hours or [0, 1, 2, 3, 4])
    (run,) = [shape["line"] for shape in found["shapes"] if "line" in shape]
    assert {two[0] - one[0] for one, two in pairwise(run)} == {3600.0}


def test_a_line_breaks_where_its_figure_does() -> None:
    shapes = drawn(line(1, 2, None, 4, 5))["shapes"]
    assert [shape["line"] for shape in shapes if "line" in shape] == [
        [(0, 1), (1, 2)],
        [(3, 4), (4, 5)],
    ]


def test_points_beside_a_line_are_not_joined() -> None:
    chart = line(1, 2, joined=[True, False])
    chart["elements"].append({"label": "b", "points": [[0, 2], [1, 1]]})
    found = drawn(chart)
    assert sum("line" in shape for shape in found["shapes"]) == 1
    assert [each["dot"] for each in found["legend"]] == [False, True]


def test_an_axis_has_limits_and_own_labels_of_its_figure() -> None:
    found = drawn(line(1, 2, y_limits=[3, 0], y_ticks=[0, 1, 9], y_tick_labels=["0%", "1%", "9%"]))
    assert found["y"]["ends"] == [3, 0]
    assert found["y"]["ticks"] == [[(0, "0%"), (1, "1%")]]
    plain = drawn(line(1, 2, y_ticks=[1, 2], y_tick_labels=["1.0", "2.0"]))
    assert len(plain["y"]["ticks"]) > 1


def test_bars_begin_at_their_bases_and_lie_as_in_their_figure() -> None:
    elements = [{"label": name, "group": "1", "value": 2.0} for name in "ab"]
    found = drawn(
        {"type": "bar", "elements": elements, "bases": [1, 0], "orientation": "horizontal"}
    )
    assert [shape["box"][0] for shape in found["shapes"]] == [[1, 3], [0, 2]]
    assert found["y"]["ticks"] == [[(0.5, "a"), (1.5, "b")]]
    bins = [
        {"label": "", "value": 1.0, "from": 0, "to": 1},
        {"label": "", "value": 2.0, "from": 1, "to": 9},
    ]
    found = drawn({"type": "hist", "elements": bins})
    assert [shape["box"] for shape in found["shapes"]] == [[[0, 1], [0, 1]], [[1, 9], [0, 2]]]


def test_a_bar_without_a_value_leaves_its_place_empty() -> None:
    values = {"a": 1.0, "b": None, "c": 3.0}
    elements = [{"label": name, "group": "1", "value": value} for name, value in values.items()]
    found = drawn({"type": "bar", "elements": elements})
    assert found["x"]["ticks"] == [[(0.5, "a"), (1.5, "b"), (2.5, "c")]]
    assert [sum(shape["box"][0]) / 2 for shape in found["shapes"]] == [0.5, 2.5]


def test_bars_that_are_not_evenly_apart_lie_on_an_axis_of_numbers() -> None:
    elements = [
        {"label": str(at), "value": 1.0, "from": at - 0.4, "to": at + 0.4} for at in (1, 10)
    ]
    found = drawn({"type": "bar", "elements": elements})
    assert not found["x"]["named"]
    assert [shape["told"] for shape in found["shapes"]] == ["1: 1", "10: 1"]


def test_colors_are_those_of_the_figure_and_visible() -> None:
    def color(own: str) -> str:
        return str(drawn(line(1, 2, colors=[own]))["shapes"][0]["color"])

    assert color("#FF7F0E") == "#ff7f0e"
    assert color("#000000") == "color-mix(in srgb, #000000 55%, var(--fg))"
    assert color("url(http://a)") == "#4c78d0"


@pytest.mark.parametrize(
    "chart",
    [
        None,
        [],
        {"type": "pie", "elements": [{}]},
        {"type": "line", "elements": []},
        {"type": "line", "elements": [{"points": [[1, 2], ["x", None], 5, None]}]},
        {"type": "line", "elements": [{"points": [["2024-13-45", 2], ["2024-01-01", 3]]}]},
        {"type": "bar", "elements": [{"label": "a", "value": "nan"}]},
        {"type": "superchart", "elements": [line(1, 2), {"type": "pie", "elements": [{}]}]},
        line(1, 2, y_scale="log"),
        line(1, 2, x_label="$x_1$ [m]"),
        line(1, 2, y_tick_labels=["$1$ to $2$"]),
        {
            "type": "line",
            "elements": [{"points": [["2024-01-01", 1], ["2024-03-01", 2]]}],
            "x_limits": [0, 1],
        },
        line(1, 2, partial=True),
        line(1, 2, y_limits=3),
        line(-1e308, 1e308),
        line(1, 2, joined=[]) | {"joined": [], "colors": 5},
    ],
)
def test_what_cannot_be_drawn_as_it_is_has_no_scene(chart: Any) -> None:
    assert scene(chart) is None


def test_a_value_alone_has_an_axis_around_it() -> None:
    low, high = drawn(line(5, 5))["y"]["ends"]
    assert low < 5 < high
    assert math.isfinite(low)
