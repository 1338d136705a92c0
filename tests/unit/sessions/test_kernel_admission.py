"""Sessions that are hibernated or dropped when there are too many."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from kernel_mcp.config.persist import Persist
from kernel_mcp.config.quotas import Quotas
from kernel_mcp.errors import LaunchError, SessionLimitReached, SessionNotFound
from kernel_mcp.sessions.capacity import Bound, Capacity
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.events import Events
from kernel_mcp.sessions.idle_hibernator import IdleHibernator
from kernel_mcp.sessions.kernel_admission import AWAKE
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session
from tests.unit.fake_kernels import FakeClock, FakeSource, deliver, new_manager
from tests.unit.sessions.test_events import Heard

pytestmark = [pytest.mark.anyio]

ME = Caller()


async def run(session: Session, code: str) -> None:
    cell = session.submit(code, 0.0)
    with anyio.fail_after(60):
        await cell.finished.wait()
    if cell.error is not None:
        raise cell.error


async def used_sessions(manager: SessionManager, clock: FakeClock, count: int) -> list[Session]:
    """Sessions with a variable each, the first one idle for longest."""
    found = []
    for number in range(count):
        found.append(await manager.create(ME))
        await run(found[-1], f"x = {number}")
        clock.now += 10
    return found


def states(sessions: list[Session]) -> list[str]:
    return [session.state for session in sessions]


async def test_one_session_too_many_sends_the_longest_idle_one_to_sleep(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, max_sessions=2)
    async with manager.running():
        first, second = await used_sessions(manager, clock, 2)
        await run(first, "y = 1")
        third = await manager.create(ME)
        assert states([first, second, third]) == ["idle", "hibernated", "new"]
        clock.now += 10
        await run(third, "w = 1")
        cell = second.submit("z = 1", 0.0)
        with anyio.fail_after(60):
            await cell.finished.wait()
        deliver(second, cell)
        assert "to make room for another session. Back: x (1)" in cell.notices[0]
        assert states([first, second, third]) == ["hibernated", "idle", "idle"]


async def test_a_new_session_fails_only_when_none_is_idle(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, max_sessions=2)
    async with manager.running():
        busy = await used_sessions(manager, clock, 2)
        for session in busy:
            session.submit("wait", 0.0)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(SessionLimitReached, match="none of them is idle and can"):
            await manager.create(ME)
        await busy[1].scheduler.interrupt()
        await manager.create(ME)
        assert states(busy) == ["busy", "hibernated"]


async def test_a_sleeping_session_is_told_when_there_is_no_room_to_wake(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, max_sessions=1)
    async with manager.running():
        first, second = await used_sessions(manager, clock, 2)
        second.submit("wait", 0.0)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(SessionLimitReached):
            await run(first, "y = 1")
        assert first.state == "hibernated"
        await second.scheduler.interrupt()
        await run(first, "y = 1")
        assert states([first, second]) == ["idle", "hibernated"]


async def test_sessions_asked_for_at_once_do_not_exceed_the_limit(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, max_sessions=3)
    async with manager.running():
        sessions = await used_sessions(manager, clock, 3)

        async def one_more() -> None:
            sessions.append(await manager.create(ME))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one_more)
        assert sum(session.lifecycle.awake for session in sessions) == 3
        assert states(sessions[:3]) == ["hibernated", "idle", "idle"]
        for session in sessions[3:]:
            await run(session, "y = 1")
        assert states(sessions[:3]) == ["hibernated"] * 3


async def test_a_session_that_cannot_be_saved_now_makes_way_for_the_next(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, max_sessions=2)
    async with manager.running():
        first, second = await used_sessions(manager, clock, 2)
        source.refuse = "beside"
        with pytest.raises(SessionLimitReached):
            await manager.create(ME)
        assert states([first, second]) == ["idle", "idle"]


async def test_the_oldest_sleepers_are_dropped_beyond_the_number_kept(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, quotas=Quotas(asleep=2))
    async with manager.running():
        sessions = await used_sessions(manager, clock, 4)
        for session in sessions[:3]:
            clock.now += 1
            await manager.admission.hibernate(session)
        assert states(sessions) == ["closed", "hibernated", "hibernated", "idle"]
        with pytest.raises(SessionNotFound, match="dropped"):
            await manager.resolve(ME, sessions[0].handle)
        assert len(list(tmp_path.rglob("variables-*"))) == 2


async def test_the_oldest_dumps_are_dropped_beyond_the_disk_they_may_take(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, persist=Persist(120, 60.0))
    async with manager.running():
        empty = await manager.create(ME)
        await manager.admission.hibernate(empty)
        sessions = await used_sessions(manager, clock, 4)
        for session in sessions:
            clock.now += 1
            await manager.admission.hibernate(session)
        sizes = [path.stat().st_size for path in tmp_path.rglob("variables-*")]
        assert 0 < sum(sizes) <= 120
        assert states(sessions) == ["closed"] * (4 - len(sizes)) + ["hibernated"] * len(sizes)
        assert empty.state == "hibernated"


@pytest.mark.parametrize("quotas", [Quotas(asleep=0), Quotas()])
async def test_a_quota_of_nothing_is_no_limit(quotas: Quotas, tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock(), quotas=quotas)
    async with manager.running():
        session = await manager.create(ME)
        await run(session, "x = 1")
        assert await manager.admission.hibernate(session)
        assert session.state == "hibernated"


async def test_who_loses_the_default_session_is_told_with_the_next_one(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, quotas=Quotas(asleep=1))
    async with manager.running():
        default = await manager.resolve(ME, "")
        await run(default, "x = 1")
        other = await manager.create(ME)
        await run(other, "x = 1")
        for session in (default, other):
            clock.now += 1
            await manager.admission.hibernate(session)
        assert default.state == "closed"
        fresh = await manager.resolve(ME, "")
        cell = fresh.submit("y = 1", 0.0)
        with anyio.fail_after(60):
            await cell.finished.wait()
        deliver(fresh, cell)
        assert "default session" in cell.notices[0]
        assert "gone" in cell.notices[0]


async def test_closing_a_sleeping_session_removes_what_it_had_saved(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock)
    async with manager.running():
        (session,) = await used_sessions(manager, clock, 1)
        await manager.admission.hibernate(session)
        assert list(tmp_path.rglob("variables-*"))
        await manager.close(session)
        assert not list(tmp_path.rglob("variables-*"))
        assert manager.sessions == []


async def test_the_end_of_the_server_removes_everything(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock)
    async with manager.running():
        for session in await used_sessions(manager, clock, 3):
            await manager.admission.hibernate(session)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert source.living == 0


async def test_the_end_of_the_server_does_not_wait_for_a_dump(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks, manager.running():
            (session,) = await used_sessions(manager, clock, 1)
            source.dump = "hang"
            tasks.start_soon(manager.admission.hibernate, session)
            await source.dumping.wait()
    assert source.living == 0


async def test_what_was_idle_for_long_is_hibernated_and_nothing_else(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock)
    hibernator = IdleHibernator(manager, 15, clock)
    async with manager.running():
        idle, recent, busy = await used_sessions(manager, clock, 3)
        busy.submit("wait", 0.0)
        await anyio.wait_all_tasks_blocked()
        await run(recent, "y = 1")
        clock.now += 14
        await hibernator.hibernate_expired()
        assert states([idle, recent, busy]) == ["hibernated", "idle", "busy"]
        clock.now += 100
        await hibernator.hibernate_expired()
        assert states([idle, recent, busy]) == ["hibernated", "hibernated", "busy"]
        await busy.scheduler.interrupt()


async def test_the_trail_says_why_a_session_was_hibernated(tmp_path: Path) -> None:
    heard, clock = Heard(), FakeClock()
    events = Events(meters=heard)
    manager = new_manager(tmp_path, FakeSource(), clock, events=events, max_sessions=3)
    async with manager.running():
        first, second, third = await used_sessions(manager, clock, 3)
        await manager.create(ME)
        await manager.admission.evict_one(ME.principal, AWAKE)  # this one, as it is empty
        await IdleHibernator(manager, 15, clock).hibernate_expired()
    facts = [facts for event, facts in heard.events if event == "hibernate"]
    assert [(each["reason"], each["idle_s"]) for each in facts] == [
        ("make_room", 30.0),
        ("quota", 0.0),
        ("idle", 20.0),
    ]
    assert states([first, second, third]) == ["closed"] * 3


async def test_a_session_that_could_not_be_saved_is_left_alone_for_a_while(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock)
    hibernator = IdleHibernator(manager, 15, clock)
    async with manager.running():
        (session,) = await used_sessions(manager, clock, 1)
        source.refuse = "beside"
        clock.now += 20
        await hibernator.hibernate_expired()
        assert hibernator.expired() == []
        clock.now += 100
        assert hibernator.expired() == [session]
        with pytest.raises(LaunchError):
            await session.hibernate()


async def test_a_hundred_sessions_that_were_never_used_push_out_none_with_data(
    tmp_path: Path,
) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, max_sessions=3, quotas=Quotas(asleep=2))
    async with manager.running():
        awake, asleep = await used_sessions(manager, clock, 2)
        written = await manager.create(ME)
        await anyio.Path(written.workspace.root / "data.csv").write_text("1,2")
        assert await manager.admission.hibernate(asleep)
        for _ in range(100):
            clock.now += 10
            await manager.create(ME)
        assert awake.state == "idle"
        await run(asleep, "y = 1")
        assert asleep.kernel is not None
        assert (written.workspace.root / "data.csv").exists()
        assert written.handle in [session.handle for session in manager.sessions]


async def test_where_the_system_has_no_room_idle_sessions_make_way_and_others_are_refused(
    tmp_path: Path,
) -> None:
    source, clock = FakeSource(), FakeClock()
    room = Capacity([Bound("the bound", "of them", 5, lambda: source.living, 1, 3, "do this")])
    manager = new_manager(tmp_path, source, clock, capacity=room)
    async with manager.running():
        first, second = await used_sessions(manager, clock, 2)
        third = await manager.create(ME)
        assert states([first, second, third]) == ["hibernated", "idle", "new"]
        cells = [session.submit("wait", 0.0) for session in (second, third)]
        while any(cell.started is None or source.living < 2 for cell in cells):
            await anyio.sleep(0)
        with pytest.raises(SessionLimitReached, match=r"the bound is 5, of which 2.*do this"):
            await manager.create(ME)
        await manager.close(second)
        await manager.create(ME)


async def test_what_the_server_does_before_its_first_session_refuses_none(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    room = Capacity([Bound("the bound", "of them", 40, lambda: 35, 6, 8, "do this")])
    manager = new_manager(tmp_path, source, clock, capacity=room)
    async with manager.running():
        cell = (await manager.create(ME)).submit("wait", 0.0)
        while cell.started is None:
            await anyio.sleep(0)
        with pytest.raises(SessionLimitReached, match=r"the bound is 40, of which 35"):
            await manager.create(ME)
