"""Ended sessions of which their owners have not heard."""

from __future__ import annotations

import pytest

from kernel_mcp.sessions import tombstones as module
from kernel_mcp.sessions.notifications import Loss
from kernel_mcp.sessions.tombstones import Tombstone, Tombstones


def ended(owner: str, handle: str, name: str = "", why: str = "was closed") -> Tombstone:
    return Tombstone(owner, handle, name, why, Loss("it was closed"))


def test_an_end_is_found_by_its_owner_alone() -> None:
    tombstones = Tombstones()
    tombstones.add(mine := ended("ada", "s-1", "data"))
    assert tombstones.find("ada", "s-1") == tombstones.find("ada", "data") == mine
    assert tombstones.find("ben", "s-1") is tombstones.find("ben", "data") is None
    assert tombstones.pop("ben", "s-1") is None
    tombstones.reassign_name("ben", "data")
    assert tombstones.find("ada", "data") == mine
    tombstones.reassign_name("ada", "data")
    assert tombstones.find("ada", "data") is None
    assert tombstones.find("ada", "s-1") is not None


def test_an_end_is_told_once_unless_that_is_revoked() -> None:
    tombstones = Tombstones()
    tombstones.add(mine := ended("ada", "s-1"))
    tombstones.add(ended("ada", "s-1", why="was ended by a failure"))
    assert tombstones.find("ada", "s-1") == mine
    tombstones.mark_delivered("s-1")
    tombstones.mark_delivered("s-unknown")
    tombstones.add(mine)
    assert tombstones.find("ada", "s-1") is None
    tombstones.mark_undelivered("s-1")
    assert tombstones.pop("ada", "s-1") == mine
    assert tombstones.find("ada", "s-1") is None


def test_many_ends_of_one_push_out_none_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 4)
    tombstones = Tombstones()
    tombstones.add(ended("ada", "s-ada"))
    for number in range(20):
        tombstones.add(ended("ben", f"s-{number}"))
    assert tombstones.find("ada", "s-ada") is not None
    assert [n for n in range(20) if tombstones.find("ben", f"s-{n}") is not None] == [17, 18, 19]
