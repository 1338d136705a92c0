"""Values on the axes of a matplotlib figure (numbers, dates, categories) and their tick labels."""

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
"""Most ticks of an axis whose labels are used as names of bars and boxes."""
FEW_DAYS = 31
"""Length of an axis up to which an hour more or less is seen."""
_NAMING = ("FixedLocator", "StrCategoryLocator")
_WRITING = ("FixedFormatter", "FuncFormatter", "StrCategoryFormatter")
"""Locators and formatters of ticks that code has placed and labelled: these name bars and boxes."""
_DATING = ("DateConverter", "ConciseDateConverter", "_SwitchableDateConverter")


class Unknown(Exception):
    """The data of a figure, or of a part of it, cannot be extracted."""


class TooMuch(Unknown):
    """The data of a figure exceeds a bound, which the text says."""


def few(found: Iterable[Any], most: int = MOST_SERIES) -> list[Any]:
    """Return all items as a list. Raises TooMuch for more than `most`: a part would mislead."""
    taken = list(islice(found, most + 1))
    if len(taken) > most:
        raise TooMuch(f"more than {most:,} parts")
    return taken


Decode = Callable[[Sequence[float]], Sequence[Any]]


def number(value: Any) -> float | None:
    """Return a float that JSON can represent; None for None, NaN and infinities."""
    if value is None:
        return None
    found = float(value)
    return found if math.isfinite(found) else None


def numbers(values: Iterable[Any]) -> list[float | None]:
    """Return each value as `number` does."""
    return [number(each) for each in values]


def word(value: Any) -> str:
    """Return the first `WORD_CHARS` characters of a text; empty for None."""
    return str(value or "")[:WORD_CHARS]


def scale(axis: Any, name: str) -> dict[str, Any]:
    """Return the chart fields of one axis, `name` being x or y: label, limits, ticks, scale."""
    places = numbers(axis.get_majorticklocs()[:MOST_TICKS])
    formatter = axis.get_major_formatter()
    labels = formatter.format_ticks(places)
    if formatter.get_offset() and _decoder(axis) is None:  # the labels are parts of numbers
        labels = [f"{place:.12g}" for place in places if place is not None]
    return {
        f"{name}_label": word(axis.get_label_text()),
        f"{name}_limits": _ends(axis),
        f"{name}_ticks": places,
        f"{name}_tick_labels": list(map(word, labels)),
        f"{name}_scale": word(axis.get_scale()),
    }


def _ends(axis: Any) -> list[Any]:
    """Return the limits of an axis; numbers on one of categories, which they may lie between."""
    ends = numbers(axis.get_view_interval())
    return ends if "StrCategoryConverter" in _kinds(_converter(axis)) else decoded(axis, ends)


def color(values: Any) -> str:
    """Return the one color of an artist as `#rrggbb`; empty if it is transparent or has several."""
    colors = sys.modules["matplotlib.colors"]
    found = {colors.to_hex(each, keep_alpha=True) for each in islice(values, MOST_NAMES)}
    one = found.pop() if len(found) == 1 and len(values) <= MOST_NAMES else ""
    return "" if one.endswith("00", 7) else one[:7]


def decoded(axis: Any, values: Sequence[float | None]) -> list[Any]:
    """Return values of an axis as they were given to the figure: dates as ISO 8601, categories.

    Numbers and None stay as they are.
    """
    decode = _decoder(axis)
    if decode is None:
        return list(values)
    known = iter(decode([value for value in values if value is not None]))
    return [None if value is None else next(known) for value in values]


def _decoder(axis: Any) -> Decode | None:
    freq = getattr(axis, "freq", None)
    if freq is not None:
        return lambda values: _periods(values, freq)
    if is_of_moments(axis):
        return lambda values: _moments(values, axis.units, offsets=_clocks_change(axis))
    if "StrCategoryConverter" in _kinds(_converter(axis)):
        names = {place: name for name, place in axis.units._mapping.items()}
        return lambda values: [word(names.get(value, value)) for value in values]
    return None


def _converter(axis: Any) -> Any:
    return axis.get_converter() if hasattr(axis, "get_converter") else axis.converter


def _kinds(value: Any) -> set[str]:
    """Return the names of a value's class and its bases."""
    return {kind.__name__ for kind in type(value).__mro__}


def _moments(values: Sequence[float], zone: Any, *, offsets: bool = False) -> list[str]:
    """Return moments in the time zone of an axis, which its labels show, as ISO 8601.

    With `offsets` they end in their offset from UTC.
    """
    found = sys.modules["matplotlib.dates"].num2date(values, zone)
    return [(each if offsets else each.replace(tzinfo=None)).isoformat() for each in found]


def _clocks_change(axis: Any) -> bool:
    """Return True if an axis of a few days has a change of its time zone's clocks within."""
    low, high = axis.get_view_interval()
    first, last = sys.modules["matplotlib.dates"].num2date([low, high], axis.units)
    return bool(abs(high - low) <= FEW_DAYS and first.utcoffset() != last.utcoffset())


def _periods(values: Sequence[float], freq: Any) -> list[str]:
    """Return ISO 8601 dates of period ordinals, which pandas plots for series with a frequency."""
    pandas = sys.modules["pandas"]
    found = pandas.PeriodIndex.from_ordinals([round(each) for each in values], freq=freq)
    return [each.isoformat() for each in found.to_timestamp()]


def is_of_moments(axis: Any) -> bool:
    """Return True if an axis shows dates of matplotlib's own converters."""
    is_of_periods = getattr(axis, "freq", None) is not None
    return not is_of_periods and not _kinds(_converter(axis)).isdisjoint(_DATING)


class TickLabels:
    """Tick labels of an axis by position; false unless code has placed and labelled the ticks."""

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
        """Return the nearest label less than half a unit away, or "".

        Bars of several groups stand beside their tick.
        """
        if place is None:
            return ""
        after = bisect_left(self._places, place)
        near = range(max(0, after - 1), min(after + 1, len(self._places)))
        best = min(near, key=lambda each: abs(self._places[each] - place), default=None)
        if best is None or abs(self._places[best] - place) >= 0.5:
            return ""
        return self._words[best]
