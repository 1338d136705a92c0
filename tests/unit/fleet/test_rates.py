"""Rates of principals over two fronts and the registry that tells each of the other."""

from __future__ import annotations

import pytest

from kernel_mcp.fleet import registry as registry_module
from kernel_mcp.fleet.rates import SharedRates
from kernel_mcp.fleet.registry import Registry
from tests.unit.fake_kernels import FakeClock
from tests.unit.fleet.fake_ray import Actor

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    monkeypatch.setattr(registry_module, "boottime", found)
    return found


async def test_calls_at_other_fronts_are_told_to_each(clock: FakeClock) -> None:
    registry = Registry()
    assert await registry.spent("a", {"ada": 3}) == {}
    assert await registry.spent("b", {"ada": 2, "ben": 1}) == {"a": {"ada": 3}}
    assert await registry.spent("a", {"ada": 4, "ben": 1}) == {"b": {"ada": 2, "ben": 1}}
    clock.now += 61
    assert await registry.spent("a", {"ada": 4}) == {}


class Front:
    """Counts calls as a gate does."""

    def __init__(self, registry: Registry) -> None:
        self.shared = SharedRates(Actor(registry))
        self.calls: dict[str, int] = {}
        self.elsewhere = 0

    def calls_made(self) -> dict[str, int]:
        return self.calls

    def made_elsewhere(self, principal: str, calls: int) -> None:
        assert principal == "ada"
        self.elsewhere += calls

    async def share(self, **calls: int) -> None:
        self.calls = calls
        await self.shared.share(self)


async def test_a_call_at_another_front_is_taken_from_the_rate_once(clock: FakeClock) -> None:
    registry = Registry()
    one, other = Front(registry), Front(registry)
    await other.share(ada=1000)
    for calls in (1, 1, 2):
        await one.share(ada=calls)
        await other.share(ada=1000 + calls)
    await one.share(ada=2)
    assert (one.elsewhere, other.elsewhere) == (2, 1)


@pytest.mark.parametrize("others", [{}, {"ben": 1}], ids=["alone", "others"])
async def test_calls_of_long_ago_are_not_taken_when_a_principal_comes_back_to_a_front(
    others: dict[str, int], clock: FakeClock
) -> None:
    registry = Registry()
    one, other = Front(registry), Front(registry)
    for _ in range(2):
        await one.share(ada=1)
        await other.share(ada=1000)
    for _ in range(5):
        clock.now += 30
        await one.share(ada=2)
        await other.share(**others)
    for calls in (1001, 1003):
        await other.share(ada=calls)
        await one.share(ada=2)
    assert one.elsewhere == 2


async def test_calls_of_before_are_not_taken_when_the_registry_starts_again(
    clock: FakeClock,
) -> None:
    registry = Registry()
    one, other = Front(registry), Front(registry)
    for _ in range(2):
        await one.share(ada=500)
        await other.share(ada=1000)
    registry._spent.clear()
    for calls in (0, 1):
        await one.share(ada=500)
        await other.share(ada=1000 + calls)
    await one.share(ada=500)
    assert (one.elsewhere, other.elsewhere) == (1, 0)
