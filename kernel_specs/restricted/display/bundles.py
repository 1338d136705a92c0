"""Complete outputs before they are sent: add text and pictures to HTML, limit the size."""

# ipykernel and IPython are traitlets classes: untyped, and optional throughout, to mypy.
# mypy: disable-error-code="no-untyped-call, union-attr, attr-defined"

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.zmqshell import ZMQDisplayPublisher
from IPython.core.formatters import DisplayFormatter

from kernel_specs.restricted import definitions
from kernel_specs.restricted.config import OutputSettings
from kernel_specs.restricted.console import tracebacks
from kernel_specs.restricted.display import charts, figures, libraries, pictures, rows

# Charts as text, for readers without a browser.

MOST_TRACES = 12
FIRST = 5
"""Number of points or rows shown of each trace."""
VALUE_CHARS = 60
_TYPES = {"i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "f4": "f", "f8": "d"}


def plotly_text(figure: Mapping[str, Any]) -> str:
    """Return a plotly figure in words: traces, axes, ranges and first points."""
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


def plotly_figure_in(page: str) -> dict[str, Any]:
    """Return the last figure that an HTML page draws with plotly; empty if there is none."""
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
    """Return a column of a trace, None for other values; plotly packs numbers as base64."""
    if isinstance(value, Mapping) and isinstance(value.get("bdata"), str):
        code = _TYPES.get(str(value.get("dtype")))
        if code is None:
            return None
        data = base64.b64decode(value["bdata"])
        size = struct.calcsize(code)
        return struct.unpack(f"<{len(data) // size}{code}", data[: len(data) // size * size])
    return value if isinstance(value, (list, tuple)) else None


def vega_text(spec: Mapping[str, Any]) -> str:
    """Return a Vega or Vega-Lite chart in words: marks, encodings and first rows."""
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


def bokeh_text(model: Any) -> str:
    """Return a bokeh figure or layout in words: titles, axes, first values of each glyph."""
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


def folium_text(view: Any) -> str:
    """Return a folium map in words: location, zoom and children."""
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
    """Return the text of a popup or a tooltip."""
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


# Bundles of MIME data.

ROOM_BYTES = 64 * 1024
"""Bytes of a message that are left for other parts than its largest value."""
MOST_DRAWN = 50
"""Most drawings of one cell that are rendered as pictures; further ones stay as they are."""
PLOTLY = "application/vnd.plotly.v1+json"
_PLAIN = frozenset({"text/plain", "text/html"})
_PAGE = "<IPython.core.display.HTML object>"
"""IPython's text for an HTML page that code has displayed."""
_NOISE = ("application/vnd.bokehjs_load.v0+json",)
"""MIME types of outputs that only prepare a page for later ones."""


class Completed:
    """Completes bundles for a client without a browser, within the size of a message."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._cell, self._drawn = -1, 0

    def __call__(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the bundle with text and picture added; empty if it only prepares a page."""
        text = data.get("text/plain")
        if len(data) == 1 and isinstance(text, str) and len(text) < ROOM_BYTES:
            return dict(data)
        full = dict(data)
        if any(mime in full for mime in _NOISE):
            return {}
        if full.keys() - _PLAIN or full.get("text/plain") == _PAGE:
            with contextlib.suppress(Exception):  # a helper that fails leaves the output as it was
                self._add_words(full)
                if not any(mime in full for mime in pictures.PICTURES):
                    self._add_picture(full)
        return self._carried(full)

    def _add_words(self, data: dict[str, Any]) -> None:
        if data.get("text/plain") == _PAGE and (drawn := plotly_figure_in(data["text/html"])):
            data["text/plain"] = plotly_text(drawn)
        if isinstance(figure := data.get(PLOTLY), Mapping):
            data["text/plain"] = plotly_text(figure)
        for mime, value in list(data.items()):
            kind = pictures.VEGA.fullmatch(mime)
            if kind and isinstance(value, Mapping):
                del data[mime]  # altair's name may have a full version, which notebooks do not know
                data[f"application/vnd.{kind[1]}.v{kind[2]}+json"] = value
                data["text/plain"] = vega_text(value)

    def _add_picture(self, data: dict[str, Any]) -> None:
        page = str(data.get("text/html", "")) if data.get("text/plain") == _PAGE else ""
        if embedded := pictures.embedded(page):
            data.update(embedded)
            return
        drawing = data.get("image/svg+xml") or pictures.drawing_in(page)
        chart = next((pictures.VEGA.fullmatch(mime) for mime in data if "vega" in mime), None)
        picture = None
        if isinstance(drawing, str) and drawing and self._may_draw():
            picture = pictures.of_svg(drawing)
        elif chart is not None and self._may_draw():
            picture = pictures.of_vega(chart[1], chart[2], data[chart[0]])
        if picture is not None:
            data["image/png"] = picture

    def _may_draw(self) -> bool:
        cell = self._shell.execution_count
        self._drawn = self._drawn + 1 if cell == self._cell else 1
        self._cell = cell
        return self._drawn <= MOST_DRAWN

    def _carried(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return `data` with pictures scaled, and parts that are still too large left out."""
        boot = self._shell.kernel.boot if self._shell.kernel is not None else None
        most = (boot.output if boot is not None else OutputSettings()).message_bytes - ROOM_BYTES
        remarks: list[str] = []
        if any(mime in data for mime in pictures.PICTURES):
            found, remark = pictures.fitted(data, most)
            data = {mime: data[mime] for mime in data if mime not in pictures.PICTURES} | found
            remarks += [remark] if remark else []
        sizes = {mime: _size(value) for mime, value in data.items()}
        while sum(sizes.values()) > most and len(sizes) > 1:
            largest = max(sizes, key=lambda mime: sizes[mime])
            if largest == "text/plain":
                break
            remarks.append(
                f"[{largest} of {sizes.pop(largest) / 1e6:.1f} MB left out: more than a message "
                "takes; save it to a file to keep it]"
            )
            del data[largest]
        text = data.get("text/plain", "")
        if isinstance(text, str) and len(text) > most // 4:
            left = len(text) - most // 4
            text = f"{text[: most // 8]}\n[… {left:,} characters left out …]\n{text[-most // 8 :]}"
            data["text/plain"] = text
        if remarks:
            plain = "" if text.startswith("<") and text.endswith(">") else text
            data["text/plain"] = "\n".join(filter(None, [plain, *remarks]))
        return data


def _size(value: Any) -> int:
    """Return the approximate bytes of a value in a message; 0 if it cannot be encoded."""
    if isinstance(value, bytes):
        return len(value) * 4 // 3
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    try:
        return len(json.dumps(value, default=str))
    except (TypeError, ValueError, RecursionError):
        return 0


class DisplayPublisher(ZMQDisplayPublisher):
    """Publishes displays, completed by `Completed`; a forked process prints their text."""

    def publish(  # type: ignore[override]  # as ipykernel's, without a parameter of old
        self, data: Any, metadata: Any = None, **options: Any
    ) -> None:
        """Publish a bundle as `display_data`, or the update of one."""
        completed = self.shell.completed(data) if data else data
        if self.pub_socket.is_parents:
            print(_printed(completed))
        elif completed or not data:
            super().publish(completed, metadata, **options)


def _printed(data: dict[str, Any]) -> str:
    """Return the text of a bundle, and the names of its other types."""
    own = ("text/plain", charts.CHART, rows.TABLE)
    others = ", ".join(mime for mime in data if mime not in own)
    left = f"[{others} left out: a forked process shows text alone]" if others else ""
    return " ".join(filter(None, [str(data.get("text/plain", "")), left]))


class DisplayHook(ZMQShellDisplayHook):
    """Display hook whose results are completed, without features for terminals."""

    def quiet(self) -> bool:
        """Return True if the cell ends in a semicolon; it is tokenised only if it holds one."""
        cells = self.shell.history_manager.input_hist_parsed
        return bool(cells) and ";" in cells[-1] and super().quiet()

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        """Put the result into its message."""
        super().write_format_data(self.shell.completed(format_dict), md_dict)

    def cull_cache(self) -> None:
        """Drop the oldest results of `Out`, as IPython does, without its warning."""
        results = self.shell.user_ns.get("_oh", {})
        for number in sorted(results)[: max(int(len(results) * self.cull_fraction), 2)]:
            self.shell.user_ns.pop(f"_{number}", None)
            results.pop(number, None)

    def log_output(self, format_dict: dict[str, Any]) -> None:
        """Do nothing: IPython would keep every output, pictures too, until the kernel exits."""


class Formatter(DisplayFormatter):
    """Formats objects of some libraries with text and data besides their HTML page."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def format(self, obj: Any, include: Any = None, exclude: Any = None) -> Any:
        """Return MIME bundle and metadata of an object."""
        if include is None and self._only_as_text(obj):
            return super().format(obj, _TEXT, exclude)
        root = _library(obj)
        if root == "matplotlib" and hasattr(obj, "get_size_inches"):
            with figures.pictured(obj):
                data, metadata = super().format(obj, include, exclude)
            if "image/png" in data:
                chart, words = charts.described(obj)
                if words:
                    own = {"text": str(data.get("text/plain", ""))}
                    metadata = {**metadata, "kernel-mcp": own}
                    data = {**data, "text/plain": words}
                data = {**data, **({charts.CHART: chart} if chart else {})}
            return data, metadata
        if root == "graphviz" and shutil.which("dot") is None and hasattr(obj, "source"):
            return {"text/plain": f"{obj.source}\n[not drawn: there is no dot here]"}, {}
        data, metadata = super().format(obj, include, exclude)
        more = _MORE.get(root) or (_ROWS.get(root) if "text/html" in data else None)
        if more is not None and data:
            with contextlib.suppress(Exception):
                data = {**data, **more(obj)}
        return data, metadata

    def _only_as_text(self, obj: Any) -> bool:
        """Return True for an object of a builtin type without a formatter but that for text."""
        kinds = _AS_TEXT.get(type(obj))
        return kinds is not None and not any(
            _has_printer(formatter, obj, kinds)
            for mime, formatter in self.formatters.items()
            if mime not in _TEXT
        )


def _has_printer(formatter: Any, obj: Any, kinds: tuple[type, ...]) -> bool:
    """Return True if code has registered a printer for the object or for one of its types."""
    if id(obj) in formatter.singleton_printers:
        return True
    printers, deferred = formatter.type_printers, formatter.deferred_printers
    return any(kind in printers or (kind.__module__, kind.__name__) in deferred for kind in kinds)


_TEXT = frozenset({"text/plain"})
_AS_TEXT = {
    kind: kind.__mro__
    for kind in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)
}
"""Builtin types whose objects have no formatting method of their own, each with its bases."""


def _library(obj: Any) -> str:
    """Return the known library that the class of `obj` or its nearest base comes from, or ""."""
    with contextlib.suppress(Exception):  # attributes of a user's class may raise
        for kind in type(obj).__mro__:
            root = str(kind.__module__).partition(".")[0]
            if root in _MORE or root in _ROWS or root in ("matplotlib", "graphviz"):
                return root
    return ""


def _of_altair(chart: Any) -> dict[str, Any]:
    spec = chart.to_dict()
    kind = "vega" if "marks" in spec else "vegalite"
    version = str(spec.get("$schema", "")).rpartition("/v")[2].partition(".")[0] or "5"
    return {f"application/vnd.{kind}.v{version}+json": spec}


def _of_bokeh(model: Any) -> dict[str, Any]:
    from importlib import import_module

    page = import_module("bokeh.embed").file_html(model, "cdn")
    return {"text/plain": bokeh_text(model), "text/html": page}


_MORE: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "altair": _of_altair,
    "bokeh": _of_bokeh,
    "folium": lambda view: {"text/plain": folium_text(view)},
    "networkx": lambda graph: {"text/plain": str(graph)},
}


_ROWS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "pandas": rows.of_pandas,
    "polars": rows.of_polars,
}
"""Tables for people, of objects that have HTML of their own."""


def prepare(shell: Any) -> None:
    """Set up a shell: figures after cells, actions after imports, sources, stacks of cells."""
    shell.display_formatter.formatters["image/png"].for_type_by_name(
        "matplotlib.figure", "Figure", libraries.figure_picture
    )
    shell.events.register("post_execute", libraries.show_figures)
    libraries.AfterImport(libraries.ACTIONS).install()
    definitions.find_sources()
    tracebacks.hide_callers()
