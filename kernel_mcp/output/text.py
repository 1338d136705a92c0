r"""Text made safe to show, and cut to a budget.

Characters that could hide or reorder text are written as escapes such as `\u202e`. They are control
characters, lone surrogates, and every character that Unicode lets a display ignore
(Default_Ignorable_Code_Point: bidi controls, zero-width characters, variation selectors, tag
characters, fillers). A display shows none of them, but a model reads them: they can spell whole
sentences.

Such a character stays where it is a visible part of an ordinary emoji or letter:

- a single emoji variation selector (U+FE0F) after an emoji or in a keycap
- a single zero-width joiner (U+200D) between two emoji
- the tags of three flags
- a single U+200C or U+200D that parts or joins letters of Arabic and Indic scripts, as RFC 5892
  allows in A.1 and A.2
- one between the letter ra and a virama, as Bengali needs
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator
from functools import cache, cached_property
from typing import Any
from urllib.parse import quote

from kernel_mcp.config.secrets import LEAST_MASKED
from kernel_mcp.output.encoded import Encoded
from kernel_mcp.records import dataclass


class Pattern:
    """A regular expression compiled on first use: one with ranges of Unicode takes 1.5 ms."""

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self.pattern = pattern
        self._flags = flags

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        """The compiled pattern."""
        return re.compile(self.pattern, self._flags)  # parts: those of each `Pattern(...)`


# Notices of the server, and escapes that keep other text from imitating them.
#
# A notice is a content block of its own that begins with `PREFIX`. If code, a package or a file
# writes that prefix or a look-alike at the start of a line, its bracket is shown as an escape,
# `\x5bkernel-mcp] `. Inside a line it cannot be mistaken for a notice and stays, so that code which
# a model reads is unchanged. Short texts inside notices are escaped everywhere.

PREFIX = "[kernel-mcp] "

_UNSEEN = (
    "\u00ad\u034f\u0300-\u036f\u061c\u115f\u1160\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e01ef"
)
_GAP = rf"[\s{_UNSEEN}]*"
_WORD = _GAP.join(["k", "e", "r", "n", "e", "[l1|]"]) + rf"{_GAP}(?:[-_]{_GAP})?" + _GAP.join("mcp")
_LIKE = Pattern(rf"\[{_GAP}{_WORD}{_GAP}\]", re.IGNORECASE)
_ENDS = "\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029"
_BLANK = rf"(?:[^\S{_ENDS}]|[{_UNSEEN}\u2800\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f])*"
_BEGINS = Pattern(rf"(?:\A|(?<=[{_ENDS}])){_BLANK}(?={_LIKE.pattern})", re.IGNORECASE)
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
"""Characters that look like those of the prefix, but are not folded to them by Unicode."""
_FOLDED = ((0xFF01, 0xFF5F), (0x1D400, 0x1D800), (0x2100, 0x2150), (0x2460, 0x2500))
"""Ranges of characters whose compatibility form is one ASCII character."""


def escaped(text: str) -> str:
    """Return untrusted `text` with everything escaped that looks like the prefix of a notice."""
    return _without(text, lambda folded: (each.start() for each in _LIKE.compiled.finditer(folded)))


def escaped_lines(text: str) -> str:
    """Return untrusted `text` with what looks like that prefix escaped at the start of lines.

    Blanks and invisible characters may precede it.
    """
    return _without(text, lambda folded: (each.end() for each in _BEGINS.compiled.finditer(folded)))


def _without(text: str, brackets: Callable[[str], Iterable[int]]) -> str:
    """Return `text` with each bracket escaped that is found in its folded form."""
    folded = text if text.isascii() else text.translate(_fold())
    if "[" not in folded or _LIKE.compiled.search(folded) is None:
        return text
    parts: list[str] = []
    done = 0
    for start in brackets(folded):
        parts += [text[done:start], _escaped_prefix(text[start])]
        done = start + 1
    return "".join([*parts, text[done:]]) if parts else text


def notice(text: str) -> str:
    """Return `text` as a notice of the server; look-alikes of the prefix in it are escaped."""
    return PREFIX + escaped(text)


def _escaped_prefix(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 0x100 else f"\\u{ord(char):04x}"


@cache
def _fold() -> dict[int, str]:
    """Return a table from look-alikes to ASCII, one character each, so that positions hold."""
    table = {ord(char): plain for plain, chars in _TWINS.items() for char in chars}
    for first, last in _FOLDED:
        for code in range(first, last):
            plain = unicodedata.normalize("NFKC", chr(code))
            if len(plain) == 1 and plain.isascii():
                table.setdefault(code, plain)
    return table


MOST_UNSEEN = 4096
"""Characters that may hide in a value that is split over pieces of a text."""
_UNSHOWN = re.compile(r"\x1b\[[0-?]*[ -/]*(?:[@-~]|\Z)|[\x00-\x07\x0e-\x1f\x7f-\x9f]+")
"""Colours, movements and control characters, also where a text ends in the midst of one."""


class Masks:
    """Replaces secret values in text by their names, in all forms in which output may write them.

    The forms are: verbatim, escaped as by `repr`, in JSON, HTML and URLs, and those that `Encoded`
    finds. Characters that terminals do not show may stand within each. The beginning of a value
    that is cut off by `…` is masked, too.
    """

    def __init__(self, values: Iterable[tuple[str, str]] = ()) -> None:
        """`values` are pairs of name and value; those below `LEAST_MASKED` characters are shown."""
        found: dict[str, str] = {}
        given = [(value.strip(), f"[{name} masked]") for name, value in values]
        for value, word in given:
            for form in _forms(value):
                found.setdefault(form, word)
        self._encoded = Encoded(given, LEAST_MASKED)
        found |= {word: word for word in found.values()}  # masks are never masked themselves
        self._words = sorted(found.items(), key=lambda pair: -len(pair[0]))

    def __bool__(self) -> bool:
        return bool(self._words)

    def masked(self, text: str) -> str:
        """Return `text` with the values masked; of overlapping ones the first. `PREFIX` is kept."""
        if not self._words:
            return text
        if text.startswith(PREFIX):
            return PREFIX + self.masked(text[len(PREFIX) :])
        text = self._encoded.masked(text)
        shown, at = _shown(text)
        parts: list[str] = []
        done = 0
        for start, end, word in self._matches(shown):
            parts += [text[done : at(start)], word]
            done = at(end - 1) + 1
        return self._without_beginnings("".join([*parts, text[done:]]) if parts else text)

    def anywhere(self, value: Any, but: Container[str] = (), *, keys: bool = False) -> Any:
        """Return a JSON value with all its strings masked.

        What lies below the keys in `but` stays as it is. With `keys`, keys are masked too.
        """
        if isinstance(value, str):
            return self.masked(value)
        if isinstance(value, (list, tuple)):
            return [self.anywhere(each, but, keys=keys) for each in value]
        if isinstance(value, dict):
            return {
                self.masked(key) if keys else key: each
                if key in but
                else self.anywhere(each, but, keys=keys)
                for key, each in value.items()
            }
        return value

    def split_masked(self, text: str) -> tuple[str, str]:
        """Return the masked text, and the unmasked rest that may be the beginning of a value.

        The rest is shorter than the longest form and `MOST_UNSEEN` characters, whatever the text.
        """
        text = self._encoded.masked(text)
        whole = self._encoded.beginning(text)
        shown, kept = self._split_masked(text[:whole])
        return shown, kept + text[whole:]

    def _split_masked(self, text: str) -> tuple[str, str]:
        shown, at = _shown(text)
        parts: list[str] = []
        done, waits = 0, self._beginning(shown, 0)
        for start, end, word in self._matches(shown):
            if waits <= start:
                break
            parts += [text[done : at(start)], word]
            done = at(end - 1) + 1
            if waits < end:
                waits = self._beginning(shown, end)
        kept = text[at(waits) :] if waits < len(shown) else ""
        if len(kept) > MOST_UNSEEN + len(shown) - waits:
            kept = ""
        parts.append(text[done : len(text) - len(kept)])
        return self._without_beginnings("".join(parts)), kept

    def pieces(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield a text that arrives in pieces, with values masked also where they span pieces."""
        kept = ""
        for piece in pieces:
            shown, kept = self.split_masked(kept + piece)
            yield shown
        yield self.masked(kept)

    def _matches(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield start, end and mask of each value in order, at one position the longest."""
        places = [(text.find(form), form, word) for form, word in self._words]
        places = [each for each in places if each[0] >= 0]
        while places:
            start, form, word = min(places, key=lambda place: (place[0], -len(place[1])))
            end = start + len(form)
            yield start, end, word
            places = [
                (there, form, word)
                for at, form, word in places
                if (there := at if at >= end else text.find(form, end)) >= 0
            ]

    def _beginning(self, text: str, first: int) -> int:
        """Return the start, from `first` on, of a value that the end of the text cuts off.

        The length of the text if there is none.
        """
        found = len(text)
        for form, word in self._words:
            start = max(first, len(text) - len(form) + 1) if form != word else found
            while 0 <= (start := text.find(form[0], start, found)) < found:
                # long values may begin at every position: comparing a few characters is cheap
                few = text[start : start + LEAST_MASKED]
                if form.startswith(few) and form.startswith(text[start:]):
                    found = start
                start += 1
        return found

    def _without_beginnings(self, text: str) -> str:
        """Mask beginnings of values, of `LEAST_MASKED` characters or more, that `…` cuts off."""
        if "…" not in text:
            return text
        for form, word in self._words:
            start, few = 0, form[:LEAST_MASKED]
            parts: list[str] = []
            done = 0
            while (start := text.find(few, start)) >= 0:
                cut_at = text.find("…", start, start + len(form))
                if cut_at >= start + LEAST_MASKED and form.startswith(text[start:cut_at]):
                    parts += [text[done:start], word]
                    done = cut_at
                start += 1
            text = "".join([*parts, text[done:]]) if parts else text
        return text


def _shown(text: str) -> tuple[str, Callable[[int], int]]:
    """Return the text without what terminals do not show, and a map of its positions to `text`."""
    gaps = [match.span() for match in _UNSHOWN.finditer(text)]
    if not gaps:
        return text, int
    places, lengths = [0], [0]  # positions of the gaps, and the length of all gaps up to each
    for start, end in gaps:
        places.append(start - lengths[-1])
        lengths.append(lengths[-1] + end - start)
    return _UNSHOWN.sub("", text), lambda place: place + lengths[bisect_right(places, place) - 1]


def _forms(value: str) -> set[str]:
    """Return the forms in which output may write a value, without those too short to search for."""
    forms = {
        value,
        value.replace("\r\n", "\n"),
        _UNSHOWN.sub("", value),
        repr(value)[1:-1],
        repr(value.encode("utf-8", "surrogateescape"))[2:-1],
        *(json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)),
        *(html.escape(value, quote=quotes) for quotes in (True, False)),
        *(quote(value, safe=safe, errors="replace") for safe in ("", "/")),
    }
    return {form for form in forms if min(len(value), len(form)) >= LEAST_MASKED}


_SURROGATES = "\ud800-\udfff"
_BASIC = (
    "\x80-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
)
_BEYOND = "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
"""Hidden characters up to U+FFFF, and those above; a search for the former alone is fast.

Source: Default_Ignorable_Code_Point of Unicode 16 (DerivedCoreProperties.txt), with control
characters, separators of lines and paragraphs, interlinear annotations and the format controls of
hieroglyphs.
"""
_EMOJI = (
    "\xa9\xae\u203c\u2049\u2122\u2139\u2190-\u21ff\u2300-\u23ff\u24c2\u25aa-\u27bf\u2900-\u297f"
    "\u2b00-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff"
)
_FLAGS = tuple(
    "\U0001f3f4" + "".join(chr(0xE0000 + ord(char)) for char in f"gb{part}\x7f")
    for part in ("eng", "sct", "wls")
)
"""Flags of England, Scotland and Wales, the only ones made of tags (RGI_Emoji_Tag_Sequence)."""
_JOINING = (
    "\u0626\u0628\u062a-\u062e\u0633-\u063f\u0641-\u0647\u0649\u064a\u066e\u066f\u0678-\u0687"
    "\u069a-\u06bf\u06c1\u06c2\u06cc\u06ce\u06d0\u06d1\u06fa-\u06fc\u06ff"
)
"""Arabic letters that join the next one unless something parts them (Joining_Type=Dual_Joining)."""
_VIRAMAS = "\u094d\u09cd\u0a4d\u0acd\u0b4d\u0bcd\u0c4d\u0ccd\u0d4d\u0dca"
_ORDINARY = (
    f"(?<![{_EMOJI}]\ufe0f)"
    r"(?!(?<=[0-9#*]" + "\ufe0f)\u20e3)"
    f"(?!(?:(?<=[{_EMOJI}]\u200d)|(?<=[{_EMOJI}]\ufe0f\u200d))[{_EMOJI}])"
    f"(?!(?<=[{_JOINING}]\u200c)[\u0620-\u06ff])"
    f"(?<![{_VIRAMAS}][\u200c\u200d])"
    "(?!(?<=[\u09b0\u0cb0]\u200d)[\u09cd\u0ccd])"
    + "".join(
        f"(?!(?<={flag[:end]}){flag[end:]})" for flag in _FLAGS for end in range(2, len(flag) + 1)
    )
)
"""Lookarounds after a hidden character: they exclude those of ordinary emoji and letters."""
_SPECIAL = rf"[\x00-\x08\x0b-\x1f\x7f{_SURROGATES}{_BASIC}"
_UNSAFE = Pattern(rf"{_SPECIAL}{_BEYOND}](?!(?<=\r)\n){_ORDINARY}")
_HIDDEN = Pattern(f"[{_SURROGATES}{_BASIC}{_BEYOND}]{_ORDINARY}")
_UNSAFE_BASIC = Pattern(f"{_SPECIAL}]{_ORDINARY}")
_UNSAFE_BEYOND = Pattern(f"[{_BEYOND}]{_ORDINARY}")
_ANY_BEYOND = re.compile("[\U00010000-\U0010ffff]")
_HIDDEN_UTF8 = re.compile(
    rb"(?:\xc2\xad|\xcd\x8f|\xd8\x9c|\xe1(?:\x85[\x9f\xa0]|\x9e[\xb4\xb5]|\xa0[\x8b-\x8f])"
    rb"|\xe2(?:\x80[\x8b-\x8f\xa8-\xae]|\x81[\xa0-\xaf])|\xe3\x85\xa4"
    rb"|\xef(?:\xb8[\x80-\x8f]|\xbb\xbf|\xbe\xa0|\xbf[\xb0-\xbb])"
    rb"|\xf0(?:\x93\x90[\xb0-\xbf]|\x9b\xb2[\xa0-\xa3]|\x9d\x85[\xb3-\xba])"
    rb"|\xf3\xa0[\x80-\xbf][\x80-\xbf])+"
)
"""Runs of hidden characters in UTF-8."""
_C1_UTF8 = re.compile(rb"\xc2[\x80-\x9f]")
_ASCII_SPECIAL = bytes((*range(9), *range(11, 32), 127))
_LATIN_SPECIAL = bytes((*_ASCII_SPECIAL, *range(128, 160), 0xAD))


def is_plain(text: str) -> bool:
    """Return True if `text` has nothing to escape. Only LF is accepted as the end of a line."""
    try:
        raw = text.encode("latin-1")
    except UnicodeEncodeError:
        return _is_plain_unicode(text)
    return len(raw.translate(None, _LATIN_SPECIAL)) == len(raw)


def _is_plain_unicode(text: str) -> bool:
    if _UNSAFE_BASIC.compiled.search(text):
        return False
    first = _ANY_BEYOND.search(text)
    return first is None or not _UNSAFE_BEYOND.compiled.search(text, first.start())


def visible(text: str) -> str:
    """Return `text` with characters that hide or reorder it as escapes; CR LF may end lines."""
    return text if is_plain(text) else _UNSAFE.compiled.sub(_escaped, text)


def revealed(text: str) -> str:
    """Return `text` as `visible` does, but with control characters kept for a terminal."""
    return text if text.isascii() else _HIDDEN.compiled.sub(_escaped, text)


def stripped(text: str) -> str:
    """Return `text` made safe at the least cost, without parsing escape codes.

    Control characters are dropped, and a run of hidden characters becomes one question mark. For
    hostile amounts of them, for which `visible` and a terminal would take seconds.
    """
    if is_plain(text):
        return text
    raw = text.encode("utf-8", "backslashreplace").translate(None, _ASCII_SPECIAL)
    if not raw.isascii():
        raw = _HIDDEN_UTF8.sub(b"?", _C1_UTF8.sub(b"", raw))
    return raw.decode("utf-8", "replace")


def one_line(text: str, limit: int = 200) -> str:
    """Return `text` on one line, every control character escaped, at most `limit` characters."""
    text = visible(text[: limit + 1])
    text = "".join(c if c.isprintable() else _escape_of(c) for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _escape_of(char: str) -> str:
    code = ord(char)
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\u{code:04x}" if code > 0xFF else f"\\x{code:02x}"


class _Escapes(dict[str, str]):
    """Cache of escapes by character, filled on first use."""

    def __missing__(self, char: str) -> str:
        self[char] = _escape_of(char)
        return self[char]


_ESCAPES = _Escapes()


def _escaped(match: re.Match[str]) -> str:
    return _ESCAPES[match.group()]


@dataclass(frozen=True, slots=True)
class Truncation:
    """The two ends of a text and how many characters lie between them."""

    head: str
    tail: str
    omitted: int

    def joined(self, note: str = "") -> str:
        """Return the ends with a line between that says how much is missing; `note` adds to it."""
        if not self.omitted:
            return self.head + self.tail
        before = "" if not self.head or self.head.endswith("\n") else "\n"
        return f"{self.head}{before}{omission(self.omitted, note)}\n{self.tail}"


def omission(characters: int, note: str = "") -> str:
    """Return the line that stands for text left out."""
    plural = "" if characters == 1 else "s"
    return f"[… {characters:,} character{plural} left out{'; ' + note if note else ''} …]"


def weight(text: str) -> int:
    """Return the number of characters of a text, of which those outside ASCII count double.

    Limits of answers count so: such a character is about one token of a model, and three to four
    ASCII characters are one.
    """
    if text.isascii():
        return len(text)
    return 2 * len(text) - len(text.encode("ascii", "ignore"))


def within(text: str, most: int) -> int:
    """Return how many characters of the start have a `weight` of at most `most`."""
    if text[:most].isascii():
        return min(len(text), max(0, most))
    return bisect_right(range(min(len(text), most)), most, key=lambda end: weight(text[: end + 1]))


def cut(text: str, head: int, tail: int) -> Truncation:
    """Keep at most `head` characters of the start and `tail` of the end, at line ends if near."""
    if len(text) <= head + tail:
        return Truncation(text, "", 0)
    first, last = head_of(text, head), tail_of(text, tail)
    return Truncation(first, last, len(text) - len(first) - len(last))


def head_of(text: str, limit: int) -> str:
    """Return at most `limit` characters of the start; whole lines if that keeps half of them."""
    if len(text) <= limit:
        return text
    end = text.rfind("\n", 0, max(0, limit)) + 1
    return text[:end] if end > limit // 2 else text[: max(0, limit)]


def tail_of(text: str, limit: int) -> str:
    """Return at most `limit` characters of the end; whole lines if that keeps half of them."""
    if len(text) <= limit:
        return text
    start = len(text) - max(0, limit)
    line = text.find("\n", max(0, start - 1)) + 1
    return text[line:] if 0 < line <= start + limit // 2 else text[start:]
