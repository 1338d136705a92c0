"""Names, reasons and times of sessions as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from kernel_mcp.kernels.run import CellUsage
from kernel_mcp.output.text import one_line
from kernel_mcp.units import MIB, format_bytes

LISTED_CHARS = 8000
"""Maximum characters of names in one notice; further names are counted."""
TIMES = " \N{MULTIPLICATION SIGN} "
MAX_RESULTS = 5
"""Maximum number of results of cells (`Out[n]`) that are named one by one."""
_RESULT = re.compile(r"Out\[\d+\]")
_PLAIN = re.compile(r"[\w/\[\]@+~-][^\s()'\"\\,;:]*|(Out\[\d+\], )+…|[\d,]+ more")
"""Names of variables, results and files, and the words that stand for many names."""


NEAR = 0.8
"""Fraction of a limit from which the use of it is reported."""
NOTABLE_BYTES = 16 * MIB


def usage_words(usage: CellUsage, memory: int, cpu_s: float) -> list[str]:
    """Return sentences on a cell's use of limits that are near; 0 is no limit.

    `memory` is in bytes, `cpu_s` in seconds.
    """
    told = []
    if cpu_s and (usage.cpu_s or 0) >= NEAR * cpu_s:
        told.append(f"This cell used {usage.cpu_s:.1f} of its {cpu_s:g} s of processor time")
    if usage.cleared_bytes >= NOTABLE_BYTES:
        told.append(
            f"Local variables of the failed call held {format_bytes(usage.cleared_bytes)}; they "
            "were cleared"
        )
    used, peak = usage.memory_bytes, max(usage.memory_bytes, usage.peak_bytes or 0)
    grown = peak >= NEAR * memory and peak - usage.before_bytes >= NOTABLE_BYTES
    if memory and (grown or usage.holders):
        held = ", ".join(f"{shown(name)} ({format_bytes(size)})" for name, size in usage.holders)
        told.append(
            f"Memory: this cell needed up to {format_bytes(peak)} of {format_bytes(memory)}, "
            f"{format_bytes(used)} are in use now"
            + (
                f", most by {held}: `del` what is not needed, `%reset -f out` for Out"
                if held
                else ""
            )
        )
    return told


def duration(seconds: float) -> str:
    """Return seconds as text: `40 s`, `12 min`, `1 h`, `1 h 30 min`, `3 days`."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
    return f"{minutes // (24 * 60)} days"


def described(names: Iterable[str], variables: Iterable[Mapping[str, Any]]) -> str:
    """Return names, with shapes where known: `df (1.2 M \N{MULTIPLICATION SIGN} 7)`."""
    shapes = {each["name"]: each["shape"] for each in variables if each.get("shape")}
    return _joined(
        [
            shown(name) + (f" ({TIMES.join(map(rounded, shapes[name]))})" if name in shapes else "")
            for name in names
        ]
    )


def rounded(count: int) -> str:
    """Return a count with about three digits: `7`, `950`, `1.2 M`."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if count >= size:
            return f"{count / (1000 if unit == 'k' else size):.3g} {unit}"
    return str(count)


def listing(names: Iterable[str]) -> str:
    """Return names, separated by commas, up to `LISTED_CHARS` characters; others are counted."""
    return _joined([shown(name) for name in names])


def shown(name: str) -> str:
    """Return a name on one line, in quotes if it could be confused with the text around it."""
    text = one_line(name)
    return text if _PLAIN.fullmatch(text) else repr(text)


def reasons(lost: Mapping[str, str]) -> str:
    """Return names with reasons in brackets; results beyond `MAX_RESULTS` become one item."""
    results = [name for name in lost if _RESULT.fullmatch(name)]
    if len(results) > MAX_RESULTS:
        short = ", ".join([*results[:MAX_RESULTS], "…"])
        lost = {**{k: v for k, v in lost.items() if k not in results}, short: lost[results[0]]}
    return _joined([f"{shown(name)} ({_within(reason)})" for name, reason in lost.items()])


def _within(reason: str) -> str:
    """Return a reason for use in brackets, in quotes if its own brackets are not balanced."""
    text, depth = one_line(reason), 0
    for each in text:
        depth += (each == "(") - (each == ")")
        if depth < 0:
            return repr(text)
    return text


def _joined(items: Sequence[str]) -> str:
    left = LISTED_CHARS
    shown: list[str] = []
    for item in items:
        left -= len(item)
        if left < 0:
            shown.append(f"and {len(items) - len(shown)} more")
            break
        shown.append(item)
    return ", ".join(shown)


def moment(then: float, now: float) -> str:
    """Return a local time in words: `today 17:40`, `yesterday 17:40`, `Friday 17:40`, or a date."""
    at, today = (datetime.fromtimestamp(each, timezone.utc).astimezone() for each in (then, now))
    days = (today.date() - at.date()).days
    day = {0: "today", 1: "yesterday"}.get(days, at.strftime("%A"))
    if not 0 <= days < 7:
        day = at.strftime("%Y-%m-%d")
    return f"{day} {at:%H:%M}"
