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
    """A list of members that is heard late, by seconds for each answer."""

    def __init__(self, clock: FakeClock, *late_s: float) -> None:
        self._clock = clock
        self.late_s = list(late_s)

    async def join(self, _row: object) -> str:
        self._clock.now += self.late_s.pop(0)
        return ""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    settings = tmp_path / "settings"
    settings.write_bytes(pickle.dumps(Settings()))
    return Node("one", "1", "127.0.0.1", str(settings))


@pytest.mark.parametrize(
    ("late_s", "counted_s"), [([4.0], 0.0), ([7.0, 0.0], 7.0), ([60.0, 11.0, 1.0], 71.0)]
)
async def test_the_first_lease_counts_from_a_question_whose_answer_came_in_time(
    late_s: list[float], counted_s: float, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    began = clock.now
    leases: list[float] = []
    monkeypatch.setattr(node_module, "boottime", clock)
    monkeypatch.setattr(Node, "_extend_deadline", lambda _node, until: leases.append(until))
    slow = Slow(clock, *late_s)
    await node._join(Actor(slow))
    assert leases == [began + counted_s + LEASE_S]
    assert not slow.late_s


def test_sessions_of_a_node_take_all_grants_but_that_of_questions() -> None:
    asks = Settings(ask=(600.0,))
    assert node_module._has_all_grants(asks, ())
    secret = replace(asks, network=("example.org",))
    assert not node_module._has_all_grants(secret, ())
    assert node_module._has_all_grants(secret, tuple(grant_names(secret)))
