"""Ended sessions of which their owners have not heard."""

from __future__ import annotations

import pytest

from kernel_mcp.sessions import ends as module
from kernel_mcp.sessions.ends import Ended, Ends
from kernel_mcp.sessions.losses import Loss


def ended(owner: str, handle: str, name: str = "", why: str = "was closed") -> Ended:
    return Ended(owner, handle, name, why, Loss("it was closed"))


def test_an_end_is_found_by_its_owner_alone() -> None:
    ends = Ends()
    ends.add(mine := ended("ada", "s-1", "data"))
    assert ends.find("ada", "s-1") == ends.find("ada", "data") == mine
    assert ends.find("ben", "s-1") is ends.find("ben", "data") is None
    assert ends.pop("ben", "s-1") is None
    ends.give_name("ben", "data")
    assert ends.find("ada", "data") == mine
    ends.give_name("ada", "data")
    assert ends.find("ada", "data") is None
    assert ends.find("ada", "s-1") is not None


def test_an_end_is_told_once_unless_that_is_revoked() -> None:
    ends = Ends()
    ends.add(mine := ended("ada", "s-1"))
    ends.add(ended("ada", "s-1", why="was ended by a failure"))
    assert ends.find("ada", "s-1") == mine
    ends.told("s-1")
    ends.told("s-unknown")
    ends.add(mine)
    assert ends.find("ada", "s-1") is None
    ends.untold("s-1")
    assert ends.pop("ada", "s-1") == mine
    assert ends.find("ada", "s-1") is None


def test_many_ends_of_one_push_out_none_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 4)
    ends = Ends()
    ends.add(ended("ada", "s-ada"))
    for number in range(20):
        ends.add(ended("ben", f"s-{number}"))
    assert ends.find("ada", "s-ada") is not None
    assert [n for n in range(20) if ends.find("ben", f"s-{n}") is not None] == [17, 18, 19]
