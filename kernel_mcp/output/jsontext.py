"""JSON written and judged piece by piece: no value becomes an object, no call takes long."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from kernel_mcp.config.settings import KIB

SLICE_CHARS = 64 * KIB
"""What is worked on between two moments at which other threads may run."""
JSON_DEPTH = 100
"""Levels that are kept of a value; nbformat's own reader takes some 300."""

_OTHER = re.compile(r"[^\[\]{}]+")


class NotJson(ValueError):
    """Text that is no JSON, or more of it than a reader can take."""


def slices(text: str) -> Iterator[str]:
    """`text` in pieces of `SLICE_CHARS`."""
    for start in range(0, len(text), SLICE_CHARS):
        yield text[start : start + SLICE_CHARS]


def compact(value: Any) -> bytes:
    """A small value as UTF-8. Raises ValueError, RecursionError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return utf8(text)


def string(pieces: Iterable[str]) -> Iterator[bytes]:
    """A JSON string of text that comes in pieces."""
    yield b'"'
    for piece in pieces:
        for part in slices(piece):
            yield utf8(json.dumps(part, ensure_ascii=False)[1:-1])
    yield b'"'


def utf8(text: str) -> bytes:
    """JSON text as UTF-8, which cannot carry half a surrogate pair: it becomes JSON's escape."""
    return text.encode("utf-8", "backslashreplace")


def checked(pieces: Iterable[bytes], shape: Shape, values: int, depth: int) -> Iterator[bytes]:
    """Pass JSON on while `shape` finds at most so many values and levels in it.

    Raises NotJson, also when the text ends too early.
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
    if not shape.whole:
        raise NotJson("its end is missing")


class Shape:
    """How many values JSON text has and how deep they are nested, as far as it has been fed."""

    def __init__(self) -> None:
        self.values = 1
        self.deepest = 0
        self._depth = 0
        self._inside = False
        self._escape = ""

    @property
    def whole(self) -> bool:
        """Whether every string and bracket that was opened is closed."""
        return not (self._inside or self._depth or self._escape)

    def feed(self, text: str) -> None:
        """Go on with more of the text."""
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
