"""Views of a notebook for a model: an outline, or single cells as text and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kernel_mcp.notebooks.document import NotebookCell
from kernel_mcp.notebooks.jsontext import joined
from kernel_mcp.output.bundles import (
    INLINE_IMAGES,
    Representation,
    embedded,
    readable,
    representations,
)
from kernel_mcp.output.fallback import or_fallback
from kernel_mcp.output.images import ImageError, Picture, fit
from kernel_mcp.output.items import READABLE_CHARS
from kernel_mcp.output.render import PICTURE_BYTES
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import cut, one_line, weight
from kernel_mcp.records import dataclass

LINE_CHARS = 72
"""Characters of a cell's first line in an outline."""
TEXT_CHARS = 8000
"""Most characters of one text of a cell that is shown whole."""
LEAST_CHARS = 200
"""Characters of a cell's source that are shown even without room."""
OUTPUT_CHARS = 20
"""Characters that each output counts in addition to its text."""
MOST_PICTURES = 8


@dataclass(frozen=True, slots=True)
class Outline:
    """An outline: a line for each cell from number `first` to `last` of `total`."""

    lines: tuple[str, ...]
    first: int
    last: int
    total: int


def outline(cells: Sequence[NotebookCell], first: int, characters: int) -> Outline:
    """Return an outline from cell number `first` on, with as many cells as fit, at least one."""
    found: list[str] = []
    left = characters
    for cell in cells[first - 1 :]:
        line = _line(cell)
        left -= weight(line) + 1
        if left < 0 and found:
            break
        found.append(line)
    return Outline(tuple(found), first, first + len(found) - 1, len(cells))


class AnswerBudget:
    """Remaining room of one answer about whole cells: `characters` of text, and pictures."""

    def __init__(self, characters: int) -> None:
        self.characters = characters
        self._bytes = PICTURE_BYTES
        self._pictures = MOST_PICTURES

    def text(self, text: str, least: int = 0) -> str:
        """Return a text, with its middle cut out if it is longer than the room; use up the room.

        `least` characters are shown in any case.
        """
        most = max(least, min(TEXT_CHARS, self.characters))
        if (heavy := weight(text)) > most:
            most = most * len(text) // heavy
        found = cut(text, most // 2, most - most // 2).joined()
        self.characters -= weight(found)
        return found

    def picture(self, data: bytes) -> Picture:
        """Return a picture, shrunk if needed; use up the room. Raises ImageError without room."""
        if not self._pictures:
            raise ImageError("an answer has no more pictures")
        found = fit(data, self._bytes)
        self._pictures -= 1
        self._bytes -= len(found.data)
        return found


def full_cell(cell: NotebookCell, room: AnswerBudget) -> Iterator[str | Picture]:
    """Yield the source of a cell, then its outputs as far as there is room."""
    yield room.text(cell.source, LEAST_CHARS)
    outputs = cell.outputs
    for number, output in enumerate(outputs):
        if room.characters <= 0:
            yield f"[{len(outputs) - number:,} more outputs are not shown]"
            return
        room.characters -= OUTPUT_CHARS
        yield from or_fallback(partial(_listed, output, room), _placeholder)


def _line(cell: NotebookCell) -> str:
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


def _placeholder(why: str) -> list[str | Picture]:
    return [why]


def _listed(output: Mapping[str, Any], room: AnswerBudget) -> list[str | Picture]:
    return list(_shown(output, room))


def _shown(output: Mapping[str, Any], room: AnswerBudget) -> Iterator[str | Picture]:
    kind = output.get("output_type")
    if kind == "stream":
        yield room.text(clean(joined(output.get("text"))))
    elif kind == "error":
        rows = output.get("traceback")
        text = "\n".join(map(str, rows)) if isinstance(rows, list) else ""
        words = f"{output.get('ename', 'Error')}: {output.get('evalue', '')}"
        yield room.text(clean(text or words))
    elif isinstance(data := output.get("data"), dict):
        yield from _display(data, room)


def _picture(part: Representation, room: AnswerBudget) -> str | Picture:
    try:
        return room.picture(part.data())
    except ValueError as error:
        return room.text(f"[{part.mime} that cannot be shown: {error}]")


def _display(data: Mapping[str, Any], room: AnswerBudget) -> Iterator[str | Picture]:
    """Yield the pictures of a bundle, then its words, unless a picture is all that it is."""
    parts = representations(
        {mime: value if mime.endswith("json") else joined(value) for mime, value in data.items()}
    )
    own = [part for mime in INLINE_IMAGES for part in parts if part.mime == mime][:1]
    more, remark = embedded(parts)
    for part in (*own, *more):
        yield _picture(part, room)
    words = "" if own and not more else readable(parts, READABLE_CHARS).joined()
    for text in (remark, words):
        if text:
            yield room.text(text)
    if not (own or more or words):
        yield room.text(f"[{', '.join(one_line(str(mime), 60) for mime in data)}]")
