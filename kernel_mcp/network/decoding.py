"""Normalization of escapes in HTML, JavaScript, URLs and mail, for the search of responses.

Values and responses are normalized alike. Then it does not matter which characters a host escapes,
how, how often, and where it breaks lines. Each step takes linear time.
"""

from __future__ import annotations

import re
from functools import lru_cache
from html.entities import html5

ROUNDS = 4
"""Number of times that escapes are decoded. A value escaped more often is not found."""
_CHARS = {
    b"&" + name.encode(): text.encode()
    for name, text in html5.items()
    if name.endswith(";") and len(text) == 1 and text.isascii()
}
"""Named entities of ASCII characters."""
_LETTERS = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
_ESCAPE = re.compile(
    rb"&(?:#[xX]?[0-9a-fA-F]{1,10};?|[A-Za-z]{2,12};)"
    rb"|\\(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|u\{[0-9a-fA-F]{1,8}\}|x[0-9a-fA-F]{2})"
    rb"|\\(?:[0-3][0-7]{2}|[^ux])"
    rb"|%(?:u[0-9a-fA-F]{4}|[0-9a-fA-F]{2})",
    re.DOTALL,
)
_MAIL = re.compile(rb"=([0-9a-fA-F]{2})")
_BLANKS = b" \t\r\n\v\f"


class EscapeDecoder:
    """Decoder of texts, with a cache of common escapes."""

    def __init__(self) -> None:
        self._char = lru_cache(maxsize=4096)(_char)

    def decoded(self, text: bytes, *, mail: bool = False) -> bytes:
        """Return a text without escapes and blanks; with `mail` also without quoted-printable."""
        if mail and b"=" in text:
            text = text.replace(b"=\r\n", b"").replace(b"=\n", b"")
            text = _MAIL.sub(lambda found: bytes([int(found[1], 16)]), text)
        for _ in range(ROUNDS):
            if not (b"&" in text or b"\\" in text or b"%" in text):
                break
            paired = text.replace(b"\\\\", b"\\")
            plain = _ESCAPE.sub(lambda found: self._char(found[0]), paired)
            if plain == text:
                break
            text = plain
        return text.translate(None, _BLANKS)


def _char(escape: bytes) -> bytes:
    """Return the ASCII character of an escape; other escapes are returned unchanged."""
    kind, rest = escape[:1], escape[1:]
    if kind == b"&" and rest[:1] != b"#":
        return _CHARS.get(escape, escape)
    digits, base = rest, 16
    if kind == b"&":
        digits = rest.strip(b"#;")
        base = 16 if digits[:1] in (b"x", b"X") else 10
        digits = digits.lstrip(b"xX")
    elif kind == b"%" or rest[:1] in (b"u", b"x", b"U"):
        digits = rest.strip(b"uUx{}")
    elif len(rest) == 3:
        base = 8
    else:
        return _LETTERS.get(rest, rest)
    try:
        number = int(digits, base)
    except ValueError:  # hexadecimal digits without an x
        return escape
    return bytes([number]) if number < 0x80 else escape
