"""Recognise the clock in the text of a cell: dates and times that are those of its own run."""

from __future__ import annotations

import re
from calendar import timegm
from datetime import datetime, timezone
from math import ceil
from typing import TypeAlias

from kernel_mcp.records import dataclass

DAY_S = 86_400.0
LAST_S = 250_000_000_000.0
"""Unix time of the year 9892, near the last of `datetime`."""
ZONES_S = 14 * 3600.0
"""Maximum offset of time zones."""
SLACK_S = 60.0
"""Seconds beyond those of the runs: times may be without seconds."""
_QUARTER_S = 900.0
"""Offsets of time zones are multiples of it."""
_NUMBER = re.compile(r"\d{1,14}")
_MONTH = re.compile(r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}")
_ZONE = re.compile(r"\b[A-Z]{3,4}\b")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_FIELDS = {
    "#-#-#": "ymd",
    "#-#-# #:#": "ymdHM",
    "#-#-# #:#:#": "ymdHMS",
    "#/#/#": "mdy",
    "# M #": "dy",
    "# M # #:#:#": "dyHMS",
    "M #, #": "dy",
    "M # #:#": "dHM",
    "M # #:#:# #": "dHMSy",
    "M # #:#:# Z #": "dHMSy",
    "#-#-#_#-#": "ymdHM",
    "#-#-#_#-#-#": "ymdHMS",
    "date(#, #, #": "ymd",
    "datetime(#, #, #, #, #": "ymdHM",
    "datetime(#, #, #, #, #, #": "ymdHMS",
    "datetime(#, #, #, #, #, #, #": "ymdHMS",
}
"""Fields of the numbers of a date by its shape: `#` is a number, `M` the name of a month."""

_Reading: TypeAlias = tuple[float, bool]
"""A Unix time in seconds, and True if it is the midnight of a date alone."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a cell: Unix times of its begin and its end in seconds, and the kernel's pid.

    A `pid` of None is masked nowhere.
    """

    began: float
    ended: float
    pid: int | None = None


def both_the_clock(before: str, after: str, was: Run, now: Run) -> bool:
    """Return True if both texts are readings of the clock, each within a day of its own run.

    With a time of day they have to lie equally far from their runs, in any time zone.
    """
    times = (was.began, was.ended, now.began, now.ended)
    if not all(0.0 < each < LAST_S for each in times):
        return False  # records of a kernel may have any number
    slack = SLACK_S + (was.ended - was.began) + (now.ended - now.began)
    if _is_time(before) and _is_time(after):
        far = [_of_day(each) - run.began for each, run in ((before, was), (after, now))]
        zoned = all(abs(_centred(each, _QUARTER_S)) <= slack for each in far)
        return zoned and abs(_centred(far[0] - far[1], DAY_S)) <= slack
    pairs = zip(_readings(before, was), _readings(after, now), strict=False)
    return any(
        _same_day(one[0], two[0], was, now)
        if one[1] and two[1]
        else one[1] is two[1] and _same_moment(one[0] - was.began, two[0] - now.began, slack)
        for one, two in pairs
        if one is not None and two is not None
    )


def _same_moment(offset: float, other: float, slack: float) -> bool:
    near = abs(offset) <= DAY_S + slack and abs(other) <= DAY_S + slack
    return near and abs(offset - other) <= slack


def _same_day(midnight: float, other: float, was: Run, now: Run) -> bool:
    """Return True if two dates are the day of both runs, or one beside it, in one time zone."""
    for shift in (-DAY_S, 0.0, DAY_S):
        first = max(midnight + shift - was.ended, other + shift - now.ended, -ZONES_S)
        last = min(midnight + shift - was.began, other + shift - now.began) + DAY_S
        if ceil(first / _QUARTER_S) * _QUARTER_S < min(last, ZONES_S):
            return True
    return False


def _readings(text: str, run: Run) -> list[_Reading | None]:
    """Return the Unix times that a text may mean as if in UTC, in a fixed order; None for none."""
    if text.replace(".", "", 1).isdecimal():
        value = float(text)
        slack = SLACK_S + run.ended - run.began
        scaled = (value / scale for scale in (1.0, 1e3, 1e6, 1e9))
        plain = [(each, False) if abs(each - run.began) <= slack else None for each in scaled]
        return [*plain, _moment(_sliced(text), run)]
    if text[:3] in _WEEKDAYS:
        text = text.partition(" ")[2]
    numbers = [int(each) for each in _NUMBER.findall(text)]
    whole, point, _ = text.replace(",", ".").rpartition(".") if ":" in text else (text, "", "")
    shape = _shape(whole if point else text)
    if shape in ("#_#", "#-#", "#T#"):
        return [_moment(_sliced(text), run)]
    fields = _FIELDS.get(shape, "")
    found = dict(zip(fields, numbers, strict=False))
    if named := _MONTH.search(text):
        found["m"] = _MONTHS.index(named[0][:3]) + 1
    swapped = {**found, "m": found["d"], "d": found["m"]} if fields == "mdy" else {}
    return [_moment(found, run), _moment(swapped, run)]


def _shape(text: str) -> str:
    shape = _ZONE.sub("Z", _MONTH.sub("M", _NUMBER.sub("#", text)))
    return " ".join(shape.replace("#T#", "# #").split())


def _sliced(text: str) -> dict[str, int]:
    """Return the fields of a date without separators between its numbers."""
    digits = "".join(_NUMBER.findall(text))
    if len(digits) not in (8, 14):
        return {}
    cuts = (("y", 0, 4), ("m", 4, 6), ("d", 6, 8), ("H", 8, 10), ("M", 10, 12), ("S", 12, 14))
    return {field: int(digits[a:b]) for field, a, b in cuts if a < len(digits)}


def _moment(found: dict[str, int], run: Run) -> _Reading | None:
    if not {"m", "d"} <= set(found):
        return None
    begun = datetime.fromtimestamp(run.began, timezone.utc)
    year, hour, minute, second = (
        found.get(field, default)
        for field, default in (("y", begun.year), ("H", 0), ("M", 0), ("S", 0))
    )
    try:
        moment = datetime(year, found["m"], found["d"], hour, minute, second, tzinfo=timezone.utc)
    except (ValueError, OverflowError):
        return None
    return float(timegm(moment.timetuple())), "H" not in found


def _is_time(text: str) -> bool:
    return _shape(text) in ("#:#", "#:#:#", "#:#:#.#", "#:#:#,#")


def _of_day(text: str) -> float:
    hour, minute, second, *_ = (*map(int, _NUMBER.findall(text)[:3]), 0)
    return hour * 3600.0 + minute * 60.0 + second


def _centred(seconds: float, period: float) -> float:
    """Return the distance from the nearest multiple of `period`."""
    return (seconds + period / 2) % period - period / 2
