"""HTML as readable text, in time linear in its length.

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
    ("p", "div", "br", "tr", "li", "ul", "ol", "table", "pre", "hr", "section", "article", "h1")
) | frozenset(
    ("h2", "h3", "h4", "h5", "h6", "details", "summary", "figure", "dl", "dt", "dd", "caption")
)
_TAG = re.compile("<(?:!--|/?(?P<name>[a-zA-Z][a-zA-Z0-9]*)(?:[^<>a-zA-Z0-9][^<>]*)?>|[!?][^<>]*>)")
_COMMENT = "<!--"
_LONG_REFERENCE = re.compile("&#(?:[0-9]{20,}|[xX][0-9a-fA-F]{20,});?")
"""Python refuses to make a number of more than 4,300 digits."""
_UNREAD = {
    name: re.compile(f"</{name}", re.I)  # parts: the names below
    for name in (
        *("script", "style", "template", "svg", "noscript", "title", "audio", "video"),
        "metadata",
    )
}
_ALT = re.compile(r"\balt\s*=\s*(?:\"([^\"<>]*)\"|'([^'<>]*)')", re.I)


def html_to_text(source: str, limit: int) -> str:
    """Return the words of an HTML document: a line per block, ` | ` between cells of a table row.

    Reads at most `limit` characters of the source.
    """
    reader = _HtmlReader()
    for words, name, tag in _pieces(source[:limit]):
        reader.words(words)
        reader.tag(name, tag)
    return reader.text()


def _pieces(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield the words between tags with the name and text of the next tag, empty at the end.

    Comments and elements that are not read are left out with their content.
    """
    position = 0
    for found in _TAG.finditer(source):
        start, after = found.span()
        if start < position:  # inside a comment or an element that is not read
            continue
        words, tag = source[position:start], found[0]
        name = (found["name"] or "").lower()
        position = after
        if tag == _COMMENT:
            position = _after(source, "-->", position)
            name = tag = ""
        elif name in _UNREAD and not tag.startswith("</"):
            end = _UNREAD[name].search(source, position)
            position = _after(source, ">", end.end()) if end else len(source)
            name = tag = ""
        yield words, name, tag
    yield source[position:], "", ""


def unescaped(text: str) -> str:
    """Return text with its character references resolved; one of over 19 digits becomes U+FFFD."""
    if "&" not in text:
        return text
    return html.unescape(_LONG_REFERENCE.sub("\N{REPLACEMENT CHARACTER}", text))


_BARE = frozenset(
    ("table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "p", "br", "hr", "pre")
) | frozenset(("code", "b", "strong", "i", "em", "ul", "ol", "li", "dl", "dt", "dd", "blockquote"))
_SPAN = re.compile(r"\b(colspan|rowspan)\s*=\s*[\"']?([1-9][0-9]{0,3})\b", re.I)


def bare_html(source: str, limit: int) -> str:
    """Return an HTML document reduced to words, tables, lists and emphasis, without active content.

    It is rebuilt from element names, the spans of table cells, and escaped text; all other
    attributes are dropped. Reads at most `limit` characters of the source.
    """
    found: list[str] = []
    for words, name, tag in _pieces(source[:limit]):
        if words:
            found.append(html.escape(unescaped(words)))
        if name in _BARE and tag.startswith("</"):
            found.append(f"</{name}>")
        elif name in _BARE:
            spans = _SPAN.findall(tag) if name in ("td", "th") else ()
            found.append("".join([f"<{name}", *(f' {k.lower()}="{n}"' for k, n in spans), ">"]))
    return "".join(found)


_ADDRESS = re.compile(r"\b(?:src|href)\s*=\s*[\"']?([^\"'<>\s;,]{0,200})", re.I)
MOST_ELEMENTS = 8


def html_outline(source: str, limit: int) -> str:
    """Return one line on an HTML document without words: its first elements with their addresses.

    At most `MOST_ELEMENTS` kinds of them; empty if `limit` characters contain no element.
    """
    found: dict[str, None] = {}
    source, size = source[:limit], len(source)
    for tag_found in _TAG.finditer(source):
        tag, name = tag_found[0], (tag_found["name"] or "").lower()
        if not name or tag.startswith("</"):
            continue
        address = _ADDRESS.search(tag)
        found[f"{name} {address.group(1)}" if address else name] = None
        if len(found) > MOST_ELEMENTS:
            break
    elements = [*found][:MOST_ELEMENTS] + ["…"] * (len(found) > MOST_ELEMENTS)
    told = f"{size:,} character{'' if size == 1 else 's'}"
    return f"[HTML without words, {told}: {', '.join(elements)}]" if found else ""


def _after(source: str, end: str, position: int) -> int:
    found = source.find(end, position)
    return len(source) if found < 0 else found + len(end)


class _HtmlReader:
    """Lays out the words between tags."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._line: list[str] = []
        self._verbatim = False

    def tag(self, name: str, tag: str) -> None:
        """Process one tag, such as `</td>`; `name` is in lower case."""
        if name in _BREAKS:
            self._end_line()
            if name == "pre":
                self._verbatim = not tag.startswith("</")
            elif name == "li" and not tag.startswith("</"):
                self._line.append("- ")
        elif name in ("td", "th") and not tag.startswith("</"):
            if self._line:
                self._line.append(" | ")
        elif name in ("td", "th"):
            self._line.append("")
        elif name == "img" and (alt := _ALT.search(tag)):
            self._line.append(f"[{unescaped(alt.group(1) or alt.group(2) or '')}]")

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
            self._line.append(re.sub(r"\s+", " ", unescaped(text)))

    def text(self) -> str:
        self._end_line()
        return "\n".join(self._lines)

    def _end_line(self) -> None:
        line = "".join(self._line)
        self._line.clear()
        if not self._verbatim:
            line = " ".join(line.split())
        if line.strip():
            self._lines.append(line.rstrip())
