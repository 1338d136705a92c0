"""The data of a matplotlib figure: as numbers, for a client that draws it itself, and in words.

The fields are those of E2B's chart data. Added are `colors` of the elements, `bases` of bars,
and limits of the axes. `joined` tells lines from points, `steps` that only every n-th point is
there. `partial` means that the figure shows more than the numbers do. No data
is returned for a figure that is no known kind of chart, or has an unknown part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from kernel_specs.restricted.display.axes import (
    WORD_CHARS,
    TickLabels,
    TooMuch,
    Unknown,
    color,
    decoded,
    few,
    is_of_moments,
    number,
    numbers,
    scale,
    word,
)
from kernel_specs.restricted.display.boxes import boxes_of, is_drawn, is_shown

CHART = "application/vnd.kernel-mcp.chart+json"
MOST_POINTS = 2000
"""Most points of one series; of a longer one every n-th is sent."""
MOST_CHARTS = 16
MOST_VALUES = 20_000
"""Most values of all series of a figure together."""
MOST_S = 0.25
"""Processor seconds to collect the data of a figure; it is sent without data if they run out."""
MOST_NAMED = 8
"""Most elements of a chart that its words name."""


class _Clock:
    """Counts values and processor time, which are bounded for a whole figure."""

    def __init__(self) -> None:
        self._end = time.thread_time() + MOST_S
        self._left = MOST_VALUES

    def take(self, values: int = 0) -> None:
        """Count `values` more. Raises TooMuch beyond `MOST_VALUES`, or after `MOST_S`."""
        self._left -= values
        if self._left < 0:
            raise TooMuch(f"more than {MOST_VALUES:,} values")
        if time.thread_time() > self._end:
            raise TooMuch(f"more than {MOST_S:g} s of processor time to collect them")


def chart_of(figure: Any) -> dict[str, Any]:
    """Return the data of a figure; empty if it has none."""
    return described(figure)[0]


def described(figure: Any) -> tuple[dict[str, Any], str]:
    """Return the data of a figure, and its words. Both are empty for no known kind of chart.

    If the data exceeds a bound, only the words are there, and say so.
    """
    try:
        chart = _chart_of(figure, _Clock())
        return chart, words(chart) if chart else ""
    except TooMuch as bound:
        return {}, f"[the numbers of this figure are left out: {bound}]"
    except Exception:  # noqa: BLE001  # a figure may hold any object; its picture is sent anyway
        return {}, ""


def _chart_of(figure: Any, clock: _Clock) -> dict[str, Any]:
    shown = few((axes for axes in figure.axes if _shows(axes)), MOST_CHARTS)
    charts = [_chart(axes, clock) for axes in shown]
    clock.take()
    if len(charts) < 2:
        return charts[0] if charts else {}
    title = word(getattr(figure, "_suptitle", None) and figure._suptitle.get_text())
    overlaid = len({axes.get_position().bounds for axes in shown}) < len(shown)
    more = {"partial": True} if overlaid else {}
    return {"type": "superchart", "title": title, **more, "elements": charts}


def words(chart: Mapping[str, Any]) -> str:
    """Return a chart in two lines: kind, title and axes; number and names of its elements."""
    if chart["type"] == "superchart":
        kinds = ", ".join(str(each["type"]) for each in chart["elements"])
        title = f" {chart['title']!r}" if chart["title"] else ""
        return f"figure{title} of {len(chart['elements'])} charts: {kinds}"
    title = f" {chart['title']!r}" if chart["title"] else ""
    axes = [f"{axis} {chart[f'{axis}_label']!r}" for axis in "xy" if chart.get(f"{axis}_label")]
    first = f"{chart['type']} chart{title}{': ' if axes else ''}{', '.join(axes)}"
    found = chart["elements"]
    if chart["type"] == "heatmap":
        rows = found[0]["rows"]
        return f"{first}\n{len(rows):,} rows of {len(rows[0]) if rows else 0:,} values"
    names = [" ".join(str(each.get("label", "")).split()) for each in found]
    names = list(dict.fromkeys(filter(None, names)))
    if chart["type"] == "hist":
        names = [f"{_short(found[0]['from'])} to {_short(found[-1]['to'])}"]
    shown = [*names[:MOST_NAMED], *(["…"] if len(names) > MOST_NAMED else [])]
    count = f"{len(found)} {'element' if len(found) == 1 else 'elements'}"
    return f"{first}\n{count}{': ' if names else ''}{', '.join(shown)[:WORD_CHARS]}"


def _shows(axes: Any) -> bool:
    """Return True if the axes are visible and not those of a color bar."""
    return bool(axes.get_visible()) and not hasattr(axes, "_colorbar")


def _chart(axes: Any, clock: _Clock) -> dict[str, Any]:
    clock.take()
    if axes.name != "rectilinear":
        raise Unknown
    for kind in (_heatmap, _box, _bars, _scatter, _lines):
        found = kind(axes, clock)
        if found is not None:
            more = {"partial": True} if any(each.get_text() for each in axes.texts) else {}
            return {**found, **more, "title": word(axes.get_title())}
    raise Unknown


def _frame(axes: Any, clock: _Clock) -> dict[str, Any]:
    """Return the fields of both axes of a chart."""
    found: dict[str, Any] = {}
    for name, axis in (("x", axes.get_xaxis()), ("y", axes.get_yaxis())):
        clock.take()
        found |= scale(axis, name)
    return found


class _Shown(NamedTuple):
    """The artists of axes that are neither hidden nor transparent."""

    lines: list[Any]
    patches: list[Any]
    collections: list[Any]
    images: list[Any]

    @classmethod
    def on(cls, axes: Any) -> _Shown:
        every = axes.get_lines(), axes.patches, axes.collections, axes.images
        return cls(*([each for each in artists if is_shown(each)] for artists in every))


def _lines(axes: Any, clock: _Clock) -> dict[str, Any] | None:
    shown = _Shown.on(axes)
    if shown.patches or shown.collections or shown.images:
        return None
    lines = [each for each in few(shown.lines) if len(each.get_xydata())]
    if all(len(each.get_xydata()) < 2 for each in lines):
        return None
    series = [
        {
            "label": _label(line, place),
            "points": _points(axes, line.get_xydata(), line.get_transform(), clock),
        }
        for place, line in enumerate(lines)
    ]
    joined = any(map(is_drawn, lines))
    colors = [
        color([line.get_color() if is_drawn(line) else line.get_markerfacecolor()])
        for line in lines
    ]
    has_steps = any(line.get_drawstyle() != "default" for line in lines)
    more = _style(colors, [len(line.get_xydata()) for line in lines], partial=has_steps)
    kind = "line" if joined else "scatter"
    if joined and not all(map(is_drawn, lines)):
        more["joined"] = [*map(is_drawn, lines)]
    return {"type": kind, **_frame(axes, clock), **more, "elements": series}


def _scatter(axes: Any, clock: _Clock) -> dict[str, Any] | None:
    shown = _Shown.on(axes)
    if not shown.collections or shown.patches or shown.images or shown.lines:
        return None
    found = few(shown.collections)
    if any(type(each).__name__ != "PathCollection" for each in found):
        return None
    series = [
        {
            "label": _label(each, place),
            "points": _points(axes, each.get_offsets(), each.get_offset_transform(), clock),
        }
        for place, each in enumerate(found)
    ]
    faces = [each.get_facecolors() for each in found]
    edges = [each.get_edgecolors() for each in found]
    colors = [color(face if len(face) else edge) for face, edge in zip(faces, edges, strict=True)]
    sized = any(len(set(each.get_sizes().tolist())) > 1 for each in found)
    more = _style(colors, [len(each.get_offsets()) for each in found], partial=sized)
    return {"type": "scatter", **_frame(axes, clock), **more, "elements": series}


def _style(colors: Sequence[str], lengths: Sequence[int], *, partial: bool) -> dict[str, Any]:
    """Return the colors of series, which of their points are there, and if something is missing."""
    steps = [max(1, math.ceil(length / MOST_POINTS)) for length in lengths]
    found: dict[str, Any] = {"colors": list(colors)}
    if max(steps, default=1) > 1:
        found["steps"] = steps
    if partial or "steps" in found or "" in colors:
        found["partial"] = True
    return found


def _points(axes: Any, pairs: Any, transform: Any, clock: _Clock) -> list[list[Any]]:
    """Return points as [x, y] in axis values; those of lines across an axis (`axhline`), too."""
    pairs = pairs[:: max(1, math.ceil(len(pairs) / MOST_POINTS))]
    clock.take(len(pairs))
    columns = list(zip(*pairs.tolist(), strict=True))
    if transform != axes.transData:
        moved = (transform - axes.transData).transform(pairs).tolist()
        own = transform.contains_branch_seperately(axes.transData)
        moves = zip(own, columns, zip(*moved, strict=True), strict=True)
        columns = [kept if is_own else new for is_own, kept, new in moves]
    both = zip((axes.get_xaxis(), axes.get_yaxis()), columns, strict=True)
    xs, ys = (decoded(axis, numbers(values)) for axis, values in both)
    return [[x, y] for x, y in zip(xs, ys, strict=True)]


def _bars(axes: Any, clock: _Clock) -> dict[str, Any] | None:
    bars = [each for each in axes.containers if type(each).__name__ == "BarContainer"]
    flat = all(bar.orientation == "horizontal" for bar in bars)
    groups = [sorted(bar.patches, key=partial(_side, flat=flat)) for bar in bars]
    patches, shown = [patch for group in groups for patch in group], _Shown.on(axes)
    if not patches or len(patches) != len(shown.patches) or any(shown._replace(patches=[])):
        return None
    clock.take(len(patches))
    axis = axes.get_yaxis() if flat else axes.get_xaxis()
    sides = [_side(each, flat=flat) for each in patches]
    names, alone = TickLabels(axis), len(bars) == 1 and len(patches) > 1
    touching = alone and not flat and not names and _touch(sides)
    placed = touching or (alone and not is_of_moments(axis) and not _even(sides))
    elements = []
    for place, (bar, group) in enumerate(zip(few(bars), groups, strict=True)):
        name = _label(bar, place)
        elements += [
            {"label": label, "group": name, **values}
            for label, values in _bar(axis, few(group, MOST_POINTS), names, flat, placed)
        ]
    clock.take()
    kind = "hist" if touching else "bar"
    more: dict[str, Any] = {"orientation": "horizontal"} if flat else {}
    more["colors"] = [color([patch.get_facecolor()]) for patch in patches]
    if "" in more["colors"]:
        more["partial"] = True
    bases = numbers(patch.get_x() if flat else patch.get_y() for patch in patches)
    if any(bases):
        more["bases"] = bases
    return {"type": kind, **_frame(axes, clock), **more, "elements": elements}


def _bar(
    axis: Any, patches: Sequence[Any], names: TickLabels, flat: bool, placed: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield label and values of each bar of one group; with `placed`, its edges, too."""
    places, sizes = zip(*(_side(each, flat=flat) for each in patches), strict=True)
    values = [each.get_width() if flat else each.get_height() for each in patches]
    middles = numbers(at + size / 2 for at, size in zip(places, sizes, strict=True))
    shown = decoded(axis, middles) if is_of_moments(axis) else middles
    starts = decoded(axis, numbers(places))
    ends = decoded(axis, numbers(at + size for at, size in zip(places, sizes, strict=True)))
    for place, value in enumerate(values):
        label = names.at(middles[place]) or _short(shown[place])
        edges = {"from": starts[place], "to": ends[place]} if placed else {}
        yield label, {"value": number(value), **edges}


def _side(bar: Any, *, flat: bool) -> tuple[float, float]:
    """Return where a bar begins on the axis on which bars stand side by side, and its size."""
    return (bar.get_y(), bar.get_height()) if flat else (bar.get_x(), bar.get_width())


def _touch(sides: Sequence[tuple[float, float]]) -> bool:
    """Return True if each bar begins where the one before ends, as in a histogram."""
    return all(abs(a[0] + a[1] - b[0]) <= 1e-9 * max(1.0, abs(b[0])) for a, b in pairwise(sides))


def _even(sides: Sequence[tuple[float, float]]) -> bool:
    """Return True if all bars are as far from the next one, which lies beside it."""
    steps = [b[0] + b[1] / 2 - a[0] - a[1] / 2 for a, b in pairwise(sides)]
    return 0 < max(steps) <= min(steps) * (1 + 1e-6)


def _box(axes: Any, clock: _Clock) -> dict[str, Any] | None:
    boxes = boxes_of(axes)
    if not boxes:
        return None
    flat = all(box.flat for box in boxes)
    names = TickLabels(axes.get_yaxis() if flat else axes.get_xaxis())
    elements = []
    for place, box in enumerate(boxes):
        clock.take(5 + len(box.outliers))
        elements.append(
            {
                "label": names.at(box.place) or str(place + 1),
                "min": number(box.least),
                "first_quartile": number(box.low),
                "median": number(box.median),
                "third_quartile": number(box.high),
                "max": number(box.most),
                "outliers": numbers(few(box.outliers, MOST_POINTS)),
            }
        )
    more = {"orientation": "horizontal"} if flat else {}
    return {"type": "box_and_whisker", **_frame(axes, clock), **more, "elements": elements}


def _heatmap(axes: Any, clock: _Clock) -> dict[str, Any] | None:
    shown = _Shown.on(axes)
    if shown.patches or shown.lines:
        return None
    found = few([*shown.images, *shown.collections])
    if len(found) != 1 or not (shown.images or type(found[0]).__name__ == "QuadMesh"):
        return None
    values = found[0].get_array()
    if values is None or values.ndim != 2:
        return None
    clock.take(values.size)
    rows = [numbers(row) for row in values.tolist()]
    return {"type": "heatmap", **_frame(axes, clock), "elements": [{"rows": rows}]}


def _label(artist: Any, place: int) -> str:
    label = word(artist.get_label())
    return f"{place + 1}" if not label or label.startswith("_") else label


def _short(value: Any) -> str:
    """Return a number in short form, or a date without the time if that is midnight."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value or "").removesuffix("T00:00:00")
