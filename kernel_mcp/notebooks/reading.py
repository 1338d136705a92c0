"""What a model is shown of a notebook: an outline, or single cells as text and pictures."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kernel_mcp.notebooks.document import BookCell
from kernel_mcp.notebooks.jsontext import joined
from kernel_mcp.output.images import ImageError, Picture, fit
from kernel_mcp.output.markup import html_to_text
from kernel_mcp.output.render import PICTURE_BYTES
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import cut, one_line
from kernel_mcp.records import dataclass

LINE_CHARS = 72
"""Of a cell's first line in an outline."""
MOST_PICTURES = 8
HTML_CHARS = 200_000
_PICTURES = ("image/png", "image/jpeg")


@dataclass(frozen=True, slots=True)
class Outline:
    """Lines for cells from number `first` to `last` of `total`."""

    lines: tuple[str, ...]
    first: int
    last: int
    total: int


def outline(cells: Sequence[BookCell], first: int, characters: int) -> Outline:
    """A line for each cell from number `first` on, as many as fit into `characters`."""
    found: list[str] = []
    left = characters
    for cell in cells[first - 1 :]:
        line = _line(cell)
        left -= len(line) + 1
        if left < 0 and found:
            break
        found.append(line)
    return Outline(tuple(found), first, first + len(found) - 1, len(cells))


def whole(cell: BookCell, characters: int) -> Iterator[str | Picture]:
    """The source of a cell, then its outputs; texts of at most `characters` each are cut."""
    yield _fitted(cell.source, characters)
    for output in cell.outputs:
        yield from _shown(output, characters)


def _line(cell: BookCell) -> str:
    count = f"[{cell.count}] " if cell.count is not None else ""
    rows = cell.source.strip().split("\n")
    more = f" (+{len(rows) - 1} lines)" if len(rows) > 1 else ""
    kinds = ", ".join(dict.fromkeys(filter(None, map(_kind, cell.outputs))))
    arrow = f" → {kinds}" if kinds else ""
    kind = one_line(cell.kind, 20)
    return f"{cell.id} {count}{kind}: {one_line(rows[0].strip(), LINE_CHARS)}{more}{arrow}"


def _kind(output: Mapping[str, Any]) -> str:
    kind = output.get("output_type")
    if kind == "stream":
        return "text"
    if kind == "error":
        return one_line(str(output.get("ename", "error")), 40)
    data = output.get("data")
    if not isinstance(data, dict):
        return ""
    mimes = [mime for mime in data if mime != "text/plain"] or list(data)
    return one_line(mimes[0].rpartition("/")[2], 40) if mimes else ""


def _shown(output: Mapping[str, Any], characters: int) -> Iterator[str | Picture]:
    kind = output.get("output_type")
    if kind == "stream":
        yield _fitted(clean(joined(output.get("text"))), characters)
    elif kind == "error":
        rows = output.get("traceback")
        text = "\n".join(map(str, rows)) if isinstance(rows, list) else ""
        words = f"{output.get('ename', 'Error')}: {output.get('evalue', '')}"
        yield _fitted(clean(text or words), characters)
    elif isinstance(data := output.get("data"), dict):
        yield _display(data, characters)


def _display(data: Mapping[str, Any], characters: int) -> str | Picture:
    for mime in _PICTURES:
        if mime in data:
            try:
                return fit(base64.b64decode(joined(data[mime])), PICTURE_BYTES)
            except (ImageError, binascii.Error) as error:
                return f"[{mime} that cannot be shown: {error}]"
    if plain := joined(data.get("text/plain")):
        return _fitted(clean(plain), characters)
    if page := joined(data.get("text/html")):
        return _fitted(html_to_text(page, HTML_CHARS), characters)
    return f"[{', '.join(one_line(str(mime), 60) for mime in data)}]"


def _fitted(text: str, characters: int) -> str:
    return cut(text, characters // 2, characters // 2).joined()
