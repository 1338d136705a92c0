"""Lookup of sessions, remains of ended ones, and which are idle by the clock."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.errors import InputError, SessionGone, SessionNotFound
from kernel_mcp.sessions import tombstones as module
from kernel_mcp.sessions.cell import Status
from kernel_mcp.sessions.directory import PROCESSORS, Caller
from kernel_mcp.sessions.idle_hibernator import IdleHibernator
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.storage import SCRIPT
from tests.unit.fake_kernels import FakeClock, FakeSource, new_manager

pytestmark = [pytest.mark.anyio]


ME, OTHER = Caller(), Caller(principal="other")


async def test_a_caller_without_a_handle_has_one_session_and_others_have_their_own(
    tmp_path: Path,
) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        assert manager.directory.find(ME, "") is None
        mine = await manager.resolve(ME, "")
        assert await manager.resolve(ME, "") is manager.directory.find(ME, "") is mine
        theirs = await manager.resolve(OTHER, "")
        further = await manager.create(ME, name="further")
        assert len({mine.handle, theirs.handle, further.handle}) == 3
        assert manager.directory.owned_by(ME.principal) == [mine, further]
        assert manager.sessions == [mine, theirs, further]
        nameless = Caller(default="")
        assert await manager.resolve(nameless, "") is not await manager.resolve(nameless, "")


async def test_calls_at_the_same_time_share_one_default_session(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(manager.resolve, ME, "")
        assert len(manager.sessions) == 1


async def test_sessions_that_begin_count_as_busy(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running(), anyio.create_task_group() as tasks:
        async with manager.admission._one_at_a_time:
            for _ in range(3):
                tasks.start_soon(manager.create, ME)
            await anyio.wait_all_tasks_blocked()
            assert manager.directory.busy() == 3 / PROCESSORS
        await anyio.wait_all_tasks_blocked()
        assert manager.directory.busy() == 0
        session = manager.sessions[0]
        session.scheduler.begin()
        assert manager.directory.busy() == 1 / PROCESSORS
        await session.scheduler.begun.wait()
        assert manager.directory.busy() == 0


async def test_a_foreign_handle_is_as_unknown_as_one_that_never_was(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        theirs = await manager.create(OTHER)
        await run(theirs, "x = 1")
        texts = []
        for closed in (False, True):
            if closed:
                await manager.close(theirs)
            for handle in (theirs.handle, "s-none"):
                with pytest.raises(SessionNotFound) as refused:
                    await manager.resolve(ME, handle)
                texts.append(str(refused.value).replace(repr(handle), "HANDLE"))
                assert manager.directory.find(ME, handle) is None
        assert len(set(texts)) == 1
        with pytest.raises(SessionNotFound) as refused:
            await manager.resolve(ME, "s" * 1000)
        assert len(str(refused.value)) < 300


async def test_the_owner_of_a_session_that_has_ended_learns_why_until_it_is_known(
    tmp_path: Path,
) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        session = await manager.create(ME)
        await run(session, "x = 1")
        await manager.close(session, "was ended by a test")
        with pytest.raises(SessionGone, match="was ended by a test: its variables and") as gone:
            await manager.resolve(ME, session.handle)
        assert gone.value.lost == ("x",)
        manager.tombstones.mark_delivered(session.handle)
        with pytest.raises(SessionNotFound, match="never yours"):
            await manager.resolve(ME, session.handle)
        manager.tombstones.mark_undelivered(session.handle)
        with pytest.raises(SessionGone):
            await manager.resolve(ME, session.handle)


async def test_the_reason_is_told_while_a_session_is_still_ending(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        session = await manager.create(ME)
        async with session.turn:
            manager.directory.note_end(session, "has expired by a test")
            session.close()
            with pytest.raises(SessionGone, match="has expired by a test"):
                await manager.resolve(ME, session.handle)


async def test_a_new_default_session_tells_what_went_with_the_former(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        former = await manager.resolve(ME, "")
        await run(former, "x = 1")
        await manager.close(former, "was ended by a test")
        (notice,) = (await manager.resolve(ME, "")).notifications.pending
        assert "The default session was ended by a test" in notice.text
        assert notice.loss is not None
        assert notice.loss.names == ("x",)


async def test_ends_that_are_remembered_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        sessions = [await manager.create(ME) for _ in range(3)]
        for session in sessions:
            await manager.close(session)
        for session, error in zip(
            sessions, (SessionNotFound, SessionGone, SessionGone), strict=True
        ):
            with pytest.raises(SessionNotFound) as told:
                await manager.resolve(ME, session.handle)
            assert type(told.value) is error


@pytest.mark.parametrize("keep", [False, True])
async def test_only_a_workspace_outlives_its_session_where_files_are_kept(
    tmp_path: Path, keep: bool
) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock(), keep=keep)
    async with manager.running():
        session = await manager.create(ME)
        folders = {place: tmp_path / place / session.handle for place in "wrp"}
        folders["w"] = session.request.workspace
        for place in "wr":  # what the session's own packages are is no secret
            assert folders[place].stat().st_mode & 0o077 == 0, place
        (folders["w"] / "a.txt").write_text("a")
        await manager.close(session)
        assert {place: folder.exists() for place, folder in folders.items()} == {
            "w": keep, "r": False, "p": False,
        }  # fmt: skip
        assert not manager.sessions


async def test_kept_workspaces_are_found_again_by_the_names_of_sessions(tmp_path: Path) -> None:
    for round_ in range(2):
        manager = new_manager(tmp_path, FakeSource(), FakeClock(), keep=True)
        async with manager.running():
            default = await manager.resolve(ME, "")
            named = await manager.create(ME, name="etl")
            unnamed = await manager.create(ME)
            assert default.request.workspace == tmp_path / "w" / "default"
            assert named.request.workspace == tmp_path / "w" / "etl"
            assert unnamed.name == f"session-{round_ + 1}"  # it can be had by that name
            assert unnamed.request.workspace == tmp_path / "w" / unnamed.name
            for session in (default, named, unnamed):
                found = [entry.name for entry in session.request.workspace.iterdir()]
                assert found == (["kept"] if round_ and session is not unnamed else [])
                (session.request.workspace / "kept").touch()
            again = await manager.resolve(ME, "etl")
            assert again is named
            await manager.close(unnamed)
            reopened = await manager.create(ME, name=unnamed.name)
            assert (reopened.request.workspace / "kept").exists()


async def test_two_servers_never_share_a_workspace(tmp_path: Path) -> None:
    first = new_manager(tmp_path, FakeSource(), FakeClock(), keep=True)
    second = new_manager(tmp_path, FakeSource(), FakeClock(), keep=True)
    async with first.running(), second.running():
        await first.create(ME, name="etl")
        with pytest.raises(InputError, match="in use by another session or server"):
            await second.create(ME, name="etl")
        one, other = await first.resolve(ME, ""), await second.resolve(ME, "")
        assert one.request.workspace.name == "default"
        assert other.request.workspace.name == "default-1"


async def test_the_end_of_the_server_closes_all_sessions(tmp_path: Path) -> None:
    source = FakeSource()
    manager = new_manager(tmp_path, source, FakeClock())
    async with manager.running():
        cells = [(await manager.create(ME)).submit("wait", 0) for _ in range(3)]
        with anyio.fail_after(60):
            while len(source.kernels) < 3:
                await anyio.lowlevel.checkpoint()
    assert [cell.status for cell in cells] == [Status.KILLED] * 3
    assert not source.living
    assert not manager.sessions
    assert not any((tmp_path / "w").iterdir())


NO_NAMES = (
    "n" * 65,
    "a b",
    "a/b",
    "..",
    ".",
    "\u00e4",
    "a\n",
    "s-" + "x" * 12,
    "(script)x",
    "a%41",
)


async def test_what_is_no_name_is_refused(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        for name in NO_NAMES:
            with pytest.raises(InputError, match="cannot be the name of a session"):
                await manager.create(ME, name=name)
        assert not manager.sessions
        for name in ("n" * 64, "a.b-c_D", "s-short", "...a", "7"):
            made = await manager.create(ME, name=name)
            assert await manager.resolve(ME, name) is manager.directory.find(ME, name) is made


async def test_a_name_is_one_session_of_its_owner_at_a_time(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        mine = await manager.create(ME, name="b")
        theirs = await manager.create(OTHER, name="b")
        assert await manager.resolve(ME, "b") is mine
        assert await manager.resolve(OTHER, "b") is theirs
        with pytest.raises(InputError, match=r"named 'b' already. Use it by session='b', end it"):
            await manager.create(ME, name="b")
        assert manager.directory.owned_by(ME.principal) == [mine]
        mine.close()
        with pytest.raises(SessionNotFound):
            mine.submit("x = 1", 1)
        later = await manager.create(ME, name="b")  # before the files of the first are gone
        await manager.close(mine)
        assert await manager.resolve(ME, "b") is later


async def test_of_calls_at_the_same_time_one_gets_the_name(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    refused = []

    async def create() -> None:
        try:
            await manager.create(ME, name="b")
        except InputError as error:
            refused.append(error)

    async with manager.running():
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(create)
        assert (len(manager.sessions), len(refused)) == (1, 3)


async def test_sessions_of_scripts_share_a_name_by_which_none_is_found(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        for _ in range(2):
            await manager.create(ME, name=SCRIPT)
        with pytest.raises(SessionNotFound):
            await manager.resolve(ME, SCRIPT)


async def test_the_name_of_an_ended_session_gets_the_error_of_its_handle(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        for end in ("is told", "is known", "has a successor"):
            session = await manager.create(ME, name="b-7")
            await run(session, "x = 1")
            await manager.close(session, "was ended by a test")
            texts = []
            if end == "is known":
                manager.tombstones.mark_delivered(session.handle)
            for known_as in ("b-7", session.handle):
                with pytest.raises(SessionNotFound) as refused:
                    await manager.resolve(ME, known_as)
                texts.append(str(refused.value).replace(known_as, "?"))
                assert isinstance(refused.value, SessionGone) == (end != "is known")
            assert texts[0] == texts[1]
            with pytest.raises(SessionNotFound, match="never yours"):
                await manager.resolve(OTHER, "b-7")
        successor = await manager.create(ME, name="b-7")
        assert await manager.resolve(ME, "b-7") is successor
        (notice,) = successor.notifications.pending
        assert notice.text.startswith("The session 'b-7' was ended by a test")
        assert notice.loss is not None
        await manager.close(successor)
        manager.tombstones.mark_delivered(successor.handle)
        with pytest.raises(SessionNotFound, match="never yours"):
            await manager.resolve(ME, "b-7")
        with pytest.raises(SessionGone):
            await manager.resolve(ME, session.handle)


async def test_a_session_expires_after_its_idle_time_and_not_before(tmp_path: Path) -> None:
    clock, source = FakeClock(), FakeSource()
    manager = new_manager(tmp_path, source, clock)
    async with manager.running():
        session = await manager.create(Caller())
        hibernator = IdleHibernator(manager, 60, clock)
        clock.now += 59
        assert hibernator.expired() == []
        clock.now += 1
        assert hibernator.expired() == [session]


async def test_the_longest_idle_session_comes_first(tmp_path: Path) -> None:
    clock, source = FakeClock(), FakeSource()
    manager = new_manager(tmp_path, source, clock)
    async with manager.running():
        first = await manager.create(Caller())
        clock.now += 5
        second = await manager.create(Caller())
        clock.now += 100
        assert IdleHibernator(manager, 60, clock).expired() == [first, second]


async def test_a_busy_session_is_never_idle(tmp_path: Path) -> None:
    clock, source = FakeClock(), FakeSource()
    manager = new_manager(tmp_path, source, clock)
    async with manager.running():
        session = await manager.create(Caller())
        cell = session.submit("wait", 0)
        clock.now += 1000
        assert IdleHibernator(manager, 60, clock).expired() == []
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
        tasks.start_soon(IdleHibernator(manager, 60, clock).hibernate_expired)
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
        hibernator = IdleHibernator(manager, 60, clock)
        clock.now += 60
        pauses = []
        for _ in range(8):
            assert hibernator.expired() == [session]
            await hibernator.hibernate_expired()
            assert session.state == "idle"
            pauses.append(manager.admission.retry_at(session) - clock.now)
            clock.now = manager.admission.retry_at(session)
        assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600]
        await run(session, "y = 1")
        clock.now += 60
        await hibernator.hibernate_expired()
        assert manager.admission.retry_at(session) - clock.now == 60


async def run(session: Session, code: str) -> None:
    with anyio.fail_after(60):
        await session.submit(code, 0).finished.wait()
