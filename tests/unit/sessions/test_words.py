"""Times and limits in the words of notices."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from kernel_mcp.kernels.run import CellUsage
from kernel_mcp.sessions.words import moment, usage_words
from kernel_mcp.units import MIB


def test_a_moment_is_told_as_people_do() -> None:
    now = datetime(2026, 3, 11, 12, 0).astimezone(timezone.utc).timestamp()
    day = 24 * 3600.0
    assert moment(now - 3600, now) == "today 11:00"
    assert moment(now - day, now) == "yesterday 12:00"
    assert moment(now - 2 * day, now) == "Monday 12:00"
    assert moment(now - 9 * day, now) == "2026-03-02 12:00"


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (CellUsage(7.9, 79 * MIB, 79 * MIB), []),
        (CellUsage(8.0), ["This cell used 8.0 of its 10 s of processor time"]),
        (
            CellUsage(0.0, 80 * MIB, 20 * MIB),
            ["Memory: this cell needed up to 80 MiB of 100 MiB, 20 MiB are in use now"],
        ),
        (CellUsage(0.0, 90 * MIB, 90 * MIB, 80 * MIB), []),
        (
            CellUsage(None, None, 90 * MIB, 0, 16 * MIB),
            [
                "Local variables of the failed call held 16 MiB; they were cleared",
                "Memory: this cell needed up to 90 MiB of 100 MiB, 90 MiB are in use now",
            ],
        ),
    ],
)
def test_use_of_limits_is_told_where_they_are_near(usage: CellUsage, words: list[str]) -> None:
    assert usage_words(usage, 100 * MIB, 10.0) == words
    assert not usage_words(CellUsage(usage.cpu_s, usage.peak_bytes, usage.memory_bytes), 0, 0)


def test_names_of_what_holds_memory_stay_on_their_line() -> None:
    (told,) = usage_words(CellUsage(holders=(("x\ny", 2 * MIB), ("Out[1]", MIB))), 100 * MIB, 0)
    assert told.count("\n") == 0
    assert told.endswith("Out[1] (1 MiB): `del` what is not needed, `%reset -f out` for Out")
