"""A shared resource is divided so that sessions with little keep it."""

from __future__ import annotations

import pytest

from kernel_mcp.sessions.sharing import level, totals


@pytest.mark.parametrize(
    ("sizes", "most", "found"),
    [
        ([], 10, 10),
        ([1, 2, 3], 6, 0),
        ([1, 9, 9], 11, 5),
        ([9, 9, 9], 9, 3),
        ([7], 5, 5),
        ([1, 2, 300, 400], 203, 100),
    ],
)
def test_sizes_are_cut_at_one_level(sizes: list[int], most: int, found: int) -> None:
    cut = level(sizes, most)
    assert cut == found
    if sum(sizes) > most:
        assert sum(min(size, cut) for size in sizes) <= most


def test_sizes_are_summed_by_owner() -> None:
    assert totals([("ada", 1), ("ben", 2), ("ada", 3)]) == {"ada": 4, "ben": 2}
