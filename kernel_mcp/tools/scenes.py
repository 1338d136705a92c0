"""Charts as scenes: ends and ticks of axes, and shapes at their places. A view lays them out."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

COLORS = ("#4c78d0", "#e07b39", "#3a9d5d", "#c44e52", "#8172b3", "#b38f4f", "#d07fb8", "#7f7f7f")
FEW_POINTS = 60
"""Points of a line up to which each of them has a dot, which tells its values."""
COUNTS = (12, 10, 8, 6, 5, 4, 3, 2, 1)
"""Numbers of ticks that a view chooses from."""
MOST_TICKS = 50
SIGNIFICANT = 10

_MOMENT = re.compile(r"\d{4}-\d\d-\d\d(T[\d:.]+([+-][\d:]+)?)?")
_COLOR = re.compile(r"#[0-9a-f]{6}")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_DAY_S = 86_400
_STEPS_S = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200),
    *(_DAY_S, 2 * _DAY_S, 7 * _DAY_S, 14 * _DAY_S),
)
_STEPS_MONTHS = (1, 2, 3, 6, *(12 * years for years in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)))
_UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6))

Tick = tuple[float, str]


class Clock:
    """The local times of an axis of moments, whose clocks may change in between."""

    def __init__(self, moments: Iterable[str] = ()) -> None:
        """Read the offsets from UTC of moments in ISO 8601; those without one have none."""
        offsets = {_number(each): datetime.fromisoformat(each).utcoffset() for each in moments}
        self._known = sorted(
            (at, (each or timedelta()).total_seconds()) for at, each in offsets.items()
        )

    def local(self, at: float) -> float:
        """Return the local time at a moment, both in seconds since 1970."""
        place = bisect_right(self._known, (at, math.inf))
        return at + (self._known[max(place - 1, 0)][1] if self._known else 0.0)

    def at(self, local: float) -> float | None:
        """Return the first moment that has a local time; None for one that is skipped."""
        found = {local - offset for _, offset in self._known} or {local}
        return min((each for each in found if self.local(each) == local), default=None)


def scene(chart: Any) -> dict[str, Any] | None:
    """Return the scene of a chart; None if it would be drawn otherwise than its figure."""
    if not isinstance(chart, dict) or not isinstance(chart.get("elements"), list):
        return None
    if chart.get("partial"):
        return None
    try:
        return _superscene(chart) if chart.get("type") == "superchart" else _scene(chart)
    except (ValueError, ArithmeticError, TypeError, LookupError):
        return None


def _superscene(chart: Mapping[str, Any]) -> dict[str, Any] | None:
    found = [scene(each) for each in chart["elements"]]
    if not all(found):
        return None
    return {"title": str(chart.get("title") or ""), "scenes": found}


def _scene(chart: Mapping[str, Any]) -> dict[str, Any] | None:
    kind, elements = chart.get("type"), chart["elements"]
    scales = [chart.get(scale, "linear") for scale in ("x_scale", "y_scale")]
    if not elements or scales != ["linear"] * 2 or not all(isinstance(e, dict) for e in elements):
        return None
    if any(map(_is_formula, _texts(chart))):
        return None
    if kind in ("bar", "hist"):
        made = _bars(chart, elements)
    elif kind in ("line", "scatter"):
        made = _points(chart, elements)
    else:
        made = None
    if made is None:
        return None
    title = str(chart.get("title") or "")
    label = f"{kind} chart {title}, {len(elements)} elements"
    return {"title": title, "label": label, **made}


def _texts(chart: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts that the scene of a chart shows."""
    fields = ("title", "x_label", "y_label")
    yield from (str(chart.get(field) or "") for field in fields)
    yield from (str(each.get("label") or "") for each in chart["elements"])
    for axis in "xy":
        yield from map(str, chart.get(f"{axis}_tick_labels") or ())


def _is_formula(text: str) -> bool:
    """Return True if matplotlib sets a text as a formula, which begins and ends with `$`."""
    marks = text.count("$") - text.count("\\$")
    return marks > 0 and marks % 2 == 0


def _points(chart: Mapping[str, Any], elements: Sequence[Any]) -> dict[str, Any] | None:
    if not all(map(_in_order, elements)):
        return None
    series = [[(_number(x), _number(y)) for x, y in each["points"]] for each in elements]
    known = [point for points in series for point in points if _is_known(point)]
    if not known:
        return None
    clocks: list[Clock | None] = []
    for axis, name in enumerate("xy"):
        ends = chart.get(f"{name}_limits") or ()
        places = [point[axis] for each in elements for point in each["points"]]
        moments = [place for place in places if isinstance(place, str)]
        if moments and not all(isinstance(end, str) for end in ends):
            return None  # categories that look like dates
        clocks.append(Clock([*moments, *ends]) if moments else None)
    shapes: list[dict[str, Any]] = []
    legend = []
    joined = chart.get("joined")
    for place, points in enumerate(series):
        label, color = str(elements[place].get("label", "")), _color(chart, place)
        is_line = chart["type"] == "line" and not (joined and not joined[place])
        runs = list(_runs(points))
        shapes += [{"line": run, "color": color} for run in runs if is_line]
        dots = [run for run in runs if not is_line or len(run) == 1 or len(points) < FEW_POINTS]
        radius = 2.2 if is_line else 3
        for point in (point for run in dots for point in run):
            told = f"{label}: {', '.join(map(_text_of, point, clocks))}"
            shapes.append({"dot": point, "size": radius, "color": color, "told": told})
        legend.append({"label": label, "color": color, "dot": not is_line})
    is_named = any(each["label"] not in ("", str(n)) for n, each in enumerate(legend, 1))
    axes = {
        name: _axis(chart, name, [point[at] for point in known], clocks[at])
        for at, name in enumerate("xy")
    }
    return {**axes, "shapes": shapes, "legend": legend if is_named else []}


def _bars(chart: Mapping[str, Any], elements: Sequence[Any]) -> dict[str, Any] | None:
    if len({each.get("group") for each in elements}) > 1:
        return None
    found = [(place, each) for place, each in enumerate(elements) if _is_number(each.get("value"))]
    if not found:
        return None
    is_flat = chart.get("orientation") == "horizontal"
    across, along = ("y", "x") if is_flat else ("x", "y")
    edges = all(_is_number(each.get("from")) and _is_number(each.get("to")) for _, each in found)
    half = 0.38 if len(elements) > 3 else 0.25
    bases = chart.get("bases") or {}
    shapes, ends, sides = [], [0.0], []
    for place, each in found:
        base = bases[place] if bases and _is_number(bases[place]) else 0
        value, label = [base, base + each["value"]], str(each.get("label", ""))
        side = [each["from"], each["to"]] if edges else [place + 0.5 - half, place + 0.5 + half]
        told = f"{_text_of(side[0])} to {_text_of(side[1])}" if chart["type"] == "hist" else label
        color = _color(chart, place if chart.get("colors") else 0)
        corners = [value, side] if is_flat else [side, value]
        told = f"{told}: {_text_of(each['value'])}"
        shapes.append({"box": corners, "color": color, "told": told})
        ends += value
        sides += side
    named = [(place + 0.5, str(each.get("label", ""))) for place, each in enumerate(elements)]
    return {
        across: _axis(chart, across, sides) if edges else _names(chart, across, named),
        along: _axis(chart, along, ends),
        "shapes": shapes,
        "legend": [],
    }


def _names(chart: Mapping[str, Any], name: str, ticks: Sequence[Tick]) -> dict[str, Any]:
    """Return an axis of names, in the direction of the figure."""
    low, high = chart.get(f"{name}_limits") or (0, 1)
    ends = [len(ticks), 0] if float(low) > float(high) else [0, len(ticks)]
    label = str(chart.get(f"{name}_label") or "")
    return {"label": label, "ends": ends, "ticks": [ticks], "named": True}


def _axis(
    chart: Mapping[str, Any], name: str, values: Sequence[float], clock: Clock | None = None
) -> dict[str, Any]:
    """Return label and ends of an axis, and its ticks, several lists from many to few.

    There is one list of ticks if code has labelled them itself.
    """
    limits = chart.get(f"{name}_limits")
    low, high = map(_number, limits) if limits else (min(values), max(values))
    if not (_is_known((low, high))):
        low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    least, most = min(low, high), max(low, high)
    own = [] if clock else _own_ticks(chart, name, least, most)
    choices = [own] if own else _choices(least, most, clock)
    label = str(chart.get(f"{name}_label") or "")
    return {"label": label, "ends": [low, high], "ticks": choices, "named": False}


def _own_ticks(chart: Mapping[str, Any], name: str, least: float, most: float) -> list[Tick]:
    """Return the ticks of the figure; none if their labels are no more than their numbers."""
    places, labels = chart.get(f"{name}_ticks") or [], chart.get(f"{name}_tick_labels") or []
    found = [
        (float(at), str(label))
        for at, label in zip(places, labels, strict=False)
        if at is not None and label and least <= at <= most
    ]
    return [] if all(_is_plain(at, label) for at, label in found) else found


def _is_plain(at: float, label: str) -> bool:
    try:
        return abs(float(label.replace("\N{MINUS SIGN}", "-")) - at) <= 1e-6 * max(abs(at), 1e-6)
    except ValueError:
        return False


def _choices(least: float, most: float, clock: Clock | None) -> list[list[Tick]]:
    found: list[list[Tick]] = []
    for count in COUNTS:
        ticks = (
            moment_ticks(least, most, count, clock) if clock else round_ticks(least, most, count)
        )
        if ticks and ticks not in found:
            found.append(ticks)
    return found


def round_ticks(low: float, high: float, count: int) -> list[Tick]:
    """Return round numbers from `low` to `high`, about `count`, with labels that differ."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    most = max(abs(low), abs(high))
    return [
        (number * step, _label(number * step, step, most))
        for number in range(first, min(last, first + MOST_TICKS) + 1)
    ]


def _label(at: float, step: float, most: float) -> str:
    if abs(at) < step / 1e6:
        return "0"
    power = math.floor(math.log10(step) + 1e-9)
    if most >= 1e15 or most < 1e-3:
        digits = max(0, math.floor(math.log10(abs(at)) + 1e-9) - power)
        return f"{at:.{digits}e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    fits = (each for each in _UNITS if most >= each[1] and step >= each[1] / 1e4)
    name, unit = next(fits, ("", 1.0))
    digits = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return f"{at / unit:.{digits}f}{name}"


def moment_ticks(low: float, high: float, count: int, clock: Clock) -> list[Tick]:
    """Return whole seconds to years by a clock from `low` to `high`, in seconds since 1970.

    A local time that comes twice has one tick, and one that is skipped has none.
    """
    ticks = _local_ticks(clock.local(low), clock.local(high), count)
    placed = ((clock.at(local), label) for local, label in ticks)
    return [(at, label) for at, label in placed if at is not None]


def _local_ticks(low: float, high: float, count: int) -> list[Tick]:
    rough = (high - low) / count * 0.99
    if rough < 0.5:
        places = [at for at, _ in round_ticks(low, high, count)]
        return [(at, _moment(at).isoformat(timespec="milliseconds")[14:23]) for at in places]
    step = next((each for each in _STEPS_S if each >= rough), 0)
    if step:
        places = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if step >= _DAY_S:
            begin, end = 0, 10
        elif high - low > _DAY_S:
            begin, end = 5, 16
        else:
            begin, end = 11, 16 if step >= 60 else 19
        return [(at, _moment(at).isoformat()[begin:end].replace("T", " ")) for at in places]
    months = next((each for each in _STEPS_MONTHS if each * 30.4 * _DAY_S >= rough), 12_000)
    first, last = _moment(low), _moment(high)
    start = math.ceil((first.year * 12 + first.month - 1) / months) * months
    ends = range(start, last.year * 12 + last.month, months)
    found = [f"{month // 12:04}-{month % 12 + 1:02}" for month in ends if month >= 12]
    size = 4 if months % 12 == 0 else 7
    ticks = [(_number(f"{each}-01"), each[:size]) for each in found]
    return [tick for tick in ticks if low <= tick[0] <= high]


def _runs(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Yield the points between gaps, where a line is broken."""
    run: list[tuple[float, float]] = []
    for point in points:
        if _is_known(point):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _color(chart: Mapping[str, Any], place: int) -> str:
    """Return the color of an element, mixed with that of text where a background would hide it."""
    colors = chart.get("colors") or ()
    own = str(colors[place]).lower() if place < len(colors) else ""
    if not _COLOR.fullmatch(own):
        return COLORS[place % len(COLORS)]
    red, green, blue = (int(own[at : at + 2], 16) for at in (1, 3, 5))
    light = (0.3 * red + 0.6 * green + 0.1 * blue) / 255
    return own if 0.2 <= light <= 0.85 else f"color-mix(in srgb, {own} 55%, var(--fg))"


def _in_order(series: Mapping[str, Any]) -> bool:
    """Return True if all points of a series are at numbers or times, not at categories."""
    points = series.get("points")
    return isinstance(points, list) and all(
        isinstance(point, list) and len(point) == 2 and all(map(_is_place, point))
        for point in points
    )


def _is_place(value: Any) -> bool:
    if isinstance(value, str):
        return _MOMENT.fullmatch(value) is not None
    return value is None or isinstance(value, (int, float))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float:
    """Return a number, or the seconds of a moment since 1970; NaN for None. Raises ValueError."""
    if value is None:
        return math.nan
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        return (moment - _EPOCH).total_seconds()
    return float(value)


def _is_known(point: tuple[float, float]) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _moment(at: float) -> datetime:
    return (_EPOCH + timedelta(seconds=at)).replace(tzinfo=None)


def _text_of(value: float, clock: Clock | None = None) -> str:
    if clock:
        return _moment(clock.local(value)).isoformat(sep=" ", timespec="seconds")
    return f"{value:.{SIGNIFICANT}g}"
