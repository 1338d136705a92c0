"""Times, sizes and numbers with units, read from text or TOML and written for people.

A reader raises ValueError, with a message for the operator, for an invalid value.
"""

from __future__ import annotations

import math
import re

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_BYTES = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[smhd]?)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?")


def duration(given: object) -> float:
    """Read seconds, more than zero: `30`, `30s`, `500ms`, `5m`, `2h`, `1d`, or a number."""
    seconds = _seconds(given)
    if not seconds > 0:
        raise ValueError("expected a time above zero such as 30, 30s, 5m or 2h")
    return seconds


def limit_duration(given: object) -> float:
    """Read seconds as `duration` does; 0 means no limit."""
    return _seconds(given)


def idle_duration(given: object) -> float:
    """Read seconds as `duration` does; `never` is infinity."""
    if isinstance(given, str) and given.strip().lower() == "never":
        return math.inf
    try:
        return duration(given)
    except ValueError:
        raise ValueError("expected a time such as 30s, 5m or 2h, or never") from None


LEAST_BARE_BYTES = MIB
"""A smaller number without a unit is refused, as its unit was probably forgotten."""


def size(given: object) -> int:
    """Read bytes: `512M`, `2G`, `1.5 GiB`, or a large number of bytes; 0 means no limit."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        given = str(given)
    match = _SIZE.fullmatch(given.strip().lower()) if isinstance(given, str) else None
    if match is None:
        raise ValueError("expected a size such as 512M or 2G (0 for no limit)")
    if not math.isfinite(number := float(match[1])):
        raise ValueError("the number is too large")
    if match[2] in ("", "b") and 0 < number < LEAST_BARE_BYTES:
        meant = f"{match[1]}{'G' if number < 64 else 'M'}"
        raise ValueError(f"that is {match[1]} bytes; write {meant} if you mean that")
    return int(number * _UNITS_BYTES[match[2]])


def count(given: object) -> int:
    """Read a whole number, zero or more."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    if isinstance(given, str) and re.fullmatch(r"\d{1,18}", given.strip()):
        return int(given)
    raise ValueError("expected a whole number such as 16")


def number(given: object) -> float:
    """Read a number, zero or more."""
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        if math.isfinite(_float(given)) and given >= 0:
            return float(given)
    elif isinstance(given, str) and re.fullmatch(r"\d{1,6}(\.\d{1,6})?", given.strip()):
        return float(given)
    raise ValueError("expected a number such as 2 or 1.5 (0 for no limit)")


def _float(given: float) -> float:
    try:
        return float(given)
    except OverflowError:
        return math.inf


def _seconds(given: object) -> float:
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        if math.isfinite(_float(given)) and given >= 0:
            return float(given)
    elif isinstance(given, str):
        match = _DURATION.fullmatch(given.strip().lower())
        if match is not None:
            return float(match[1]) * _UNITS_S[match[2]]
    raise ValueError("expected a time such as 30, 30s, 5m or 2h")


def format_bytes(size: int) -> str:
    """Return a number of bytes for people, for example `2 GiB` or `1.5 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{size} bytes"


def in_mebibytes(size: int) -> str:
    """Return a number of bytes for people, without a fraction below 1 GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
