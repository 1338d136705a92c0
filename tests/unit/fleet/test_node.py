"""A node of a fleet without its cluster."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_mcp.config.grants import grant_names
from kernel_mcp.config.settings import Settings
from kernel_mcp.fleet import node as node_module
from kernel_mcp.fleet.members import LEASE_S
from kernel_mcp.fleet.node import Node
from tests.unit.fake_kernels import FakeClock
from tests.unit.fleet.fake_ray import Actor

pytestmark = pytest.mark.anyio


class Slow:
    """A list of members that is heard late."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    async def join(self, _row: object) -> str:
        self._clock.now += 7
        return ""


async def test_the_first_lease_counts_from_when_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    asked = clock.now
    leases: list[float] = []
    monkeypatch.setattr(node_module, "boottime", clock)
    monkeypatch.setattr(Node, "_extend_deadline", lambda _node, until: leases.append(until))
    settings = tmp_path / "settings"
    settings.write_bytes(pickle.dumps(Settings()))
    node = Node("one", "1", "127.0.0.1", str(settings))
    await node._join(Actor(Slow(clock)))
    assert leases == [asked + LEASE_S]


def test_sessions_of_a_node_take_all_grants_but_that_of_questions() -> None:
    asks = Settings(ask=(600.0,))
    assert node_module._has_all_grants(asks, ())
    secret = replace(asks, network=("example.org",))
    assert not node_module._has_all_grants(secret, ())
    assert node_module._has_all_grants(secret, tuple(grant_names(secret)))
