"""HTML as readable text, in time linear in its length.

The standard library's HTMLParser is quadratic on tags that do not end (5 s for 32 KiB of `<a `), so
hostile output could hold up the server.
"""

from __future__ import annotations

import re
from html import unescape

_BREAKS = frozenset(
    ("p", "div", "br", "tr", "li", "ul", "ol", "table", "pre", "hr", "section", "article", "h1")
) | frozenset(
    ("h2", "h3", "h4", "h5", "h6", "details", "summary", "figure", "dl", "dt", "dd", "caption")
)
_TAG = re.compile(r"</?([a-zA-Z][a-zA-Z0-9]*)[^<>]*>|<!--|<[!?][^<>]*>")
_UNREAD = {
    name: re.compile(f"</{name}", re.I)
    for name in ("script", "style", "template", "svg", "noscript", "title")
}
_ALT = re.compile(r"\balt\s*=\s*(?:\"([^\"<>]*)\"|'([^'<>]*)')", re.I)


def html_to_text(source: str, limit: int) -> str:
    """The words of an HTML document, a line per block and ` | ` between the cells of a table row.

    Reads at most `limit` characters of the source.
    """
    source = source[:limit]
    reader = _Reader()
    position = 0
    while match := _TAG.search(source, position):
        reader.words(source[position : match.start()])
        tag = match.group()
        name = (match.group(1) or "").lower()
        position = match.end()
        if tag == "<!--":
            position = _after(source, "-->", position)
        elif name in _UNREAD and not tag.startswith("</"):
            end = _UNREAD[name].search(source, position)
            position = _after(source, ">", end.end()) if end else len(source)
        else:
            reader.tag(name, tag)
    reader.words(source[position:])
    return reader.text()


def _after(source: str, end: str, position: int) -> int:
    found = source.find(end, position)
    return len(source) if found < 0 else found + len(end)


class _Reader:
    """Lays out the words between tags."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._line: list[str] = []
        self._verbatim = False

    def tag(self, name: str, tag: str) -> None:
        """Follow one tag, such as `</td>`; `name` is in lower case."""
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
            self._line.append(f"[{unescape(alt.group(1) or alt.group(2) or '')}]")

    def words(self, text: str) -> None:
        """Add what stands between two tags."""
        if self._verbatim:
            *lines, text = unescape(text).split("\n")
            for line in lines:
                self._line.append(line)
                self._end_line()
            self._line.append(text)
        elif text.isspace():
            if self._line:
                self._line.append(" ")
        elif text:
            self._line.append(re.sub(r"\s+", " ", unescape(text)))

    def text(self) -> str:
        """What was read so far."""
        self._end_line()
        return "\n".join(self._lines)

    def _end_line(self) -> None:
        line = "".join(self._line)
        self._line.clear()
        if not self._verbatim:
            line = " ".join(line.split())
        if line.strip():
            self._lines.append(line.rstrip())
