r"""Text made safe to show, and cut to a budget.

Characters that could hide or reorder text (bidi controls, tag characters) and lone surrogates are
written as escapes such as `\u202e`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_HIDDEN = f"{_BIDI}\ud800-\udfff\U000e0000-\U000e007f"
_UNSAFE = re.compile(f"[{_HIDDEN}]")
_SPECIAL = re.compile(f"[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f{_HIDDEN}]")
_BIDI_CHARS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_C1_BYTES = re.compile(rb"\xc2[\x80-\x9f]")
_ASCII_SPECIAL = bytes((*range(9), *range(11, 32), 127))


def is_plain(text: str) -> bool:
    """Whether `text` can be shown as it is."""
    if text.isascii():
        raw = text.encode("ascii")
        return len(raw.translate(None, _ASCII_SPECIAL)) == len(raw)
    return _SPECIAL.search(text) is None


def visible(text: str) -> str:
    """`text` with bidi controls, tag characters and lone surrogates written as escapes."""
    if text.isascii():
        return text
    return _UNSAFE.sub(_escaped, text)


def stripped(text: str) -> str:
    """`text` made safe at the least cost: control characters dropped, escape codes not understood.

    For hostile amounts of them, where `visible` and a terminal would take seconds.
    """
    raw = text.encode("utf-8", "backslashreplace").translate(None, _ASCII_SPECIAL)
    for char in _BIDI_CHARS:
        raw = raw.replace(char.encode("utf-8"), _escape_of(char).encode("ascii"))
    for start in (b"\xf3\xa0\x80", b"\xf3\xa0\x81"):  # tag characters; their last byte stays
        raw = raw.replace(start, b"?")
    if b"\xc2" in raw:
        raw = _C1_BYTES.sub(b"", raw)
    return raw.decode("utf-8", "replace")


def one_line(text: str, limit: int = 200) -> str:
    """`text` on one line, every control character escaped, at most `limit` characters."""
    text = visible(text[: limit + 1])
    text = "".join(c if c.isprintable() else _escape_of(c) for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _escape_of(char: str) -> str:
    code = ord(char)
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\u{code:04x}" if code > 0xFF else f"\\x{code:02x}"


_ESCAPE_OF = {
    char: _escape_of(char)
    for char in map(chr, (*range(0x600, 0x2100), *range(0xD800, 0xE000), *range(0xE0000, 0xE0080)))
    if _UNSAFE.match(char)
}


def _escaped(match: re.Match[str]) -> str:
    return _ESCAPE_OF[match.group()]


@dataclass(frozen=True, slots=True)
class Cut:
    """The two ends of a text and how many characters lie between them."""

    head: str
    tail: str
    omitted: int

    def joined(self, note: str = "") -> str:
        """The ends with a line between that says how much is missing; `note` adds to it."""
        if not self.omitted:
            return self.head + self.tail
        before = "" if not self.head or self.head.endswith("\n") else "\n"
        return f"{self.head}{before}{omission(self.omitted, note)}\n{self.tail}"


def omission(characters: int, note: str = "") -> str:
    """The line that stands for text left out."""
    plural = "" if characters == 1 else "s"
    return f"[… {characters:,} character{plural} left out{'; ' + note if note else ''} …]"


def cut(text: str, head: int, tail: int) -> Cut:
    """Keep at most `head` characters of the start and `tail` of the end, at line ends if near."""
    if len(text) <= head + tail:
        return Cut(text, "", 0)
    first, last = head_of(text, head), tail_of(text, tail)
    return Cut(first, last, len(text) - len(first) - len(last))


def head_of(text: str, limit: int) -> str:
    """At most `limit` characters of the start; whole lines when that keeps half of them."""
    if len(text) <= limit:
        return text
    end = text.rfind("\n", 0, max(0, limit)) + 1
    return text[:end] if end > limit // 2 else text[: max(0, limit)]


def tail_of(text: str, limit: int) -> str:
    """At most `limit` characters of the end; whole lines when that keeps half of them."""
    if len(text) <= limit:
        return text
    start = len(text) - max(0, limit)
    line = text.find("\n", max(0, start - 1)) + 1
    return text[line:] if 0 < line <= start + limit // 2 else text[start:]
