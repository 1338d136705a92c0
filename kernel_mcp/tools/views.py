"""The tool that shows a cell to a person: `show`, with a view of its own where the client has them.

The view gets what it draws in `_meta`, which no model reads; a client without views has the answer.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import anyio
from mcp_types import CallToolResult

from kernel_mcp.errors import InputError
from kernel_mcp.output.bundles import CHART, INLINE_IMAGES, Representation
from kernel_mcp.output.fallback import or_fallback
from kernel_mcp.output.images import fit
from kernel_mcp.output.items import DisplayItem, FailureItem, Item, TextItem
from kernel_mcp.output.markup import JSON_DEPTH, Shape
from kernel_mcp.output.outputs import Position
from kernel_mcp.output.render import Budget, render
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import visible
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import AnyContext, SessionArg, Toolbox
from kernel_mcp.tools.app import VIEW
from kernel_mcp.tools.cells import NumberArg
from kernel_mcp.tools.hints import READS
from kernel_mcp.tools.resources import cell_of
from kernel_mcp.tools.results import closing_line, with_notices

_MOMENT = re.compile(r"\d{4}-\d\d-\d\d(T[\d:.]+)?")
VIEW_KEY = "kernel-mcp/view"
MOST_BYTES = 600_000
"""Most bytes of outputs for one view: hosts limit messages to a megabyte."""
MOST_TEXT = 100_000
ROOM = 2000
"""Characters of an output besides its picture."""


def register(box: Toolbox, services: ToolContext) -> None:
    """Add the tool to `box`."""
    settings = services.settings

    @box.tool(READS, "Show a cell", meta={"ui": {"resourceUri": VIEW}}, structured_output=False)
    async def show(
        ctx: AnyContext, session: SessionArg = "", cell: NumberArg = 0
    ) -> CallToolResult:
        """Show a cell, or the last one, to the person: tables to sort, charts, a stop button."""
        _, found = await box.resolve(ctx, session)
        if not found.cells:
            raise InputError("Nothing can be shown: no cell has been executed in this session.")
        chosen = cell_of(found.cells, cell) if cell else found.cells[-1]
        items = chosen.log.since(Position())
        ended = chosen.finished.is_set()
        rendered = await render(
            items,
            session=found.handle,
            cell=chosen.number,
            budget=Budget(settings.max_output),
            silence="(no output)" if ended else "",
        )
        closing = closing_line(found, chosen, settings.max_timeout_s)
        view = await anyio.to_thread.run_sync(_view, chosen, items)
        meta = {"session": found.handle, "cell": chosen.number, "status": chosen.status.value}
        return CallToolResult(
            content=with_notices(rendered.content, [closing] if closing else []),
            _meta={
                VIEW_KEY: {
                    **meta,
                    "running": not ended,
                    "duration_s": chosen.duration_s,
                    "outputs": view,
                }
            },
        )


def _view(cell: Cell, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the outputs of a cell as the view draws them, within `MOST_BYTES`. Reads files."""
    found: list[dict[str, Any]] = []
    left = MOST_BYTES
    for item in items:
        for output, size in or_fallback(partial(_drawn_item, item, left), _noted):
            left -= size
            if left < 0:
                found.append(
                    {"kind": "note", "text": "What follows is too large to be shown here."}
                )
                return found
            found.append(output)
    return found


def _drawn_item(item: Item, left: int) -> list[tuple[dict[str, Any], int]]:
    """Return the outputs of an item, each with its number of characters as JSON."""
    return [(output, len(json.dumps(output))) for output in _outputs(item, left)]


def _noted(why: str) -> list[tuple[dict[str, Any], int]]:
    return [({"kind": "note", "text": why}, len(why))]


def _outputs(item: Item, left: int) -> Iterator[dict[str, Any]]:
    if isinstance(item, TextItem):
        yield {"kind": "text", "text": item.text[-MOST_TEXT:]}
    elif isinstance(item, FailureItem):
        lines = item.failure.traceback or (f"{item.failure.name}: {item.failure.value}",)
        yield {"kind": "error", "text": visible(clean("\n".join(lines)))[-MOST_TEXT:]}
    elif isinstance(item, DisplayItem):
        yield from _display({part.mime: part for part in item.parts}, left)
    else:
        yield {"kind": "note", "text": getattr(item, "text", "[…]")}


def _display(parts: dict[str, Representation], left: int) -> Iterator[dict[str, Any]]:
    chart = _json(parts.get(CHART))
    if _drawn(chart):
        yield {"kind": "chart", "data": chart}
        return
    picture = next((parts[mime] for mime in INLINE_IMAGES if mime in parts), None)
    plain = parts["text/plain"].read() if "text/plain" in parts else ""
    if picture is not None and (shown := _picture(picture, left)):
        yield {"kind": "image", **shown, "alt": plain[:200]}
    elif "text/html" in parts and "<table" in (page := parts["text/html"].read()[:MOST_BYTES]):
        yield {"kind": "table", "html": page, "text": visible(clean(plain))[:MOST_TEXT]}
    elif (value := _json(parts.get("application/json"))) is not None:
        yield {"kind": "json", "data": value}
    elif plain:
        yield {"kind": "text", "text": visible(clean(plain))[:MOST_TEXT]}
    else:
        kinds = ", ".join(parts)
        yield {"kind": "note", "text": f"An output of {kinds} that is not shown here."}


def _picture(part: Representation, left: int) -> dict[str, str]:
    """Return a picture, shrunk to `left` characters of base64; empty where that fails."""
    if part.size < left:
        return {"mime": part.mime, "data": part.read()}
    try:
        small = fit(part.data(), (left - ROOM) // 4 * 3)
    except ValueError:
        return {}
    return {"mime": small.mime, "data": base64.b64encode(small.data).decode()}


def _drawn(chart: Any) -> bool:
    """Return True if the view can draw a chart itself; others are shown as a picture."""
    if not isinstance(chart, dict) or not isinstance(chart.get("elements"), list):
        return False
    elements, kind = chart["elements"], chart.get("type")
    if kind == "superchart":
        return all(map(_drawn, elements))
    if not all(isinstance(each, dict) for each in elements):
        return False
    if any(chart.get(scale, "linear") != "linear" for scale in ("x_scale", "y_scale")):
        return False
    if kind in ("bar", "hist"):
        groups = [each.get("group") for each in elements]
        return groups.count(groups[0]) == len(groups) if groups else False
    return kind in ("line", "scatter") and all(map(_in_order, elements))


def _in_order(series: dict[str, Any]) -> bool:
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


def _json(part: Representation | None) -> Any:
    """Return the value of a part that is strict JSON; None for any other, or a large one."""
    if part is None or part.problem or part.size > MOST_BYTES:
        return None
    text, shape = part.read(), Shape()
    shape.feed(text)
    if shape.deepest > JSON_DEPTH:
        return None
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return value
