"""Tags and attributes of HTML, read in one pass from left to right.

As in browsers, a tag ends at the first `>` outside of a quoted attribute value. One that does not
end reaches to the end of the document.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import NamedTuple

from kernel_mcp.units import KIB

LONG_CHARS = KIB
"""Characters of an attribute value from which on it is skipped at once, and counts as nothing."""

_OPEN = re.compile(r"<(?:(/?)([a-zA-Z][^\s/>]*)(>)?|[!?])")
_ATTRIBUTE = re.compile(r"[\s/]*([^\s/>][^\s/>=]*)(\s*=\s*)?")
_VALUE = re.compile(r"[^\s>]*")
_LONG_REFERENCE = re.compile("&#(?:[0-9]{20,}|[xX][0-9a-fA-F]{20,});?")
"""Python refuses to make a number of more than 4,300 digits."""
RAW = frozenset(("script", "style"))
"""Elements whose content is no HTML."""
UNREAD = RAW | {"template", "svg", "noscript", "title", "audio", "video", "metadata"}
"""Elements whose content is not for readers."""
_FOREIGN = frozenset(("svg", "metadata"))
"""Elements of SVG among them: these can be empty, as in `<svg/>`."""
_ENDS = {name: re.compile(f"</{name}", re.I) for name in UNREAD}  # parts: the names above


class Tag(NamedTuple):
    """A tag; `name` is in lower case. The last one has none, and the text that was not read."""

    name: str
    is_end: bool
    text: str

    def attribute(self, name: str) -> str:
        """Return the value of an attribute, character references unresolved; empty without one."""
        if name not in self.text.lower():
            return ""
        return next((value for found, value, _ in _attributes(self.text, 0) if found == name), "")


_NONE = Tag("", False, "")


def tags(source: str, limit: int, unread: frozenset[str] = UNREAD) -> Iterator[tuple[str, Tag]]:
    """Yield the text before each tag with the tag, which has no name at comments and at the end.

    The content of elements in `unread` is skipped. Reads `limit` characters, besides long values of
    attributes.
    """
    start = at = 0
    while (found := _OPEN.search(source, at)) and (opened := found.start()) < limit:
        at = found.end()
        slash, name, end = found.groups()
        if name is None:
            is_comment = source.startswith("<!--", opened)
            at = _after(source, "-->", opened + 4) if is_comment else _after(source, ">", at)
            yield source[start:opened], _NONE
        else:
            name, text = name.lower(), ""
            if not end:
                place = at
                at, skipped = _end(source, place, limit)
                limit += skipped
                text = source[place : at - 1]
            yield source[start:opened], Tag(name, slash == "/", text)
            is_empty = name in _FOREIGN and text.endswith("/")
            if name in unread and not slash and not is_empty:
                ended = _ENDS[name].search(source, at)
                at = ended.start() if ended else len(source)
        start = at
    yield source[start:limit], Tag("", True, source[max(start, limit) :])


def unescaped(text: str) -> str:
    """Return text with its character references resolved; one of over 19 digits becomes U+FFFD."""
    if "&" not in text:
        return text
    return html.unescape(_LONG_REFERENCE.sub("\N{REPLACEMENT CHARACTER}", text))


def _end(source: str, at: int, limit: int) -> tuple[int, int]:
    """Return where a tag ends whose name ends at `at`, and how many characters were skipped."""
    near = source.find(">", at, at + LONG_CHARS) + 1
    double, single = source.count('"', at, near), source.count("'", at, near)
    if near and double % 2 == single % 2 == double * single == 0:
        return near, 0
    skipped = 0
    for _, value, after in _attributes(source, at):
        at = after
        skipped += len(value) if len(value) >= LONG_CHARS else 0
        if at >= limit + skipped:
            break
    return _after(source, ">", at), skipped


def _attributes(source: str, at: int) -> Iterator[tuple[str, str, int]]:
    """Yield name and value of each attribute from `at` on, and where it ends."""
    while named := _ATTRIBUTE.match(source, at):
        first = last = at = named.end()
        if named[2]:
            quote = source[first : first + 1]
            if quote == '"' or quote == "'":
                first += 1
                last = source.find(quote, first)
                last = len(source) if last < 0 else last
                at = last + 1
            elif value := _VALUE.match(source, first):
                last = at = value.end()
        yield named[1].lower(), source[first:last], at


def _after(source: str, end: str, position: int) -> int:
    found = source.find(end, position)
    return len(source) if found < 0 else found + len(end)
