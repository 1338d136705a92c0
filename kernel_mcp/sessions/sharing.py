"""What all sessions of a server share, divided so that who has little keeps it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


def level(sizes: Iterable[int], most: int) -> int:
    """The size at which to cut each of them so that the sum is `most`."""
    ascending = sorted(sizes)
    for place, size in enumerate(ascending):
        fair = most // (len(ascending) - place)
        if size > fair:
            return fair
        most -= size
    return most


def totals(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The sum of the sizes of each owner."""
    found: defaultdict[str, int] = defaultdict(int)
    for owner, size in parts:
        found[owner] += size
    return found
