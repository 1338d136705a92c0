"""Times in the words of notices."""

from __future__ import annotations

from datetime import datetime, timezone

from kernel_mcp.sessions.words import moment


def test_a_moment_is_told_as_people_do() -> None:
    now = datetime(2026, 3, 11, 12, 0).astimezone(timezone.utc).timestamp()
    day = 24 * 3600.0
    assert moment(now - 3600, now) == "today 11:00"
    assert moment(now - day, now) == "yesterday 12:00"
    assert moment(now - 2 * day, now) == "Monday 12:00"
    assert moment(now - 9 * day, now) == "2026-03-02 12:00"
