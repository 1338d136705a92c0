"""Fair division of a resource that all sessions share: small parts are not cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


def level(sizes: Iterable[int], most: int) -> int:
    """Return the size to which each one is to be cut so that their sum is at most `most`."""
    ascending = sorted(sizes)
    for place, size in enumerate(ascending):
        fair = most // (len(ascending) - place)
        if size > fair:
            return fair
        most -= size
    return most


def totals(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the sum of the sizes of each owner."""
    found: defaultdict[str, int] = defaultdict(int)
    for owner, size in parts:
        found[owner] += size
    return found
