"""Guess the encoding of text that is not UTF-8, by its first bytes."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
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
_HIGH_BYTE = re.compile(rb"[\x80-\xff]")
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


_LANGUAGES = {
    "cp1252": (
        *("äöüß", "àâæçèéêëîïôœùûüÿ", "áéíñóúü", "àáâãçéêíóõôúü", "àèéìíîòóùú", "åäöé"),
        *("æøåéèêóòô", "áðéíóúýþæö", "àçèéíïòóúü·", "äëïéèêöüáó", "äöõüšž"),
    ),
    "cp1250": (
        *("ąćęłńóśźż", "áčďéěíňóřšťúůýž", "áäčďéíĺľňóôŕšťúýž", "áéíóöőúüű", "čćđšž", "ăâîşţ"),
    ),
}
"""Letters beyond ASCII of the languages that are written in an encoding."""
_DOUBLE_ACUTES = frozenset(b"\xd5\xf5")
"""The O of Hungarian, which is that with a tilde of Portuguese in cp1252."""
_PORTUGUESE = frozenset(b"\xc3\xe3\xea\xe7\xe2")
_SYMBOLS = frozenset(
    byte
    for byte in (bytes([each]) for each in range(0x80, 0x100))
    if not byte.decode("cp1252", "replace").isalpha() or byte in (b"\xaa", b"\xba")
)
"""Bytes that are no letters in cp1252."""


def _is_central_european(head: bytes) -> bool:
    """Return True if the letters of text are rather those of a language in cp1250 than cp1252."""
    places = Counter(
        (head[at : at + 1], _is_letter(head[at - 1 : at]), _is_letter(head[at + 1 : at + 2]))
        for at in (each.start() for each in _HIGH_BYTE.finditer(head))
    )
    western, central = (
        max(_likeness(places, encoding, letters) for letters in _LANGUAGES[encoding])
        for encoding in ("cp1252", "cp1250")
    )
    there = frozenset(head)
    hungarian = there & _DOUBLE_ACUTES and not there & _PORTUGUESE
    return central > western or bool(hungarian and central == western > 0)


def _likeness(places: Mapping[tuple[bytes, bool, bool], int], encoding: str, letters: str) -> int:
    """Return the number of letters of a language in text, less those that it does not have.

    `places` counts bytes, by byte and whether a letter comes before, and after. A letter that
    cp1252 has as a symbol may be one, as in m³, unless a letter follows. Such letters count only
    beside others.
    """
    found = perhaps = 0
    for (byte, before, after), count in places.items():
        letter = byte.decode(encoding, "replace")
        is_symbol = byte in _SYMBOLS
        if letter.lower() in letters:
            if is_symbol and not after:
                perhaps += count
            else:
                found += count
        elif letter == "\ufffd" or (before and after if is_symbol else letter.isalpha()):
            found -= 2 * count
    return found + perhaps if found > 0 else found


def _is_letter(byte: bytes) -> bool:
    """Return True for one byte that is a letter of a Latin alphabet."""
    return byte.isalpha() or byte >= b"\xc0"
