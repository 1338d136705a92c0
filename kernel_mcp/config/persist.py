"""Limits of persisted sessions: the value of `--persist`."""

from __future__ import annotations

from kernel_mcp.config.narrowing import no_more_or_unlimited
from kernel_mcp.records import dataclass
from kernel_mcp.units import GIB, idle_duration, size

SAVED_BYTES = 2 * GIB
"""Bound on the variables of all hibernated sessions if none is persisted."""


@dataclass(frozen=True, slots=True)
class Persist:
    """Limits of persisted sessions: total size, and seconds since their last use.

    0 bytes and infinite seconds mean no limit.
    """

    bytes: int
    seconds: float


def persist(given: object) -> Persist | None:
    """Read `SIZE,TIME`; None for `off`."""
    text = given.strip().lower() if isinstance(given, str) else ""
    if text == "off" or given is False:
        return None
    parts = [part.strip() for part in text.split(",")]
    try:
        if len(parts) != 2:
            raise ValueError
        return Persist(size(parts[0]), idle_duration(parts[1]))
    except ValueError:
        raise ValueError("expected a size and a time such as 2G,7d, or off") from None


def persists_less(wanted: object, own: object) -> bool:
    """Return True if `wanted` keeps no more than `own`, and no longer."""
    if not isinstance(wanted, Persist):
        return wanted is None
    if not isinstance(own, Persist):
        return False
    return no_more_or_unlimited(wanted.bytes, own.bytes) and wanted.seconds <= own.seconds
