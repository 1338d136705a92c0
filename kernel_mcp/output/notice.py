r"""The words of the server itself, and what keeps others from speaking in its name.

A notice is a content block of its own that begins with `PREFIX`. Where code, a package or a file
puts that prefix, or what looks like it, at the start of a line, its bracket is shown as an escape,
`\x5bkernel-mcp] `. Behind other text it passes for nothing, and code that is read stays as it is.
Short texts that end up among the server's own words are guarded everywhere.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache

PREFIX = "[kernel-mcp] "

_UNSEEN = (
    "\u00ad\u034f\u0300-\u036f\u061c\u115f\u1160\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e01ef"
)
_GAP = rf"[\s{_UNSEEN}]*"
_WORD = _GAP.join(["k", "e", "r", "n", "e", "[l1|]"]) + rf"{_GAP}[-_ ]?{_GAP}" + _GAP.join("mcp")
_LIKE = re.compile(rf"\[{_GAP}{_WORD}{_GAP}\]", re.IGNORECASE)
_ENDS = "\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029"
_BLANK = rf"(?:[^\S{_ENDS}]|[{_UNSEEN}\u2800\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f])*"
_BEGINS = re.compile(rf"(?:\A|(?<=[{_ENDS}])){_BLANK}(?={_LIKE.pattern})", re.IGNORECASE)
_TWINS = {
    "-": "\u00ac\u00af\u02d7\u058a\u06d4\u1428\u1806\u2010\u2011\u2012\u2013\u2014\u2015\u2043"
    "\u207b\u2212\u2e3a\u2e3b\u30fc\u4e00\ufe58\ufe63",
    "[": "\u2045\u27e6\u2983\u298b\u298d\u298f\u3010\u3014\u3016\u3018\u301a\ufe5d",
    "]": "\u2046\u27e7\u2984\u298c\u298e\u2990\u3011\u3015\u3017\u3019\u301b\ufe5e",
    "c": "\u0441\u03f2\u1d04\u0421\u03f9",
    "e": "\u0435\u0415\u0395\u212e\u04bd",
    "k": "\u043a\u03ba\u041a\u039a\u1d0b",
    "l": "\u04cf\u0406\u04c0\u0399\u0131\u01c0",
    "m": "\u043c\u041c\u039c\u1d0d",
    "n": "\u0578\u057c\u0274\u039d",
    "p": "\u0440\u03c1\u0420\u03a1\u1d18",
    "r": "\u0433\u0280\u1d26",
}
"""Characters that look like those of the prefix; a fold of Unicode's does not know them."""
_FOLDED = ((0xFF01, 0xFF5F), (0x1D400, 0x1D800), (0x2100, 0x2150), (0x2460, 0x2500))
"""Where characters lie whose compatibility form is one ASCII character."""


def guarded(text: str) -> str:
    """`text` of others, with everything escaped that could pass for the prefix of a notice."""
    return _without(text, lambda folded: (each.start() for each in _LIKE.finditer(folded)))


def guarded_lines(text: str) -> str:
    """`text` of others, with what could pass for that prefix escaped where a line begins with it.

    Blanks and what is not seen may stand before it.
    """
    return _without(text, lambda folded: (each.end() for each in _BEGINS.finditer(folded)))


def _without(text: str, brackets: Callable[[str], Iterable[int]]) -> str:
    """`text` with an escape for each of the brackets that are found in its folded form."""
    folded = text if text.isascii() else text.translate(_fold())
    if "[" not in folded or _LIKE.search(folded) is None:
        return text
    parts: list[str] = []
    done = 0
    for start in brackets(folded):
        parts += [text[done:start], _escaped(text[start])]
        done = start + 1
    return "".join([*parts, text[done:]]) if parts else text


def notice(text: str) -> str:
    """What the server says, as the text of a block of its own; `text` may quote others."""
    return PREFIX + guarded(text)


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 0x100 else f"\\u{ord(char):04x}"


@cache
def _fold() -> dict[int, str]:
    """From look-alikes to what they look like, one character each, so that positions hold."""
    table = {ord(char): plain for plain, chars in _TWINS.items() for char in chars}
    for first, last in _FOLDED:
        for code in range(first, last):
            plain = unicodedata.normalize("NFKC", chr(code))
            if len(plain) == 1 and plain.isascii():
                table.setdefault(code, plain)
    return table
