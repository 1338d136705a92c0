"""Find secret values in text that contains them with escapes or in base64.

A text is first decoded as a whole. Only if a value is found, positions are mapped back to it.
"""

from __future__ import annotations

import base64
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from html.entities import html5

ROUNDS = 4
"""Number of times that escapes are decoded. A value escaped more often is not found."""
_LONGEST = 12
"""Characters that an escaped form may use for one character of its value."""
_MOST_WAITING = 4096
"""Characters of a stream that may be held back until more arrives."""
_FEW = 4
"""Characters of a form from which text is held back: fewer occur in every text."""
_NAMED = {
    f"&{name}": text
    for name, text in html5.items()
    if name.endswith(";") and len(text) == 1 and text.isascii()
}
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
_ESCAPE = re.compile(
    r"&(?:#[xX]?[0-9a-fA-F]{1,10};?|[A-Za-z]{2,12};)"
    r"|\\(?:u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,8}\}|x[0-9a-fA-F]{2}|[0-3][0-7]{2}|[^ux\n])"
    r"|%(?:u[0-9a-fA-F]{4}|[0-9a-fA-F]{2})"
)
_MAIL = re.compile(r"=(?:[0-9a-fA-F]{2}|\r?\n)")
_LINE = re.compile(r"\r?\n[ \t]*")
_STEPS = (_ESCAPE,) * ROUNDS + (_LINE,)
_MARKS = {_ESCAPE: "&\\%", _MAIL: "=", _LINE: "\n"}


class Encoded:
    """Finds values behind escapes of HTML, JavaScript, URLs and mail, and in base64 with lines."""

    def __init__(self, values: Iterable[tuple[str, str]], least: int) -> None:
        """`values` are pairs of a value and its replacement; shorter ones than `least` are ignored.

        Unescaped occurrences are left to the caller, who searches for them verbatim.
        """
        given = [(value, word) for value, word in values if len(value) >= least]
        self._bare = {_plain(value, _STEPS) for value, _ in given}
        self._words = [
            (form, word)
            for value, word in given
            for form in sorted({_plain(value, _STEPS), *_in_base64(value)})
            if len(form) >= least
        ]
        longest = max((len(form) for form, _ in self._words), default=0)
        self._most = min(_LONGEST * longest, _MOST_WAITING)

    def masked(self, text: str) -> str:
        """Return the text with escaped values replaced."""
        text = self._without(text, _STEPS)
        return self._without(text, (_MAIL, *_STEPS)) if "=" in text else text

    def beginning(self, text: str) -> int:
        """Return the start of a value that the end of the text may cut off; the length if none."""
        start = max(0, len(text) - self._most)
        found = len(text)
        for steps in (_STEPS, (_MAIL, *_STEPS)):
            plain, places = _decoded(text[start:], steps)
            for form, _ in self._words:
                few = form[:_FEW]
                at = plain.find(few, max(0, len(plain) - len(form) + 1))
                while at >= 0 and not form.startswith(plain[at:]):
                    at = plain.find(few, at + 1)
                if at >= 0:
                    found = min(found, start + _source(places, at))
        return found

    def _without(self, text: str, steps: tuple[re.Pattern[str], ...]) -> str:
        plain = _plain(text, steps)
        if not any(form in plain for form, _ in self._words):
            return text
        _, places = _decoded(text, steps)
        parts: list[str] = []
        done = 0
        for start, end, word in self._found(plain):
            first, last = _source(places, start), _source_end(places, end)
            as_it_is = last - first == end - start and plain[start:end] in self._bare
            if first >= done and not as_it_is:
                parts += [text[done:first], word]
                done = last
        return "".join([*parts, text[done:]])

    def _found(self, plain: str) -> Iterator[tuple[int, int, str]]:
        found = [
            (match.start(), match.end(), word)
            for form, word in self._words
            for match in re.finditer(re.escape(form), plain)
        ]
        return iter(sorted(found, key=lambda each: (each[0], -each[1])))


class _PositionMap:
    """Map of positions in a decoded text to those before one decoding step."""

    def __init__(self) -> None:
        self.after: list[int] = []
        """Positions in the decoded text after each decoded escape."""
        self.source: list[int] = []
        """The same positions before decoding."""
        self.solid: list[bool] = []
        """For each escape, True if it stands for a character, False if it is removed."""


def _plain(text: str, steps: Iterable[re.Pattern[str]]) -> str:
    for step in steps:
        if any(mark in text for mark in _MARKS[step]):
            text = step.sub(lambda found: _char(found[0]), text)
    return text


def _decoded(text: str, steps: Iterable[re.Pattern[str]]) -> tuple[str, list[_PositionMap]]:
    """Return the text decoded as `_plain` does, with the position map of each step."""
    all_places: list[_PositionMap] = []
    for step in steps:
        places, parts = _PositionMap(), list[str]()
        done = length = 0
        for found in step.finditer(text):
            char = _char(found[0])
            parts += [text[done : found.start()], char]
            length += found.start() - done + len(char)
            done = found.end()
            places.after.append(length)
            places.source.append(done)
            places.solid.append(bool(char))
        text = "".join([*parts, text[done:]])
        all_places.append(places)
    return text, all_places


def _source(steps: list[_PositionMap], place: int) -> int:
    """Return the start, in the original text, of the character at a decoded position."""
    for each in reversed(steps):
        last = bisect_right(each.after, place) - 1
        if last >= 0:
            place += each.source[last] - each.after[last]
    return place


def _source_end(steps: list[_PositionMap], end: int) -> int:
    """Return the end, in the original text, of the character before a decoded position."""
    for each in reversed(steps):
        last = bisect_left(each.after, end)
        if last == len(each.after) or each.after[last] != end or not each.solid[last]:
            last -= 1
        if last >= 0:
            end += each.source[last] - each.after[last]
    return end


def _char(escape: str) -> str:
    """Return the ASCII character of an escape, "" for a line break; others stay as they are."""
    kind, rest = escape[0], escape[1:]
    if escape.endswith("\n") or kind in "\r\n":
        return ""
    if kind == "&" and not rest.startswith("#"):
        return _NAMED.get(escape, escape)
    digits, base = rest.strip("#;u{}"), 16
    if kind == "&":
        base = 16 if digits[:1] in "xX" else 10
    elif kind == "\\" and rest[0] not in "ux":
        if len(rest) < 3:
            return _LETTERS.get(rest, rest)
        base = 8
    try:
        number = int(digits.lstrip("xX"), base)
    except ValueError:  # hexadecimal digits without an x
        return escape
    return chr(number) if number < 0x80 else escape


def _in_base64(value: str) -> Iterator[str]:
    """Yield the base64 of a value at each alignment in a longer text, in both alphabets."""
    plain = value.encode("utf-8", "surrogateescape")
    for before in range(3):
        bits = 8 * (before + len(plain))
        part = base64.b64encode(bytes(before) + plain)[-(-8 * before // 6) : bits // 6].decode()
        yield part
        yield part.translate(str.maketrans("+/", "-_"))
