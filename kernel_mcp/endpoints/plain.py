"""Plain outputs: a web page can show them with its reader's rights, as nothing in them can run.

JupyterLab trusts the outputs of a person's own cells, and it has the rights of the user who has
started it. So it receives only text, raster pictures, JSON and sanitised tables. SVG, LaTeX,
Markdown, scripts, widgets and types of other libraries are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernel_mcp.output.fallback import or_fallback
from kernel_mcp.output.items import Display, Event, Failure
from kernel_mcp.output.layout import shortened
from kernel_mcp.output.markup import bare_html
from kernel_mcp.units import MIB

PICTURES = ("image/png", "image/jpeg", "image/gif")
MOST_HTML = MIB
"""Characters of an HTML page that are read."""
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]*")


def plain(event: Event) -> Event:
    """Return an output without active content; an exception is folded."""
    if isinstance(event, Failure):
        return folded(event)
    if not isinstance(event, Display):
        return event
    return Display(
        _shown(event.data),
        plain_metadata(event.metadata),
        event.display_id,
        update=event.update,
        result=event.result,
    )


def folded(failure: Failure) -> Failure:
    """Return an exception whose traceback begins with its message, with foreign frames counted."""
    frames, message = or_fallback(lambda: shortened(failure), lambda why: ("", why))
    return replace(failure, traceback=(message, *([frames] if frames else [])))


def _shown(data: Mapping[str, Any]) -> dict[str, Any]:
    return or_fallback(lambda: plain_data(data), lambda why: {"text/plain": why})


def plain_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain types of a MIME bundle; a text that names the others if there are none."""
    shown: dict[str, Any] = {}
    for mime in PICTURES:
        picture = _text(data.get(mime))
        if picture and _BASE64.fullmatch(picture):
            shown[mime] = picture
    if isinstance(value := data.get("application/json"), (dict, list)):
        shown["application/json"] = value
    page = bare_html(_text(data.get("text/html")), MOST_HTML)
    if not shown and page.strip():
        shown["text/html"] = page
    words = _text(data.get("text/plain"))
    if words or not shown:
        shown["text/plain"] = words or f"[{', '.join(data)} is not shown here]"
    return shown


def plain_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return width and height of pictures, the only metadata that is passed on."""
    found: dict[str, Any] = {}
    for mime in PICTURES:
        given = metadata.get(mime)
        if isinstance(given, dict):
            sizes = {name: given.get(name) for name in ("width", "height")}
            found[mime] = {name: size for name, size in sizes.items() if _is_size(size)}
    return found


def plain_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return a notebook's code cell with plain outputs and without metadata."""
    outputs: list[dict[str, Any]] = []
    for each in cell["outputs"]:
        output = dict(each)
        if "data" in output:
            output["data"] = _shown(output["data"])
            output["metadata"] = plain_metadata(output.get("metadata", {}))
        elif output.get("output_type") == "error":
            told = Failure(output["ename"], output["evalue"], tuple(output["traceback"]))
            output["traceback"] = list(folded(told).traceback)
        outputs.append(output)
    return {**cell, "metadata": {}, "outputs": outputs}


def plain_reply(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return a kernel's reply to a completion or inspection request, with texts only."""
    if kind == "inspect_request":
        words = _text(content.get("data", {}).get("text/plain"))
        return {**content, "data": {"text/plain": words} if words else {}, "metadata": {}}
    if kind == "complete_request":
        matches = [each for each in content.get("matches", ()) if isinstance(each, str)]
        return {**content, "matches": matches, "metadata": {}}
    return content


def _text(value: object) -> str:
    if isinstance(value, list):
        return "".join(each for each in value if isinstance(each, str))
    return value if isinstance(value, str) else ""


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 100_000
