"""The tool that shows a cell to a person: `show`, with a view of its own where the client has them.

The view gets what it draws in `_meta`, which no model reads; a client without views has the answer.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import anyio
from mcp_types import CallToolResult

from kernel_mcp.errors import InputError
from kernel_mcp.output.bundles import (
    CHART,
    INLINE_IMAGES,
    TABLE,
    Representation,
    embedded,
    readable,
)
from kernel_mcp.output.fallback import or_fallback
from kernel_mcp.output.images import fit
from kernel_mcp.output.items import DisplayItem, FailureItem, Item, TextItem
from kernel_mcp.output.layout import shortened
from kernel_mcp.output.markup import JSON_DEPTH, Shape, read_html
from kernel_mcp.output.outputs import Position
from kernel_mcp.output.render import Budget, render
from kernel_mcp.output.tables import Grid
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import visible
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import AnyContext, SessionArg, Toolbox
from kernel_mcp.tools.app import VIEW
from kernel_mcp.tools.cells import NumberArg
from kernel_mcp.tools.closing import closing_line
from kernel_mcp.tools.hints import READS
from kernel_mcp.tools.resources import cell_of
from kernel_mcp.tools.results import with_notices
from kernel_mcp.tools.scenes import scene

_MISSING = ("", "nan", "none", "nat", "<na>", "null")
VIEW_KEY = "kernel-mcp/view"
MOST_BYTES = 600_000
"""Most bytes of outputs for one view: hosts limit messages to a megabyte."""
MOST_TEXT = 100_000
MOST_ROWS = 500
"""Rows of one table that a view gets."""
ROOM = 2000
"""Characters of an output besides its picture."""


def register(box: Toolbox, services: ToolContext) -> None:
    """Add the tool to `box`."""
    settings = services.settings

    @box.tool(READS, "Show a cell", meta={"ui": {"resourceUri": VIEW}})
    async def show(
        ctx: AnyContext, session: SessionArg = "", cell: NumberArg = 0
    ) -> CallToolResult:
        """Show a cell, or the last one, to the person: charts, tables to sort."""
        caller, found = await box.resolve(ctx, session)
        if not found.cells:
            raise InputError("Nothing can be shown: no cell has been executed in this session.")
        chosen = cell_of(found.cells, cell) if cell else found.cells[-1]
        items, position = chosen.log.since(Position()), chosen.log.position()
        caller.response.receipt.then(partial(chosen.tell_late, position))
        ended = chosen.finished.is_set()
        rendered = await render(
            items,
            session=found.handle,
            cell=chosen.number,
            budget=Budget(settings.max_output),
            silence="(no output)" if ended else "",
        )
        closing = closing_line(found, chosen, settings.max_timeout_s)
        mark = "" if found.verified is None else found.verified.mark(chosen.number)
        told = [*filter(None, (closing, f"verified: {mark}" * bool(mark)))]
        view = await anyio.to_thread.run_sync(_view, chosen, items)
        meta = {"session": found.handle, "cell": chosen.number, "status": chosen.status.value}
        return CallToolResult(
            content=with_notices(rendered.content, told),
            _meta={
                VIEW_KEY: {
                    **meta,
                    "running": not ended,
                    "duration_s": chosen.duration_s,
                    "verified": mark,
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
        _, message = shortened(item.failure)
        frames = visible(clean("\n".join(item.failure.traceback)))[-MOST_TEXT:]
        yield {"kind": "error", "text": visible(message)[:MOST_TEXT], "frames": frames}
    elif isinstance(item, DisplayItem):
        yield from _display({part.mime: part for part in item.parts}, left)
    else:
        yield {"kind": "note", "text": getattr(item, "text", "[…]")}


def _display(parts: dict[str, Representation], left: int) -> Iterator[dict[str, Any]]:
    if chart := scene(_json(parts.get(CHART))):
        yield {"kind": "chart", "data": chart}
        return
    own = next((parts[mime] for mime in INLINE_IMAGES if mime in parts), None)
    more, remark = embedded(list(parts.values()))
    pictures = [*([own] if own else []), *more]
    plain = parts["text/plain"].read() if "text/plain" in parts else ""
    shown = [_picture(each, left // len(pictures)) for each in pictures]
    yield from ({"kind": "image", **each, "alt": plain[:200]} for each in shown if each)
    if remark:
        yield {"kind": "note", "text": remark}
    page = parts.get(TABLE) or parts.get("text/html")
    if own is not None and any(shown) and not more:
        return
    if page is not None and (tables := list(_tables(page.read(), left))):
        yield from tables
    elif (value := _json(parts.get("application/json"))) is not None:
        yield {"kind": "json", "data": value}
    elif text := readable(tuple(parts.values()), MOST_TEXT).joined():
        yield {"kind": "text", "text": visible(text)}
    elif not any(shown):
        kinds = ", ".join(parts)
        yield {"kind": "note", "text": f"An output of {kinds} that is not shown here."}


def _tables(page: str, left: int) -> Iterator[dict[str, Any]]:
    """Yield the tables of an HTML page with the words between them; nothing without a table."""
    if "<table" not in page.lower():
        return
    reader = read_html(page, MOST_BYTES)
    if reader.unread and reader.tables:
        reader.tables[-1].omitted += page.lower().count("<tr", len(page) - reader.unread)
    before = 0
    for grid, place in zip(reader.tables, reader.places, strict=True):
        around = [*reader.lines[before : place.start], *reader.lines[place.stop :][:1]]
        yield from _words(reader.lines[before : place.start])
        yield _table(grid, max(map(_stated_rows, around), default=0), left // len(reader.tables))
        before = place.stop
    if reader.tables:
        yield from _words(reader.lines[before:])


def _words(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    if text := "\n".join(line for line in lines if not _stated_rows(line)):
        yield {"kind": "text", "text": visible(clean(text))[:MOST_TEXT]}


def _table(grid: Grid, told: int, left: int) -> dict[str, Any]:
    """Return a table: names of columns, rows that fit into `left` characters, how many there are.

    `gap` is the place of rows that are left out, -1 if all are there, and `left` tells how many.
    """
    rows = grid.rows()
    heads, rows = rows[: grid.heads], rows[grid.heads :]
    width = max(map(len, [*heads, *rows]), default=0)
    names = [" / ".join(dict.fromkeys(filter(None, column))) for column in zip_longest(*heads)]
    gap = next((place for place, row in enumerate(rows) if _is_gap(row)), -1)
    total = len(rows) + grid.omitted
    if gap >= 0:
        rows = rows[:gap] + rows[gap + 1 :]
        total = told if told > len(rows) else -1
    size, most = 0, 0
    for row in rows[:MOST_ROWS]:
        size += len(json.dumps(row)) + 2
        most += size <= left - ROOM
    if most < len(rows):
        rows, gap = rows[:most], min(gap, most) if gap >= 0 else most
    elif grid.omitted and gap < 0:
        gap = len(rows)
    names += [""] * (width - len(names))
    numeric = [_are_numbers([row[at] for row in rows if at < len(row)]) for at in range(width)]
    words = {
        "count": _counted(len(rows), total),
        "left": f"{total - len(rows)} rows are left out here" if total >= 0 else "[…]",
    }
    return {"kind": "table", "names": names, "numeric": numeric, "rows": rows, "gap": gap, **words}


def _counted(shown: int, total: int) -> str:
    """Return in words how many rows of a table are shown; `total` is -1 if it is not known."""
    if shown == total:
        return f"{total} row{'s' * (total != 1)}"
    return f"{shown} of {total} rows" if total >= 0 else f"{shown} of more rows"


def _are_numbers(texts: Sequence[str]) -> bool:
    """Return True if the texts of a column are numbers, apart from missing ones."""
    known = [text for text in texts if text.lower() not in _MISSING]
    return bool(known) and all(map(_is_number, known))


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "").replace("\N{MINUS SIGN}", "-").removesuffix("%"))
    except ValueError:
        return False
    return True


def _is_gap(row: Sequence[str]) -> bool:
    """Return True for a row that stands for rows left out."""
    return len(row) > 1 and set(row) <= {"...", "…", "⋮"}


def _stated_rows(line: str) -> int:
    """Return the number of rows that a line beside a table tells, as pandas and polars do."""
    first, _, rest = line.replace("_", "").replace(",", " ").partition(" ")
    number = rest.partition(" ")[0][1:] if first == "shape:" else first
    told = first == "shape:" or rest == "rows" or rest.startswith("rows \N{MULTIPLICATION SIGN} ")
    return int(number) if told and number.isascii() and number.isdecimal() and number[:12] else 0


def _picture(part: Representation, left: int) -> dict[str, str]:
    """Return a picture, shrunk to `left` characters of base64; empty where that fails."""
    if part.size < left:
        return {"mime": part.mime, "data": part.read()}
    try:
        small = fit(part.data(), (left - ROOM) // 4 * 3)
    except ValueError:
        return {}
    return {"mime": small.mime, "data": base64.b64encode(small.data).decode()}


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
