"""Operations on a session that meet: each looks again once it has waited for the others."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.sessions import branches
from kernel_mcp.sessions.family import BranchOrigin
from kernel_mcp.sessions.hibernation import IDLE, MAKE_ROOM
from kernel_mcp.sessions.idle_hibernator import IdleHibernator
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.store_entry import StoreEntry
from tests.unit.fake_kernels import FakeClock, FakeSource, new_manager
from tests.unit.sessions.notebook import notebook
from tests.unit.sessions.test_kept import ME, server
from tests.unit.sessions.test_kernel_admission import run, states, used_sessions

pytestmark = [pytest.mark.anyio]


@contextmanager
def slow_tidying(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk on which the end of a save takes until the event is set."""
    done, tidy = threading.Event(), StoreEntry.tidy

    def slowly(entry: StoreEntry) -> None:
        done.wait(30)
        tidy(entry)

    monkeypatch.setattr(StoreEntry, "tidy", slowly)
    try:
        yield done
    finally:
        done.set()


async def test_two_hibernations_at_once_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path) as only:
        await only.run("x = 41")
        session = only.manager.sessions[0]
        only.source.dump = "hang"
        with slow_tidying(monkeypatch) as disk:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.persistence.save)
                await only.source.dumping.wait()
                session.lifecycle.cancel_hibernation()  # which leaves the save with its tidying
                only.source.dump = ""
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(session.hibernate)
                tasks.start_soon(session.hibernate, MAKE_ROOM)
                await anyio.wait_all_tasks_blocked()
                assert session.state == "idle"
                disk.set()
        assert session.state == "hibernated"
        assert session.kernel_state.pending_restore is not None
        assert session.kernel_state.pending_restore.back == ["x"]
        cell = await only.run("y = 1")
        assert only.variables == {"x": "41", "y": "1"}
        assert cell.meta("s", omitted=0, outputs=[])["lost"] == []


async def test_a_session_that_sleeps_is_not_hibernated_again(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("x = 41")
        await nb.session.persistence._lock.acquire()
        done: list[bool] = []

        async def hibernate(reason: str) -> None:
            done.append(await nb.session.hibernate(reason))

        async with anyio.create_task_group() as tasks:
            for reason in (IDLE, MAKE_ROOM, IDLE):
                tasks.start_soon(hibernate, reason)
            await anyio.wait_all_tasks_blocked()
            nb.session.persistence._lock.release()
        assert sorted(done) == [False, False, True]
        await nb.run("y = 1")
        assert nb.source.kernels[-1].variables == {"x": "41", "y": "1"}


async def _reset(session: Session) -> None:
    await session.reset(packages=False, files=False)


async def _cell(session: Session) -> None:
    cell = session.submit("y = 1", 0.0)
    await cell.finished.wait()


async def _kernel(session: Session) -> None:
    await session.ensure_kernel()


@pytest.mark.parametrize("use", [_reset, _cell, _kernel])
async def test_a_hibernation_that_waits_gives_way_to_who_uses_the_session(
    tmp_path: Path, use: Callable[[Session], Coroutine[Any, Any, None]]
) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("x = 41")
        await nb.session.persistence._lock.acquire()
        done: list[bool] = []

        async def hibernate() -> None:
            done.append(await nb.session.hibernate(MAKE_ROOM))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hibernate)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(use, nb.session)
            await anyio.wait_all_tasks_blocked()
            nb.session.persistence._lock.release()
        assert done == [False]
        assert nb.session.lifecycle.awake
        assert nb.session.state in ("idle", "new")


async def test_a_session_that_is_being_reset_is_not_hibernated_meanwhile(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("x = 41")
        starting, go_on = anyio.Event(), anyio.Event()
        start = nb.source.start

        async def slowly(request: KernelRequest, progress: ProgressCallback) -> Kernel:
            starting.set()
            await go_on.wait()
            return await start(request, progress)

        nb.source.start = slowly  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_reset, nb.session)
            await starting.wait()
            assert not nb.session.can_hibernate
            assert not await nb.session.hibernate(MAKE_ROOM)
            go_on.set()
        assert nb.session.state == "idle"
        assert nb.session.lifecycle.awake


async def test_a_save_that_has_waited_is_of_the_kernel_of_now(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        session = only.manager.sessions[0]
        await session.persistence._lock.acquire()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.persistence.save)
            await anyio.wait_all_tasks_blocked()
            session.kernel_state.lose("It was lost", session.kernel_state.lost_state("a test"))
            await session.lifecycle.forget(None)
            await only.run("b = 2", session)
            session.persistence._lock.release()
        assert session.persistence.entry is not None
        assert session.persistence.entry.saved is not None
        assert session.persistence.entry.saved.names == ["b"]


async def test_a_session_that_wakes_is_not_dropped_as_surplus(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, max_sessions=3, quotas=Quotas(asleep=1))
    async with manager.running():
        first, woken, _ = sessions = await used_sessions(manager, clock, 3)
        for session in sessions:
            assert await session.hibernate()
        drop = manager.admission._drop

        async def slowly(session: Session) -> None:
            await drop(session)
            await run(woken, "y = 1")

        manager.admission._drop = slowly
        await manager.admission._drop_surplus(ME.principal)
        assert first not in manager.sessions
        assert woken.state == "idle"


async def _family(manager: SessionManager, clock: FakeClock) -> tuple[Session, Session]:
    """A session and a branch of it, with a variable each."""
    root, branch = await used_sessions(manager, clock, 2)
    branch.family, branch.origin = root.family, BranchOrigin(root.handle, "", (1,))
    root.family.members.append(branch)
    return root, branch


async def test_a_sleeping_branch_of_an_awake_session_takes_no_room(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, max_sessions=2)
    async with manager.running():
        root, branch = await _family(manager, clock)
        other = await manager.create(ME)
        root.submit("wait", 0.0)
        other.submit("wait", 0.0)
        await anyio.wait_all_tasks_blocked()
        assert not await branch.hibernate(MAKE_ROOM)  # its family is in use
        await root.scheduler.interrupt()
        assert await branch.hibernate(MAKE_ROOM)
        await run(branch, "y = 1")
        assert source.kernels[-1].variables == {"x": "1", "y": "1"}
        assert states([root, branch, other]) == ["idle", "idle", "busy"]


async def test_a_sleeping_branch_of_an_awake_session_can_be_adopted(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, max_sessions=2)
    async with manager.running():
        root, branch = await _family(manager, clock)
        other = await manager.create(ME)
        other.submit("wait", 0.0)
        await anyio.wait_all_tasks_blocked()
        assert await branch.hibernate(MAKE_ROOM)
        adopted, _ = await manager.branches.adopt(branch)
        assert adopted is root
        await run(root, "y = 1")
        assert source.kernels[-1].variables == {"x": "1", "y": "1"}


async def _fails_after_a_close(session: Session, work: Callable[[], Awaitable[object]]) -> str:
    """The error of work that waits for the turn of a session which is closed meanwhile."""
    failures: list[str] = []

    async def fails() -> None:
        with pytest.raises(KernelMcpError) as failure:
            await work()
        failures.append(str(failure.value))

    await session.turn.acquire()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fails)
        await anyio.wait_all_tasks_blocked()
        session.close()
        session.turn.release()
    return failures[0]


async def test_a_session_that_was_closed_meanwhile_adopts_nothing(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, max_sessions=2)
    async with manager.running():
        root, branch = await _family(manager, clock)
        failure = await _fails_after_a_close(root, lambda: manager.branches.adopt(branch))
        assert "closed meanwhile" in failure
        await run(branch, "y = 1")
        assert source.kernels[-1].variables == {"x": "1", "y": "1"}


async def test_a_session_that_was_closed_meanwhile_has_no_branches(tmp_path: Path) -> None:
    async with notebook(tmp_path) as nb:
        await nb.run("x = 1")
        begin = partial(branches.begin, nb.session, ["s-aaaaaaaaaaaa"])
        assert "closed meanwhile" in await _fails_after_a_close(nb.session, begin)


async def test_a_new_session_waits_for_one_that_the_idle_timer_puts_to_sleep(
    tmp_path: Path,
) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, max_sessions=1)
    async with manager.running():
        (only,) = await used_sessions(manager, clock, 1)
        starting, go_on = anyio.Event(), anyio.Event()
        start = source.start

        async def slowly(request: KernelRequest, progress: ProgressCallback) -> Kernel:
            starting.set()
            await go_on.wait()
            return await start(request, progress)

        source.start = slowly  # type: ignore[method-assign]
        clock.now += 100
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(IdleHibernator(manager, 60, clock).hibernate_expired)
            await starting.wait()
            tasks.start_soon(manager.create, ME)
            await anyio.wait_all_tasks_blocked()
            go_on.set()
        assert states(manager.sessions) == ["hibernated", "new"]
        assert only.kernel_state.pending_restore is not None
        assert only.kernel_state.pending_restore.back == ["x"]


async def test_a_new_session_waits_for_one_that_saves_itself(tmp_path: Path) -> None:
    source, clock = FakeSource(), FakeClock()
    manager = new_manager(tmp_path, source, clock, max_sessions=1)
    async with manager.running():
        (only,) = await used_sessions(manager, clock, 1)
        await only.turn.acquire()  # as for a save, a checkpoint or a question
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.create, ME)
            await anyio.wait_all_tasks_blocked()
            only.turn.release()
        assert states(manager.sessions) == ["hibernated", "new"]
