"""What a matplotlib figure shows, as numbers: for a reader that draws it itself, and in words.

The fields are those of E2B's chart data. What is none of the known kinds of charts has no data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

CHART = "application/vnd.kernel-mcp.chart+json"
MOST_POINTS = 2000
"""Of one series; of more every n-th is taken."""
MOST_SERIES = 20
MOST_CHARTS = 16
MOST_VALUES = 20_000
"""Of all series of a figure."""
MOST_S = 0.05
"""Seconds after which there is no data."""
WORD_CHARS = 200
MOST_NAMED = 8
"""Elements that the words of a chart name."""


class _Unknown(Exception):
    """A figure, or a part of one, that has no data."""


class _Clock:
    """Counts values and time, which are bounded for a whole figure."""

    def __init__(self) -> None:
        self._end = time.monotonic() + MOST_S
        self._left = MOST_VALUES

    def take(self, values: int) -> None:
        """So many more. Raises _Unknown."""
        self._left -= values
        if self._left < 0 or time.monotonic() > self._end:
            raise _Unknown


def chart_of(figure: Any) -> dict[str, Any]:
    """The data of a figure; empty for none."""
    clock = _Clock()
    try:
        charts = [_chart(axes, clock) for axes in figure.axes[:MOST_CHARTS] if _shows(axes)]
    except Exception:  # noqa: BLE001  # any figure may hold anything, and a picture is there
        return {}
    if not charts or any(each is None for each in charts):
        return {}
    if len(charts) == 1:
        return charts[0]
    title = _word(getattr(figure, "_suptitle", None) and figure._suptitle.get_text())
    return {"type": "superchart", "title": title, "elements": charts}


def words(chart: Mapping[str, Any]) -> str:
    """A chart in two lines: its kind, title and axes; its series."""
    if chart["type"] == "superchart":
        kinds = ", ".join(str(each["type"]) for each in chart["elements"])
        title = f" {chart['title']!r}" if chart["title"] else ""
        return f"figure{title} of {len(chart['elements'])} charts: {kinds}"
    title = f" {chart['title']!r}" if chart["title"] else ""
    axes = [f"{axis} {chart[f'{axis}_label']!r}" for axis in "xy" if chart.get(f"{axis}_label")]
    first = f"{chart['type']} chart{title}{': ' if axes else ''}{', '.join(axes)}"
    found = chart["elements"]
    names = list(dict.fromkeys(str(each["label"]) for each in found if each.get("label")))
    if chart["type"] == "hist":
        names = [f"{found[0]['from']:g} to {found[-1]['to']:g}"]
    shown = [*names[:MOST_NAMED], *(["…"] if len(names) > MOST_NAMED else [])]
    count = f"{len(found)} {'element' if len(found) == 1 else 'elements'}"
    return f"{first}\n{count}{': ' if names else ''}{', '.join(shown)[:WORD_CHARS]}"


def _shows(axes: Any) -> bool:
    """Whether something is drawn there that is no color bar."""
    return bool(axes.get_visible()) and not hasattr(axes, "_colorbar")


def _chart(axes: Any, clock: _Clock) -> dict[str, Any]:
    for kind in (_heatmap, _box, _bars, _scatter, _lines):
        found = kind(axes, clock)
        if found is not None:
            return {**found, "title": _word(axes.get_title())}
    raise _Unknown


def _frame(axes: Any) -> dict[str, Any]:
    """What charts with two axes have."""
    return {
        "x_label": _word(axes.get_xlabel()),
        "y_label": _word(axes.get_ylabel()),
        **_axis(axes.get_xaxis(), "x"),
        **_axis(axes.get_yaxis(), "y"),
    }


def _axis(axis: Any, name: str) -> dict[str, Any]:
    places = _numbers(axis.get_majorticklocs())[:50]
    texts = [_word(each) for each in axis.get_major_formatter().format_ticks(places)]
    return {
        f"{name}_ticks": places,
        f"{name}_tick_labels": texts,
        f"{name}_scale": _word(axis.get_scale()),
    }


def _lines(axes: Any, clock: _Clock) -> dict[str, Any] | None:
    lines = [each for each in axes.get_lines() if len(each.get_xdata()) > 1]
    if not lines or axes.patches or axes.collections or axes.images:
        return None
    series = []
    for number, line in enumerate(lines[:MOST_SERIES]):
        points = _points(axes, line.get_xdata(), line.get_ydata(), clock)
        series.append({"label": _label(line, number), "points": points})
    joined = any(line.get_linestyle() not in ("None", "", " ") for line in lines)
    return {"type": "line" if joined else "scatter", **_frame(axes), "elements": series}


def _scatter(axes: Any, clock: _Clock) -> dict[str, Any] | None:
    found = [each for each in axes.collections if type(each).__name__ == "PathCollection"]
    if not found or len(found) != len(axes.collections) or axes.patches or axes.images:
        return None
    if any(len(line.get_xdata()) > 1 for line in axes.get_lines()):
        return None
    series = []
    for number, each in enumerate(found[:MOST_SERIES]):
        offsets = each.get_offsets()
        points = _points(axes, offsets[:, 0], offsets[:, 1], clock)
        series.append({"label": _label(each, number), "points": points})
    return {"type": "scatter", **_frame(axes), "elements": series}


def _bars(axes: Any, clock: _Clock) -> dict[str, Any] | None:
    bars = [each for each in axes.containers if type(each).__name__ == "BarContainer"]
    patches = [patch for bar in bars for patch in bar.patches]
    if not patches or len(patches) != len(axes.patches) or axes.collections or axes.images:
        return None
    if axes.get_lines():
        return None
    flat = all(bar.orientation == "horizontal" for bar in bars)
    clock.take(len(patches))
    edges = [(each.get_x(), each.get_width(), each.get_height()) for each in patches]
    touching = len(bars) == 1 and len(edges) > 1 and not flat and _touch(edges)
    names = {} if touching else _ticks(axes.get_yaxis() if flat else axes.get_xaxis())
    elements = []
    for number, bar in enumerate(bars[:MOST_SERIES]):
        for patch in bar.patches[:MOST_POINTS]:
            at, size = patch.get_x(), patch.get_width()
            value = patch.get_height()
            if flat:
                at, size, value = patch.get_y(), patch.get_height(), patch.get_width()
            middle = _number(at + size / 2)
            element = {
                "label": _nearest(names, middle) or _short(middle),
                "group": _label(bar, number),
                "value": _number(value),
            }
            if touching:
                element |= {"from": _number(at), "to": _number(at + size)}
            elements.append(element)
    kind = "hist" if touching else "bar"
    more = {"orientation": "horizontal"} if flat else {}
    return {"type": kind, **_frame(axes), **more, "elements": elements}


def _nearest(names: Mapping[str, str], place: float | None) -> str:
    """The category at a place, or beside it where bars of several groups stand there."""
    exact = names.get(_key(place), "")
    if exact or place is None:
        return exact
    near = min(names, key=lambda each: abs(float(each) - place), default="")
    words = near and not _is_number(names[near]) and abs(float(near) - place) < 0.5
    return names[near] if words else ""


def _is_number(text: str) -> bool:
    return text.lstrip("-\u2212").replace(".", "", 1).isdigit()


def _touch(edges: Sequence[tuple[float, float, float]]) -> bool:
    """Whether each bar begins where the one before ends, as those of histograms do."""
    return all(abs(a[0] + a[1] - b[0]) <= 1e-9 * max(1.0, abs(b[0])) for a, b in pairwise(edges))


def _box(axes: Any, clock: _Clock) -> dict[str, Any] | None:
    """Box plots, by what pyplot and seaborn draw: boxes, whiskers, caps, medians, outliers."""
    found = [each for each in axes.containers if type(each).__name__ == "BoxPlotContainer"]
    drawn = [artists for container in found for artists in _artists(container)]
    if not drawn:
        drawn = list(_drawn_boxes(axes))
    if not drawn:
        return None
    names = _ticks(axes.get_xaxis())
    elements = []
    for number, (box, whiskers, median, outliers) in enumerate(drawn[:MOST_SERIES]):
        clock.take(5 + len(outliers))
        low, high = min(box), max(box)
        elements.append(
            {
                "label": list(names.values())[number] if number < len(names) else str(number + 1),
                "min": _number(min([*whiskers, low])),
                "first_quartile": _number(low),
                "median": _number(median),
                "third_quartile": _number(high),
                "max": _number(max([*whiskers, high])),
                "outliers": _numbers(outliers)[:MOST_POINTS],
            }
        )
    return {"type": "box_and_whisker", **_frame(axes), "elements": elements}


def _artists(container: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    fliers = [list(each.get_ydata()) for each in container.fliers]
    for number, box in enumerate(container.boxes):
        whiskers = [
            float(value)
            for each in container.whiskers[2 * number : 2 * number + 2]
            for value in each.get_ydata()
        ]
        median = float(container.medians[number].get_ydata()[0])
        outliers = fliers[number] if number < len(fliers) else []
        yield _heights(box), whiskers, median, outliers


def _heights(box: Any) -> list[float]:
    if hasattr(box, "get_ydata"):
        return [float(each) for each in box.get_ydata()]
    return [float(each[1]) for each in box.get_path().vertices[:4]]


def _drawn_boxes(axes: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """What `Axes.boxplot` has drawn where matplotlib keeps no container of it.

    For each box in this order: the box, two whiskers, two caps, the median, the outliers.
    """
    lines = list(axes.get_lines())
    closed = [len(each.get_xdata()) == 5 for each in lines]
    if axes.patches or axes.collections or axes.images or not lines or not closed[0]:
        return
    if len(lines) % 7 and len(lines) % 6:
        return
    size = 7 if len(lines) % 7 == 0 else 6
    for first in range(0, len(lines), size):
        box, *rest = lines[first : first + size]
        whiskers = [float(y) for each in rest[:2] for y in each.get_ydata()]
        outliers = list(rest[5].get_ydata()) if size == 7 else []
        yield _heights(box), whiskers, float(rest[4].get_ydata()[0]), outliers


def _heatmap(axes: Any, clock: _Clock) -> dict[str, Any] | None:
    values = None
    if len(axes.images) == 1 and not axes.patches:
        values = axes.images[0].get_array()
    else:
        meshes = [each for each in axes.collections if type(each).__name__ == "QuadMesh"]
        if len(meshes) == 1 == len(axes.collections):
            values = meshes[0].get_array()
    if values is None or values.ndim != 2:
        return None
    clock.take(values.size)
    rows = [_numbers(row) for row in values.tolist()]
    return {"type": "heatmap", **_frame(axes), "elements": [{"rows": rows}]}


def _points(axes: Any, xs: Any, ys: Any, clock: _Clock) -> list[list[Any]]:
    step = max(1, math.ceil(len(xs) / MOST_POINTS))
    xs, ys = xs[::step], ys[::step]
    clock.take(len(xs))
    return [[_value(x), _value(y)] for x, y in zip(_plain(xs), _plain(ys), strict=True)]


def _plain(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _value(value: Any) -> Any:
    """A number, or how a moment or a category is written."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return _word(value)


def _number(value: Any) -> float | None:
    """A number that JSON has; None for another."""
    number = float(value)
    return number if math.isfinite(number) else None


def _numbers(values: Any) -> list[float | None]:
    return [_number(each) for each in values]


def _label(artist: Any, number: int) -> str:
    label = _word(artist.get_label())
    return f"{number + 1}" if not label or label.startswith("_") else label


def _ticks(axis: Any) -> dict[str, str]:
    """The words at the ticks of an axis, by place."""
    places = axis.get_majorticklocs()
    texts: Sequence[Any] = axis.get_major_formatter().format_ticks(places)
    return {_key(float(at)): _word(text) for at, text in zip(places, texts, strict=True) if text}


def _key(place: float | None) -> str:
    return "" if place is None else f"{place:.6g}"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _word(value: Any) -> str:
    return str(value or "")[:WORD_CHARS]
