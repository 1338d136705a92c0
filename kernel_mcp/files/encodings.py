"""Guess the encoding of text that is not UTF-8, by its first bytes."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

_BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
ENCODINGS = frozenset(
    {"cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "iso8859-1", "iso8859-2", "iso8859-7"}
    | {"iso8859-9", "iso8859-15", "utf-32"}
    | {"cp437", "cp850", "koi8-r", "shift_jis", "euc_jp", "gbk", "gb18030", "big5", "euc_kr"}
    | {"utf-16", "utf-16-be", "utf-16-le"}
)
"""Names of encodings in which texts are read on request, as `codecs` has them."""
_TEXT_CONTROLS = frozenset(b"\t\n\r\f\b\x1b")
_HIGH = re.compile(rb"[\x80-\xff]+")
_LATIN_RUN = 2
"""Bytes above ASCII in a row, on average, up to which letters of a Latin alphabet have accents."""
_CYRILLIC = frozenset("оеаинтсрвлОЕАИНТСРВЛ")
_GREEK = frozenset("αοιετνσςηυρπκάόίέήύΑΟΙΕΤΝΣΗΥΡΠΚΆΌΊΈΉΎ")
_COMMON = {"cp1251": _CYRILLIC, "koi8-r": _CYRILLIC, "cp1253": _GREEK}
"""Common letters of alphabets: wrong encodings show others as often as these."""
_OF_SCRIPTS = (*_COMMON, "shift_jis", "euc_jp", "euc_kr", "gb18030", "big5")
_MOST = 3
"""Most encodings that are named."""
_MARGIN = 0.25
"""Largest difference in `_surprise` of encodings of which none is certain."""


def is_text(head: bytes) -> bool:
    """Return True if `head` begins a UTF-8 text; an incomplete character at its end is accepted."""
    return b"\0" not in head and _decoded(head, "utf-8") is not None


def foreign_encodings(head: bytes) -> list[str]:
    """Return the likely encodings of text that is not UTF-8, the likeliest first.

    There is none for UTF-8 and for binary data. UTF-8 itself stands for text of which most is
    UTF-8: it was cut within a character, or put together from several encodings.
    """
    for bom, name in _BOMS:
        if head.startswith(bom):
            return [name]
    if wide := _wide(head):
        return [wide]
    if is_text(head) or b"\0" in head or _has_controls(head):
        return []
    text = head.decode("utf-8", "replace")
    lost = text.count("\N{REPLACEMENT CHARACTER}")
    if lost <= sum(each > "\x7f" for each in text) - lost:
        return ["utf-8"]
    runs = _HIGH.findall(head)
    if sum(map(len, runs)) > _LATIN_RUN * len(runs) and (found := _of_scripts(head)):
        return found[:_MOST]
    if turkish := _turkish(head):
        return ["cp1254", "cp1252"] if turkish == 1 else ["cp1254"]
    if _is_central_european(head):
        return ["cp1250"]
    return ["cp1252" if any(0x80 <= byte < 0xA0 for byte in head) else "latin-1"]


def _has_controls(data: bytes) -> bool:
    return any(byte < 32 and byte not in _TEXT_CONTROLS for byte in data)


def _decoded(head: bytes, encoding: str) -> str | None:
    """Return text that may end within a character; None if it is not in this encoding."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return None


def _wide(head: bytes) -> str:
    """Return the UTF-16 without a mark of which every second byte is zero; empty for others."""
    one, two = head[::2], head[1::2]
    for name, high, low in (("utf-16-le", two, one), ("utf-16-be", one, two)):
        if high and not any(high) and 0 not in low and not _has_controls(low):
            return name
    return ""


def _of_scripts(head: bytes) -> list[str]:
    """Return encodings of other scripts in which all characters are usual ones, likeliest first.

    Those that are much less likely than the first are left out.
    """
    found = {}
    for name in _OF_SCRIPTS:
        other = [each for each in _decoded(head, name) or "" if each > "\x7f"]
        if other and all(unicodedata.category(each)[0] in "LNPZ" for each in other):
            found[name] = _surprise(name, other)
    most = min(found.values(), default=0.0) + _MARGIN
    return sorted((name for name in found if found[name] <= most), key=found.__getitem__)


def _surprise(encoding: str, letters: Sequence[str]) -> float:
    """Return a number that is lower for characters that texts in this encoding consist of."""
    if encoding in ("shift_jis", "euc_jp"):
        return 2 - 2 * any("\u3041" <= each <= "\u30ff" for each in letters)  # kana
    if encoding == "euc_kr":
        return 2 - 2 * all("\uac00" <= each <= "\ud7a3" for each in letters)  # Hangul
    if encoding not in _COMMON:
        return 1
    within = sum(one.islower() and two.isupper() for one, two in pairwise(letters))
    rare = sum(each not in _COMMON[encoding] for each in letters)
    return (rare + 3 * within) / len(letters)


_TURKISH = frozenset(b"\xd0\xdd\xde\xf0\xfd\xfe")
"""Letters of cp1254 at bytes of Icelandic letters in cp1252."""
_NOT_TURKISH = frozenset(
    b"\x8a\x8e\x9a\x9e\xc1\xc3\xc6\xc8\xc9\xcd\xd3\xda\xe1\xe3\xe6\xe8\xe9\xed\xf3\xfa"
)
"""Letters that texts in Icelandic, or in cp1250, have besides those, and Turkish ones have not."""


def _turkish(head: bytes) -> int:
    """Return the number of letters that only Turkish texts have; 0 beside others."""
    there = frozenset(head)
    return 0 if there & _NOT_TURKISH else len(there & _TURKISH)


_ONLY_1250 = frozenset(b"\x8d\x8f\x9d")
"""Letters of cp1250 at bytes that cp1252 does not have."""
_SYMBOLS_1252 = frozenset(b"\xa3\xa5\xaa\xaf\xb3\xb9\xba\xbc\xbe\xbf")
"""Letters of cp1250 at bytes of symbols in cp1252, which do not stand beside letters."""
_CARONS = frozenset(b"\x8a\x8e\x9a\x9e")
"""S and Z with caron in both, rare in texts of Western Europe."""
_BESIDE_CARONS = frozenset(b"\xc8\xcf\xd8\xe6\xe8\xec\xef\xf0\xf2\xf8\xf9")
_DOUBLE_ACUTES = frozenset(b"\xd5\xdb\xf5\xfb")
_HUNGARIAN = frozenset(b"\xd6\xdc\xe1\xe9\xed\xf3\xf6\xfa\xfc")


def _is_central_european(head: bytes) -> bool:
    """Return True if text is rather cp1250 than cp1252, by letters that only the former has."""
    there = frozenset(head)
    if there & _ONLY_1250:
        return True
    beside = sum(
        byte in _SYMBOLS_1252 and _is_letter(before) and _is_letter(after)
        for before, byte, after in zip(head, head[1:], head[2:], strict=False)
    )
    fractions = any(
        byte in b"\xbc\xbe" and (_is_letter(before) or _is_letter(after))
        for before, byte, after in zip(head, head[1:], head[2:], strict=False)
    )
    if fractions or beside > 1 or (beside and not there & frozenset(b"\x91\x92\x93\x94")):
        return True
    if there & _CARONS and there & _BESIDE_CARONS:
        return True
    tilde = there & frozenset(b"\xc3\xe3")  # of Portuguese
    return bool(there & _DOUBLE_ACUTES and there & _HUNGARIAN and not tilde and b"\xea" not in head)


def _is_letter(byte: int) -> bool:
    return 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A or byte >= 0xC0
