"""HTML and JSON as text, in time linear in its length.

The standard library's HTMLParser takes quadratic time on tags that do not end: 5 s for 32 KiB of
`<a `. Hostile output could hold up the server.
"""

from __future__ import annotations

import codecs
import html
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from kernel_mcp.output.tables import Grid, span
from kernel_mcp.output.tags import RAW, Tag, tags, unescaped
from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB

SLICE_CHARS = 64 * KIB
"""Characters handled in one step; between two steps other threads may run."""
JSON_DEPTH = 100
"""Most levels of a value that is kept; nbformat's own reader accepts some 300."""

_OTHER = re.compile(r"[^\[\]{}]+")


class NotJson(ValueError):
    """Text that is no JSON, or that has too many values or levels for a reader."""


def slices(text: str) -> Iterator[str]:
    """Yield `text` in pieces of `SLICE_CHARS`."""
    for start in range(0, len(text), SLICE_CHARS):
        yield text[start : start + SLICE_CHARS]


def compact(value: Any) -> bytes:
    """Return a small value as compact JSON in UTF-8. Raises ValueError, RecursionError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return utf8(text)


def string(pieces: Iterable[str]) -> Iterator[bytes]:
    """Yield a JSON string of text that arrives in pieces."""
    yield b'"'
    for piece in pieces:
        for part in slices(piece):
            yield utf8(json.dumps(part, ensure_ascii=False)[1:-1])
    yield b'"'


def utf8(text: str) -> bytes:
    """Return JSON text in UTF-8; a lone surrogate, which that cannot encode, becomes an escape."""
    return text.encode("utf-8", "backslashreplace")


def checked(pieces: Iterable[bytes], shape: Shape, values: int, depth: int) -> Iterator[bytes]:
    """Yield the pieces of a JSON text, and count its values and levels with `shape`.

    Raises NotJson for more than `values` values or `depth` levels, and for an incomplete text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        for text in slices(decoder.decode(piece)):
            if shape.values > values:
                raise NotJson("the notebook has too many values")
            shape.feed(text)
            if shape.deepest > depth:
                raise NotJson(f"it is nested more than {depth} levels deep")
        yield piece
    if shape.values > values:
        raise NotJson("the notebook has too many values")
    if not shape.complete:
        raise NotJson("its end is missing")


class Shape:
    """Counter of the values and nesting levels of a JSON text that arrives in pieces."""

    def __init__(self) -> None:
        self.values = 1
        self.deepest = 0
        self._depth = 0
        self._inside = False
        self._escape = ""

    @property
    def complete(self) -> bool:
        """True if every string and bracket that was opened is closed."""
        return not (self._inside or self._depth or self._escape)

    def feed(self, text: str) -> None:
        """Count the values and levels of the next piece."""
        text = self._escape + text
        slashes = len(text) - len(text.rstrip("\\"))
        self._escape = "\\" * (slashes % 2)
        text = text[: len(text) - len(self._escape)]
        first, *rest = text.replace("\\\\", "").replace('\\"', "").split('"')
        self._outside(first)
        for part in rest:
            self._inside = not self._inside
            self._outside(part)

    def _outside(self, text: str) -> None:
        if self._inside or not text:
            return
        brackets = _OTHER.sub("", text)
        self.values += text.count(",")
        for bracket in brackets:
            if bracket in "[{":
                self.values += 1
                self._depth += 1
                self.deepest = max(self.deepest, self._depth)
            else:
                self._depth -= 1


_BREAKS = frozenset(
    ("p", "div", "br", "li", "ul", "ol", "pre", "hr", "section", "article", "h1", "h2", "h3", "h4")
) | frozenset(("h5", "h6", "details", "summary", "figure", "dl", "dt", "dd", "caption"))
_GROUPS = frozenset(("thead", "tbody", "tfoot"))
MOST_DEPTH = 20
"""Most tables within each other; deeper ones count as parts of the last."""


def html_to_text(source: str, limit: int) -> str:
    """Return the words of an HTML document: a line per block, ` | ` between cells of a table row.

    Reads at most `limit` characters of the source, and says so if there are more.
    """
    reader = read_html(source, limit)
    remark = f"[… {reader.unread:,} more characters of HTML are not read …]"
    return "\n".join([*reader.lines, *([remark] if reader.unread else [])])


def read_html(source: str, limit: int) -> HtmlReader:
    """Return a reader that has read at most `limit` characters of a document."""
    reader = HtmlReader()
    for words, tag in tags(source, limit):
        reader.words(words)
        reader.tag(tag)
    reader.end(len(tag.text))
    return reader


_BARE = frozenset(
    ("table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "p", "br", "hr", "pre")
) | frozenset(("code", "b", "strong", "i", "em", "ul", "ol", "li", "dl", "dt", "dd", "blockquote"))


def bare_html(source: str, limit: int) -> str:
    """Return an HTML document reduced to words, tables, lists and emphasis, without active content.

    It is rebuilt from element names, the spans of table cells, and escaped text; all other
    attributes are dropped. Reads at most `limit` characters of the source.
    """
    found: list[str] = []
    for words, tag in tags(source, limit):
        if words:
            found.append(html.escape(unescaped(words)))
        if tag.name in _BARE and tag.is_end:
            found.append(f"</{tag.name}>")
        elif tag.name in _BARE:
            spans = ("colspan", "rowspan") if tag.name in ("td", "th") else ()
            given = [f' {each}="{span(tag, each)}"' for each in spans if tag.attribute(each)]
            found.append("".join([f"<{tag.name}", *given, ">"]))
    return "".join(found)


_ADDRESS = re.compile(r"[^\"'<>\s;,]{0,200}")
MOST_ELEMENTS = 8


def html_outline(source: str, limit: int) -> str:
    """Return one line on an HTML document without words: its first elements with their addresses.

    At most `MOST_ELEMENTS` kinds of them; empty if `limit` characters contain no element.
    """
    found: dict[str, None] = {}
    for _, tag in tags(source, limit, RAW):
        if not tag.name or tag.is_end:
            continue
        address = _ADDRESS.match(tag.attribute("src") or tag.attribute("href"))
        found[f"{tag.name} {address[0]}" if address and address[0] else tag.name] = None
        if len(found) > MOST_ELEMENTS:
            break
    elements = [*found][:MOST_ELEMENTS] + ["…"] * (len(found) > MOST_ELEMENTS)
    told = f"{len(source):,} character{'' if len(source) == 1 else 's'}"
    return f"[HTML without words, {told}: {', '.join(elements)}]" if found else ""


def pictures_in(source: str) -> list[tuple[str, str, str]]:
    """Return MIME type, base64 data and alternative text of pictures embedded in a document."""
    found: list[tuple[str, str, str]] = []
    for _, tag in tags(source, len(source)):
        address = tag.attribute("src") if tag.name == "img" and not tag.is_end else ""
        kind, comma, data = address.partition(";base64,")
        if comma and kind[:11].lower() == "data:image/":
            words = " ".join(unescaped(tag.attribute("alt")).split())
            found.append((kind[5:].lower(), "".join(unquote(unescaped(data)).split()), words))
    return found


class HtmlReader:
    """Lays out the words between tags as `lines`, and keeps the outermost tables as grids."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tables: list[Grid] = []
        self.places: list[slice] = []
        """Places of the tables in `lines`."""
        self.unread = 0
        """Characters after those that were read."""
        self._line: list[str] = []
        self._verbatim = False
        self._open: list[_Table] = []
        self._ignored = 0

    def tag(self, tag: Tag) -> None:
        """Process one tag."""
        name, is_end, _ = tag
        if name in ("td", "th"):
            self._start_cell(tag)
        elif name in _BREAKS:
            self._end_line()
            if name == "pre":
                self._verbatim = not is_end
            elif name == "li" and not is_end:
                self._line.append("- ")
        elif name == "table":
            self._end_line()
            self._end_table() if is_end else self._start_table()
        elif name == "tr" or name in _GROUPS:
            self._end_row()
            if self._open and name == "tr" and not is_end:
                self._open[-1].grid.start_row()
            elif self._open and name in _GROUPS:
                self._open[-1].grid.end_group(begins_foot=name == "tfoot" and not is_end)
                self._open[-1].in_head = name == "thead" and not is_end
        elif name == "img" and (words := tag.attribute("alt")):
            self._line.append(f"[{unescaped(words)}]")

    def words(self, text: str) -> None:
        """Add the text between two tags."""
        if self._verbatim:
            *lines, text = unescaped(text).split("\n")
            for line in lines:
                self._line.append(line)
                self._end_line()
            self._line.append(text)
        elif text.isspace():
            if self._line:
                self._line.append(" ")
        elif text:
            self._line.append(unescaped(text))

    def end(self, unread: int) -> None:
        """End the document: all that is still open ends. `unread` characters follow."""
        self._ignored = 0
        while self._open:
            self._end_table()
        self._end_line()
        self._verbatim, self.unread = False, unread

    def _start_table(self) -> None:
        if len(self._open) == MOST_DEPTH:
            self._ignored += 1
        else:
            self._open.append(_Table(Grid(), self.lines))

    def _end_table(self) -> None:
        if self._ignored:
            self._ignored -= 1
        elif self._open:
            self._end_row()
            table = self._open.pop()
            if self._open:
                self._open[-1].is_block = True
            table.grid.end()
            lines = table.grid.lines()
            if not self._open:
                self.tables.append(table.grid)
                self.places.append(slice(len(self.lines), len(self.lines) + len(lines)))
            self.lines += lines

    def _end_row(self) -> None:
        self._end_cell()
        if self._open:
            self._open[-1].grid.end_row(in_head=self._open[-1].in_head)

    def _start_cell(self, tag: Tag) -> None:
        """End the open cell; begin one with a start tag."""
        if not self._open:
            self._line.append(" | " if self._line and not tag.is_end else "")
            return
        self._end_cell()
        if not tag.is_end:
            table = self._open[-1]
            table.cell, table.is_block = tag, False
            self.lines = []

    def _end_cell(self) -> None:
        self._end_line()
        table = self._open[-1] if self._open else None
        if table is not None and table.cell is not None:
            table.grid.add(table.cell, self.lines, is_block=table.is_block and len(self.lines) > 1)
            table.cell, self.lines = None, table.outer

    def _end_line(self) -> None:
        if not self._line:
            return
        line = "".join(self._line)
        self._line.clear()
        if not self._verbatim:
            line = " ".join(line.split())
        elif self._open:
            self._open[-1].is_block = True
        if line.strip():
            self.lines.append(line.rstrip())


@dataclass(slots=True, eq=False)
class _Table:
    """An open table, the lines around it, and its open cell."""

    grid: Grid
    outer: list[str]
    cell: Tag | None = None
    is_block: bool = False
    in_head: bool = False
