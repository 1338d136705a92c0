"""Outputs on their way out: a picture or words with what only a browser shows, none too large."""

# ipykernel and IPython are traitlets classes: untyped, and optional throughout, to mypy.
# mypy: disable-error-code="no-untyped-call, union-attr, attr-defined"

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.zmqshell import ZMQDisplayPublisher
from IPython.core.formatters import DisplayFormatter

from kernel_specs.restricted.config import Output
from kernel_specs.restricted.display import libraries, pictures, texts

ROOM_BYTES = 64 * 1024
"""What a message holds besides its largest value."""
MOST_DRAWN = 50
"""Drawings of one cell that become pictures; the others stay what they are."""
PLOTLY = "application/vnd.plotly.v1+json"
_PLAIN = frozenset({"text/plain", "text/html"})
_PAGE = "<IPython.core.display.HTML object>"
"""The text of a page that code has written itself."""
_NOISE = ("application/vnd.bokehjs_load.v0+json",)
"""What only prepares a page for outputs to come."""


class Completed:
    """Makes bundles that a reader without a browser can use, within the room of a message."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._cell, self._drawn = -1, 0

    def __call__(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The same bundle with what it lacks; empty for what only prepares a page."""
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
        if data.get("text/plain") == _PAGE and (drawn := texts.plotly_in(data["text/html"])):
            data["text/plain"] = texts.of_plotly(drawn)
        if isinstance(figure := data.get(PLOTLY), Mapping):
            data["text/plain"] = texts.of_plotly(figure)
        for mime, value in list(data.items()):
            kind = pictures.VEGA.fullmatch(mime)
            if kind and isinstance(value, Mapping):
                del data[mime]  # its name may be that of altair, which no notebook knows
                data[f"application/vnd.{kind[1]}.v{kind[2]}+json"] = value
                data["text/plain"] = texts.of_vega(value)

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
        """`data` with pictures scaled, and what is still too large left out and named."""
        boot = self._shell.kernel.boot if self._shell.kernel is not None else None
        most = (boot.output if boot is not None else Output()).message_bytes - ROOM_BYTES
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
    """Bytes of a value in a message, about; encoded only where it is not text."""
    if isinstance(value, bytes):
        return len(value) * 4 // 3
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    try:
        return len(json.dumps(value, default=str))
    except (TypeError, ValueError, RecursionError):
        return 0


class Publisher(ZMQDisplayPublisher):
    """Publishes displays completed."""

    def publish(  # type: ignore[override]  # as ipykernel's, without a parameter of old
        self, data: Any, metadata: Any = None, **options: Any
    ) -> None:
        """Publish a bundle as `display_data`, or the update of one."""
        completed = self.shell.completed(data) if data else data
        if completed or not data:
            super().publish(completed, metadata, **options)


class DisplayHook(ZMQShellDisplayHook):
    """The display hook without what only a terminal needs, whose results are completed."""

    def quiet(self) -> bool:
        """Whether the cell ends in a semicolon; tokenised only when it holds one."""
        cells = self.shell.history_manager.input_hist_parsed
        return bool(cells) and ";" in cells[-1] and super().quiet()

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        """Put the result into its message."""
        super().write_format_data(self.shell.completed(format_dict), md_dict)

    def cull_cache(self) -> None:
        """Drop the oldest results of `Out`, as IPython does, which warns of it each time."""
        results = self.shell.user_ns.get("_oh", {})
        for number in sorted(results)[: max(int(len(results) * self.cull_fraction), 2)]:
            self.shell.user_ns.pop(f"_{number}", None)
            results.pop(number, None)

    def log_output(self, format_dict: dict[str, Any]) -> None:
        """Keep nothing: IPython would hold every output, pictures too, for ever."""


class Formatter(DisplayFormatter):
    """Formats objects of some libraries as more than their page."""

    def format(self, obj: Any, include: Any = None, exclude: Any = None) -> Any:
        """Bundle and metadata of an object."""
        root = _library(obj)
        if root == "matplotlib" and hasattr(obj, "get_size_inches"):
            with libraries.bounded(obj):
                return super().format(obj, include, exclude)
        if root == "graphviz" and shutil.which("dot") is None and hasattr(obj, "source"):
            return {"text/plain": f"{obj.source}\n[not drawn: there is no dot here]"}, {}
        data, metadata = super().format(obj, include, exclude)
        more = _MORE.get(root)
        if more is not None and data:
            with contextlib.suppress(Exception):
                data = {**data, **more(obj)}
        return data, metadata


def _library(obj: Any) -> str:
    """The library that the class of `obj` comes from, or its nearest base; empty for none."""
    with contextlib.suppress(Exception):  # user code decides what a class answers
        for kind in type(obj).__mro__:
            root = str(kind.__module__).partition(".")[0]
            if root in _MORE or root in ("matplotlib", "graphviz"):
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
    return {"text/plain": texts.of_bokeh(model), "text/html": page}


_MORE: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "altair": _of_altair,
    "bokeh": _of_bokeh,
    "folium": lambda view: {"text/plain": texts.of_folium(view)},
    "networkx": lambda graph: {"text/plain": str(graph)},
}


def prepare(shell: Any) -> None:
    """Have the outputs of `shell` completed, and libraries followed when code imports them."""
    shell.display_formatter.formatters["image/png"].for_type_by_name(
        "matplotlib.figure", "Figure", libraries.figure_picture
    )
    shell.events.register("post_execute", libraries.show_figures)
    libraries.AfterImport(libraries.ACTIONS).install()
