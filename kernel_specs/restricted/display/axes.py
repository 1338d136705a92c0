"""What stands on the axes of a matplotlib figure: numbers, moments, categories, and their names."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

WORD_CHARS = 200
MOST_SERIES = 20
MOST_TICKS = 50
MOST_NAMES = 2000
"""Ticks whose words are looked at for names of bars and boxes."""
_NAMING = ("FixedLocator", "StrCategoryLocator")
_WRITING = ("FixedFormatter", "FuncFormatter", "StrCategoryFormatter")
"""Ticks where code has put them, with words of its own, name what stands there."""


class Unknown(Exception):
    """A figure, or a part of one, that has no data."""


def few(found: Iterable[Any], most: int = MOST_SERIES) -> list[Any]:
    """All of them. Raises Unknown where there are more: data without the rest would mislead."""
    taken = list(islice(found, most + 1))
    if len(taken) > most:
        raise Unknown
    return taken


Decode = Callable[[Sequence[float]], Sequence[Any]]


def number(value: Any) -> float | None:
    """A number that JSON has; None for another."""
    if value is None:
        return None
    found = float(value)
    return found if math.isfinite(found) else None


def numbers(values: Iterable[Any]) -> list[float | None]:
    """Each as `number`."""
    return [number(each) for each in values]


def word(value: Any) -> str:
    """The beginning of a text; empty for none."""
    return str(value or "")[:WORD_CHARS]


def scale(axis: Any, name: str) -> dict[str, Any]:
    """The fields of one axis, `x` or `y`."""
    places = numbers(axis.get_majorticklocs()[:MOST_TICKS])
    return {
        f"{name}_label": word(axis.get_label_text()),
        f"{name}_ticks": places,
        f"{name}_tick_labels": list(map(word, axis.get_major_formatter().format_ticks(places))),
        f"{name}_scale": word(axis.get_scale()),
    }


def decoded(axis: Any, values: Sequence[float | None]) -> list[Any]:
    """Values of an axis as they were given to the figure: moments as ISO 8601, or categories."""
    decode = _decoder(axis)
    if decode is None:
        return list(values)
    known = iter(decode([value for value in values if value is not None]))
    return [None if value is None else next(known) for value in values]


def _decoder(axis: Any) -> Decode | None:
    freq = getattr(axis, "freq", None)
    if freq is not None:
        return lambda values: _periods(values, freq)
    converter = axis.get_converter() if hasattr(axis, "get_converter") else axis.converter
    kinds = _kinds(converter)
    if kinds & {"DateConverter", "ConciseDateConverter", "_SwitchableDateConverter"}:
        return _moments
    if "StrCategoryConverter" in kinds:
        names = {place: name for name, place in axis.units._mapping.items()}
        return lambda values: [word(names.get(value, value)) for value in values]
    return None


def _kinds(value: Any) -> set[str]:
    """The names of the class of a value and of its bases."""
    return {kind.__name__ for kind in type(value).__mro__}


def _moments(values: Sequence[float]) -> list[str]:
    found = sys.modules["matplotlib.dates"].num2date(values)
    return [each.replace(tzinfo=None).isoformat() for each in found]


def _periods(values: Sequence[float], freq: Any) -> list[str]:
    """What pandas plots of a series with a frequency."""
    pandas = sys.modules["pandas"]
    found = pandas.PeriodIndex.from_ordinals([round(each) for each in values], freq=freq)
    return [each.isoformat() for each in found.to_timestamp()]


def is_of_moments(axis: Any) -> bool:
    """Whether an axis shows moments."""
    return _decoder(axis) is _moments


class Names:
    """Words at the ticks of an axis, where they are names."""

    def __init__(self, axis: Any) -> None:
        self._places: list[float] = []
        self._words: list[str] = []
        formatter, places = axis.get_major_formatter(), axis.get_majorticklocs()
        placed = _kinds(axis.get_major_locator()).intersection(_NAMING)
        if not placed or _kinds(formatter).isdisjoint(_WRITING) or len(places) > MOST_NAMES:
            return
        texts = formatter.format_ticks(places)
        found = sorted(zip(map(float, places), map(word, texts), strict=True))
        self._places = [place for place, text in found if text]
        self._words = [text for _, text in found if text]

    def __bool__(self) -> bool:
        return bool(self._places)

    def at(self, place: float | None) -> str:
        """The name within half a unit of a place, where bars of several groups stand."""
        if place is None:
            return ""
        after = bisect_left(self._places, place)
        near = range(max(0, after - 1), min(after + 1, len(self._places)))
        best = min(near, key=lambda each: abs(self._places[each] - place), default=None)
        if best is None or abs(self._places[best] - place) >= 0.5:
            return ""
        return self._words[best]
