"""Charts as text: what a reader without a browser learns of a figure."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

MOST_TRACES = 12
FIRST = 5
"""Points and rows that are shown of each trace."""
VALUE_CHARS = 60
_TYPES = {"i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "f4": "f", "f8": "d"}


def of_plotly(figure: Mapping[str, Any]) -> str:
    """A plotly figure: its traces, axes, ranges and first points."""
    layout = _mapping(figure.get("layout"))
    traces = [_mapping(trace) for trace in _sequence(figure.get("data"))]
    title = _title(layout)
    lines = [f"plotly figure{f' {title!r}' if title else ''}, {_count(len(traces), 'trace')}"]
    for number, trace in enumerate(traces[:MOST_TRACES], 1):
        lines += [f"{number}. {line}" if not at else f"   {line}" for at, line in _trace(trace)]
    if len(traces) > MOST_TRACES:
        lines.append(f"… {len(traces) - MOST_TRACES} more traces")
    for name in sorted(key for key in layout if key[:5] in ("xaxis", "yaxis", "zaxis")):
        axis = _mapping(layout[name])
        said = [f"title {_title(axis)!r}"] if _title(axis) else []
        said += [f"{key} {_short(axis[key])}" for key in ("type", "range") if axis.get(key)]
        lines += [f"{name}: {', '.join(said)}"] if said else []
    return "\n".join(lines)


_DRAWN = re.compile(r"Plotly\.newPlot\(\s*[\"'][^\"']*[\"']\s*,\s*")
_COMMA = re.compile(r"\s*,\s*")


def plotly_in(page: str) -> dict[str, Any]:
    """The last figure that an HTML page has plotly draw; empty for none."""
    calls = list(_DRAWN.finditer(page))
    if not calls:
        return {}
    read = json.JSONDecoder().raw_decode
    data, end = read(page, calls[-1].end())
    comma = _COMMA.match(page, end)
    return {"data": data, "layout": read(page, comma.end())[0] if comma else {}}


def _trace(trace: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    kind = str(trace.get("type", "scatter"))
    mode = f" ({trace['mode']})" if trace.get("mode") else ""
    name = f" {trace['name']!r}" if trace.get("name") else ""
    columns = {key: _values(value) for key, value in trace.items()}
    held = {key: values for key, values in columns.items() if values is not None and _data(key)}
    longest = max((len(values) for values in held.values()), default=0)
    yield 0, f"{kind}{mode}{name}: {_count(longest, 'point')}"
    for place, (key, values) in enumerate(held.items(), 1):
        numbers = [each for each in values if _is_number(each)]
        span = f"{min(numbers):g} to {max(numbers):g}; " if numbers else ""
        yield place, f"{key}: {span}{_first(values)}"


def _data(key: str) -> bool:
    return key in (
        *("x", "y", "z", "r", "theta", "labels", "values", "parents", "lat", "lon", "open"),
        *("high", "low", "close", "locations", "base", "text", "value", "a", "b", "c"),
    )


def _values(value: Any) -> Sequence[Any] | None:
    """A column of a trace; plotly packs numbers as base64."""
    if isinstance(value, Mapping) and isinstance(value.get("bdata"), str):
        code = _TYPES.get(str(value.get("dtype")))
        if code is None:
            return None
        data = base64.b64decode(value["bdata"])
        size = struct.calcsize(code)
        return struct.unpack(f"<{len(data) // size}{code}", data[: len(data) // size * size])
    return value if isinstance(value, (list, tuple)) else None


def of_vega(spec: Mapping[str, Any]) -> str:
    """A Vega-Lite chart: its marks, encodings and first rows."""
    lines = []
    title = spec.get("title")
    if title:
        lines.append(f"title: {_short(_mapping(title).get('text', title))}")
    _view(spec, lines, 0)
    rows = next(iter(_mapping(spec.get("datasets")).values()), None)
    rows = rows or _mapping(spec.get("data")).get("values")
    if isinstance(rows, list) and rows:
        lines.append(f"{_count(len(rows), 'row')}, the first:")
        lines += [_short(row, 200) for row in rows[:FIRST]]
    return "\n".join(["chart (Vega-Lite)" if "marks" not in spec else "chart (Vega)", *lines])


def _view(spec: Mapping[str, Any], lines: list[str], depth: int) -> None:
    if depth > 3 or len(lines) > MOST_TRACES:
        return
    mark = spec.get("mark")
    if mark is not None:
        kind = mark.get("type") if isinstance(mark, Mapping) else mark
        found = []
        for channel, each in _mapping(spec.get("encoding")).items():
            said = _mapping(each)
            of = said.get("field") or said.get("aggregate") or said.get("value")
            if of is not None:
                how = f"{said['aggregate']} of " if said.get("aggregate") and said["field"] else ""
                found.append(f"{channel}: {how}{_short(of)} ({said.get('type', 'value')})")
        lines.append(f"{'  ' * depth}{kind}: {', '.join(found)}")
    for key in ("layer", "hconcat", "vconcat", "concat"):
        for part in _sequence(spec.get(key)):
            _view(_mapping(part), lines, depth + 1)
    if "spec" in spec:
        _view(_mapping(spec["spec"]), lines, depth + 1)


def of_bokeh(model: Any) -> str:
    """A bokeh figure or layout: titles, axes, and the first values of each glyph."""
    lines: list[str] = []
    plots = [each for each in model.references() if hasattr(each, "renderers")]
    for plot in [each for each in plots if hasattr(each, "xaxis")][:MOST_TRACES]:
        title = getattr(plot.title, "text", plot.title)
        lines.append(f"bokeh plot{f' {title!r}' if title else ''}")
        labels = [axis.axis_label for axis in (*plot.xaxis, *plot.yaxis)]
        lines += [f"axes: {', '.join(map(repr, labels))}"] if any(labels) else []
        for renderer in plot.renderers[:MOST_TRACES]:
            source = getattr(renderer, "data_source", None)
            columns = islice(getattr(source, "data", {}).items(), MOST_TRACES)
            shown = "; ".join(f"{name}: {_first(values)}" for name, values in columns)
            glyph = type(getattr(renderer, "glyph", renderer)).__name__
            lines.append(f"{glyph}: {shown}" if shown else glyph)
    return "\n".join(lines) or f"bokeh {type(model).__name__}"


def _first(values: Any) -> str:
    shown = [_short(each) for each in list(islice(values, FIRST + 1))]
    return ", ".join(shown if len(shown) <= FIRST else [*shown[:FIRST], "…"])


def of_folium(view: Any) -> str:
    """A folium map: where it is, and what is on it."""
    lines = [f"map at {_short(view.location)}, zoom {view.options.get('zoom', '?')}"]
    children = list(view._children.values())
    for child in children[:MOST_TRACES]:
        at = getattr(child, "location", None) or getattr(child, "locations", None)
        words = [part for part in map(_words, child._children.values()) if part]
        name = getattr(child, "tile_name", None) or type(child).__name__
        lines.append(" ".join([name, *([_short(at, 120)] if at else []), *map(repr, words)]))
    if len(children) > MOST_TRACES:
        lines.append(f"… {len(children) - MOST_TRACES} more")
    return "\n".join(lines)


def _words(part: Any) -> str:
    """The words of a popup or a tooltip."""
    html = getattr(part, "html", None)
    if html is not None:
        return " ".join(str(getattr(each, "data", "")) for each in html._children.values())
    return str(getattr(part, "text", ""))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _title(value: Mapping[str, Any]) -> str:
    title = value.get("title")
    return str((title.get("text") if isinstance(title, Mapping) else title) or "")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _short(value: Any, most: int = VALUE_CHARS) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= most else f"{text[:most]}…"
