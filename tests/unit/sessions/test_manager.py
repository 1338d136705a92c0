"""Idle sessions are found by the clock; busy ones never are."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.sessions.manager import Caller, Reaper
from kernel_mcp.sessions.session import Session
from tests.unit.fake_kernels import FakeClock, FakeSource, new_manager

pytestmark = [pytest.mark.anyio]


async def test_a_session_expires_after_its_idle_time_and_not_before(tmp_path: Path) -> None:
    clock, source = FakeClock(), FakeSource()
    manager = new_manager(tmp_path, source, clock)
    async with manager.running():
        session = await manager.create(Caller())
        reaper = Reaper(manager, 60, clock)
        clock.now += 59
        assert reaper.expired() == []
        clock.now += 1
        assert reaper.expired() == [session]


async def test_the_longest_idle_session_comes_first(tmp_path: Path) -> None:
    clock, source = FakeClock(), FakeSource()
    manager = new_manager(tmp_path, source, clock)
    async with manager.running():
        first = await manager.create(Caller())
        clock.now += 5
        second = await manager.create(Caller())
        clock.now += 100
        assert Reaper(manager, 60, clock).expired() == [first, second]


async def test_a_busy_session_is_never_idle(tmp_path: Path) -> None:
    clock, source = FakeClock(), FakeSource()
    manager = new_manager(tmp_path, source, clock)
    async with manager.running():
        session = await manager.create(Caller())
        cell = session.submit("wait", 0)
        clock.now += 1000
        assert Reaper(manager, 60, clock).expired() == []
        with anyio.fail_after(60):
            while not source.kernels:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            source.kernels[0].interrupt()
            await cell.finished.wait()


async def test_a_session_that_does_not_go_to_sleep_holds_up_no_other(tmp_path: Path) -> None:
    clock, source = FakeClock(), FakeSource()
    manager = new_manager(tmp_path, source, clock)
    async with manager.running(), anyio.create_task_group() as tasks:
        stubborn, honest = [await manager.create(Caller()) for _ in range(2)]
        for session in (stubborn, honest):
            await session.submit("a = 1", 0).finished.wait()
        source.kernels[0]._source = FakeSource()
        source.kernels[0]._source.dump = "stuck"
        clock.now += 100
        tasks.start_soon(Reaper(manager, 60, clock).collect)
        with anyio.fail_after(60):
            await source.kernels[0]._source.dumping.wait()
            while honest.state != "hibernated":
                await anyio.lowlevel.checkpoint()
        assert stubborn.state != "hibernated"
        tasks.cancel_scope.cancel()


async def test_a_session_that_would_lose_something_is_asked_ever_more_rarely(
    tmp_path: Path,
) -> None:
    clock, source = FakeClock(), FakeSource()
    source.unpicklable["x"] = "thread lock"
    manager = new_manager(tmp_path, source, clock)
    async with manager.running():
        session = await manager.create(Caller())
        await run(session, "x = 1")
        reaper = Reaper(manager, 60, clock)
        clock.now += 60
        pauses = []
        for _ in range(8):
            assert reaper.expired() == [session]
            await reaper.collect()
            assert session.state == "idle"
            pauses.append(session.spared_until - clock.now)
            clock.now = session.spared_until
        assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600]
        await run(session, "y = 1")
        clock.now += 60
        await reaper.collect()
        assert session.spared_until - clock.now == 60


async def run(session: Session, code: str) -> None:
    with anyio.fail_after(60):
        await session.submit(code, 0).finished.wait()
