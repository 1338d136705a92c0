"""Quotas of principals over two nodes and the registry that counts for them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import HibernationError, QuotaReached
from kernel_mcp.fleet import registry as registry_module
from kernel_mcp.fleet.cluster import FleetUnavailable
from kernel_mcp.fleet.members import MARGIN_S, RENEW_S, Member
from kernel_mcp.fleet.registry import Registry
from kernel_mcp.fleet.usage import FleetUsage, rows_of
from kernel_mcp.identity import Principal
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.hibernation import IDLE
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.principals import Overseer, Principals, Use
from kernel_mcp.sessions.session import Session
from tests.unit.fake_kernels import FakeClock, FakeSource, new_manager
from tests.unit.fleet.fake_ray import Actor, RayError
from tests.unit.sessions.test_principals import working

pytestmark = pytest.mark.anyio

RAY: Any = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError))
ADA = Caller("ada", "default", Principal("ada", quotas=Quotas(sessions=2, asleep=2, cells=3)))


class Node:
    """A node's part in quotas, with fake kernels."""

    def __init__(self, name: str, registry: Registry, nodes: dict[str, Node], folder: Path) -> None:
        self.name = name
        self.registry = registry
        self.lost = False
        self.clock = FakeClock()
        self.others = FleetUsage(name, Actor(registry), RAY, lambda node: Actor(nodes[node]))
        self.manager: SessionManager = new_manager(
            folder / name, FakeSource(), self.clock, others=self.others
        )
        nodes[name] = self

    async def idle_s(self, principal: str, kind: str) -> float | None:
        if self.lost:
            raise RayError("lost")
        await self.registry.use(self.name, rows_of(self.manager.admission.uses()))
        return self.manager.admission.idle_s(principal, kind)

    async def evict_one(self, principal: str, kind: str) -> bool:
        done = await self.manager.admission.evict_one(principal, kind)
        await self.registry.use(self.name, rows_of(self.manager.admission.uses()))
        return done

    async def renew(self) -> None:
        member = Member(self.name, f"life of {self.name}")
        held, uses = await self.registry.renew(member.row(), rows_of(self.manager.admission.uses()))
        assert held
        self.others.update(uses)

    async def opened(self) -> Session:
        return await self.manager.create(ADA)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    monkeypatch.setattr(registry_module, "boottime", found)
    return found


@asynccontextmanager
async def two(folder: Path, clock: FakeClock) -> AsyncIterator[tuple[Node, Node]]:
    registry = Registry()
    clock.now += RENEW_S + MARGIN_S
    nodes: dict[str, Node] = {}
    made = Node("one", registry, nodes, folder), Node("two", registry, nodes, folder)
    async with AsyncExitStack() as stack:
        for each in made:
            await registry.join(Member(each.name, f"life of {each.name}").row())
            await stack.enter_async_context(each.manager.running())
        yield made
        assert registry._expiring is not None
        registry._expiring.cancel()


def awake(*nodes: Node) -> int:
    return sum(each.lifecycle.awake for node in nodes for each in node.manager.sessions)


async def test_one_session_too_many_sends_the_longest_idle_of_all_nodes_to_sleep(
    tmp_path: Path, clock: FakeClock
) -> None:
    async with two(tmp_path, clock) as (one, other):
        first = await one.opened()
        one.clock.now += 60
        second = await one.opened()
        third = await other.opened()
        assert [each.lifecycle.awake for each in (first, second, third)] == [False, True, True]
        await one.manager.admission.admit(first)
        assert awake(one, other) == 2
        assert first.lifecycle.awake


async def test_sleepers_of_all_nodes_count_and_the_oldest_is_dropped(
    tmp_path: Path, clock: FakeClock
) -> None:
    async with two(tmp_path, clock) as (one, other):
        handles = []
        for node in (one, other, one, other, one):
            for each in (one, other):
                each.clock.now += 10
            handles.append((await node.opened()).handle)
        there = {each.handle for node in (one, other) for each in node.manager.sessions}
        assert there == set(handles[1:])
        assert awake(one, other) == 2


async def test_who_has_all_sessions_in_use_is_refused(tmp_path: Path, clock: FakeClock) -> None:
    async with two(tmp_path, clock) as (one, other):
        for node in (one, other):
            (await node.opened()).submit("wait", 0.0)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(QuotaReached, match="All 2 sessions"):
            await other.opened()
        assert awake(one, other) == 2


async def test_cells_count_as_of_the_last_renewal(tmp_path: Path, clock: FakeClock) -> None:
    async with two(tmp_path, clock) as (one, other):
        await one.opened()
        await other.opened()
        for node in (one, other, one):
            await node.renew()
        assert one.others.use("ada").sessions == 1
        assert one.others.use("ben").sessions == 0


async def test_a_node_that_is_lost_gives_nothing_up_and_stops_nobody(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with two(tmp_path, clock) as (one, other):
        await one.opened()
        one.clock.now += 1000
        one.lost = True
        second = await other.opened()
        with caplog.at_level(logging.WARNING):
            third = await other.opened()
        assert "node one does not answer" in caplog.text
        assert (second.lifecycle.awake, third.lifecycle.awake) == (False, True)


async def test_a_young_registry_waits_until_nodes_have_said_what_they_have(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("kernel_mcp.fleet.registry.asyncio.sleep", sleep)
    registry = Registry()
    registry._members.join(Member("one", "1"))
    assert await registry.claim("one", "ada", "sessions", 1, 1)
    clock.now += RENEW_S + MARGIN_S
    assert await registry.claim("one", "ada", "sessions", 1, 1)
    assert waited == [RENEW_S + MARGIN_S]


async def test_without_a_head_no_session_is_opened_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent:
        async def claim(self, *_: object) -> bool:
            await anyio.sleep_forever()
            return True

    monkeypatch.setattr("kernel_mcp.fleet.usage.ANSWER_S", 0.01)
    others = FleetUsage("one", Actor(Silent()), RAY, lambda _node: None)
    with pytest.raises(FleetUnavailable, match="head of the fleet does not answer"):
        await others.claim("ada", "sessions", 1, 1)


@pytest.mark.parametrize("where", [0, 1], ids=["elsewhere", "here"])
async def test_one_that_cannot_be_put_away_has_the_next_idle_one_give_way(
    where: int, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    hibernate = Session.hibernate

    async def fails(session: Session, reason: str = IDLE) -> bool:
        if session is stuck:
            raise HibernationError("there is no room for its variables")
        return await hibernate(session, reason)

    monkeypatch.setattr(Session, "hibernate", fails)
    async with two(tmp_path, clock) as nodes:
        stuck = await nodes[where].opened()
        nodes[where].clock.now += 60
        second = await nodes[where].opened()
        third = await nodes[1].opened()
        assert [each.lifecycle.awake for each in (stuck, second, third)] == [True, False, True]


async def test_where_none_can_be_put_away_one_of_another_node_is(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    hibernate = Session.hibernate

    async def fails(session: Session, reason: str = IDLE) -> bool:
        if session in stuck:
            raise HibernationError("there is no room for its variables")
        return await hibernate(session, reason)

    stuck: list[Session] = []
    monkeypatch.setattr(Session, "hibernate", fails)
    async with two(tmp_path, clock) as (one, other):
        first, second = await one.opened(), await other.opened()
        stuck.append(first)
        one.clock.now += 60
        third = await other.opened()
        assert [each.lifecycle.awake for each in (first, second, third)] == [True, False, True]
        stuck.append(third)
        with pytest.raises(QuotaReached):
            await one.opened()


async def test_a_session_that_is_about_to_be_there_counts_with_a_renewal(
    tmp_path: Path, clock: FakeClock
) -> None:
    async with two(tmp_path, clock) as (one, other):
        one.manager.principals.seen(ADA.who)
        async with one.manager.admission.reserve("ada"):
            await one.renew()
            for _ in range(2):
                await other.opened()
            assert awake(other) == 1
        await one.renew()
        assert awake(other) == 1
        await other.opened()
        await other.renew()
        assert one.manager.admission.uses() == {}


class Overseen:
    """A node on which one kernel of a principal has some memory."""

    def __init__(self, name: str, registry: object, memory: int) -> None:
        self.name = name
        self.session = working(name, "ada")
        self.meter = self.session.meter
        self.meter.bytes = memory
        self.meter.awake = False
        self.others = FleetUsage(name, Actor(registry), RAY, lambda _node: None)
        principals = Principals(Settings(), self.others)
        principals.seen(Principal("ada", quotas=Quotas(memory=1000)))
        self.overseer = Overseer(principals, lambda: [self.session])

    async def renew(self, registry: Registry) -> None:
        own = Use(memory=self.meter.bytes, largest=self.meter.bytes)
        member = Member(self.name, f"life of {self.name}")
        held, uses = await registry.renew(member.row(), rows_of({"ada": own}))
        assert held
        self.others.update(uses)


@asynccontextmanager
async def overseen(
    memory: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Overseen, Overseen]]:
    """Two nodes that have told of so much memory."""
    monkeypatch.setattr("kernel_mcp.sessions.principals.CHECK_S", 0)
    registry = Registry()
    one, other = (Overseen(name, registry, memory[0]) for name in ("one", "other"))
    for each in (one, other, one):
        await registry.join(Member(each.name, f"life of {each.name}").row())
        await each.renew(registry)
    one.meter.bytes = other.meter.bytes = memory[1]
    async with anyio.create_task_group() as tasks:
        for each in (one, other):
            tasks.start_soon(each.overseer.run)
        yield one, other
        tasks.cancel_scope.cancel()
    assert registry._expiring is not None
    registry._expiring.cancel()


async def test_of_two_kernels_that_grow_at_once_on_two_nodes_one_ends(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with overseen((400, 700), monkeypatch) as nodes:
        with anyio.fail_after(30):
            while not any(each.meter.killed for each in nodes):
                await anyio.sleep(0)
        (ended,) = (each for each in nodes if each.meter.killed)
        ended.session.kernel.exit = 9
        for _ in range(100):
            await anyio.sleep(0)
        assert sum(bool(each.meter.killed) for each in nodes) == 1


async def test_where_the_head_says_nothing_a_kernel_ends_that_alone_has_too_much(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> bool:
        raise RayError("lost")

    monkeypatch.setattr(Registry, "gives_way", nothing)
    for most, count in ((700, 0), (1001, 2)):
        async with overseen((400, most), monkeypatch) as nodes:
            for _ in range(100):
                await anyio.sleep(0)
            assert sum(bool(each.meter.killed) for each in nodes) == count
