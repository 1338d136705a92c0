"""JSON text with the positions of its values, so that a change leaves all other bytes alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from kernel_mcp.output.markup import NotJson, Shape, slices
from kernel_mcp.records import dataclass

MOST_VALUES = 1_000_000
"""Most values of a text that is parsed: each becomes an object of some 60 bytes."""
MOST_LEVELS = 200
MOST_LINES = 10_000
"""Most lines of a text that is written as a list of lines, each of which is a value."""

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class JsonSpan:
    """A value, and start and end of its text; `name` is its key if it is a member of an object."""

    start: int
    end: int
    value: Any
    name: str = ""


def bounded(text: str) -> int:
    """Return the number of values in a text.

    Raises NotJson if it has too many values or levels to be parsed.
    """
    shape = Shape()
    for piece in slices(text):
        shape.feed(piece)
        if shape.values > MOST_VALUES:
            raise NotJson(f"it has more than {MOST_VALUES:,} values")
        if shape.deepest > MOST_LEVELS:
            raise NotJson(f"it is nested more than {MOST_LEVELS} levels deep")
    return shape.values


def members(text: str, start: int = 0, apart: str = "") -> tuple[list[JsonSpan], int]:
    """Return the members of the object at `start`, and where it ends. Raises NotJson.

    The value of the member `apart`, if that is an array, is a list of the spans of its elements.
    """

    def member(at: int) -> JsonSpan:
        key, at = _value(text, at)
        if not isinstance(key, str):
            raise NotJson(f"a name is missing at character {at:,}")
        at = after(text, at, ":")
        is_apart = key == apart and text[at : at + 1] == "["
        value, end = elements(text, at) if is_apart else _value(text, at)
        return JsonSpan(at, end, value, key)

    return _all(text, start, "{}", member)


def elements(text: str, start: int) -> tuple[list[JsonSpan], int]:
    """Return the elements of the array at `start`, and where it ends. Raises NotJson."""

    def element(at: int) -> JsonSpan:
        value, end = _value(text, at)
        return JsonSpan(at, end, value)

    return _all(text, start, "[]", element)


def _all(
    text: str, start: int, marks: str, one: Callable[[int], JsonSpan]
) -> tuple[list[JsonSpan], int]:
    """Read items by `one`, separated by commas, between the two `marks`.

    Return them and the position after the second mark. Raises NotJson.
    """
    found: list[JsonSpan] = []
    at = after(text, start, marks[0])
    if text[at : at + 1] == marks[1]:
        return found, at + 1
    while True:
        found.append(one(at))
        at = _skipped(text, found[-1].end)
        if text[at : at + 1] == marks[1]:
            return found, at + 1
        at = after(text, at, ",")


def after(text: str, at: int, mark: str) -> int:
    """Return the position of the value after `mark`. Raises NotJson if `mark` is missing."""
    at = _skipped(text, at)
    if text[at : at + 1] != mark:
        raise NotJson(f"{mark!r} is missing at character {at:,}")
    return _skipped(text, at + 1)


def changed(text: str, values: Mapping[str, str]) -> str:
    """Return the text of an object with other values, given as JSON; new members come first.

    Raises NotJson.
    """
    found, _ = members(text)
    known = {span.name for span in found}
    for span in reversed(found):
        if span.name in values:
            text = text[: span.start] + values[span.name] + text[span.end :]
    new = [f"{json.dumps(name)}: {value}" for name, value in values.items() if name not in known]
    if not new:
        return text
    first = after(text, 0, "{")
    between = f",{text[text.index('{') + 1 : first] or ' '}"
    rest = [text[first:]] if found else []
    return text[:first] + between.join([*new, *rest]) + ("" if found else text[first:])


def dumped(value: Any, indent: str, margin: str, newline: str = "\n") -> str:
    """Return a value as JSON, on indented lines that follow `margin`.

    It is on one line if `indent` is empty.
    """
    if not indent:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=indent).replace("\n", newline + margin)


def joined(value: object) -> str:
    """Return a text, which nbformat allows to be a list of lines; empty for anything else."""
    if isinstance(value, list):
        return "".join(each for each in value if isinstance(each, str))
    return value if isinstance(value, str) else ""


def lines(text: str) -> list[str] | str:
    """Return a text as nbformat writes it: split after each line feed, or whole if it is long."""
    if text.count("\n") > MOST_LINES:
        return text
    pieces = text.split("\n")
    found = [f"{piece}\n" for piece in pieces[:-1]]
    return [*found, pieces[-1]] if pieces[-1] else found


def unlike(name: str, taken: Iterable[str]) -> str:
    """Return `name`, with a number appended if it is in `taken`."""
    known = taken if isinstance(taken, Set) else set(taken)
    number, made = 1, name
    while made in known:
        number += 1
        made = f"{name}-{number}"
    return made


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        where = getattr(error, "pos", at)
        raise NotJson(f"what stands at character {where:,} is no JSON") from None


def _skipped(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found is not None else at
