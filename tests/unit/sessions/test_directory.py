"""Which sessions a directory finds, for whom, and in which of them code runs."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from kernel_mcp.errors import InputError
from kernel_mcp.sessions import directory as module
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import ResponseContext
from kernel_mcp.sessions.session import Session
from tests.unit.fake_kernels import FakeClock, FakeSource, Handed, new_manager

pytestmark = [pytest.mark.anyio]

ME = Caller()


async def run(session: Session, code: str) -> None:
    cell = session.submit(code, 0.0)
    await cell.finished.wait()


async def test_a_session_that_is_default_no_more_is_found_by_its_handle(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        former = await manager.resolve(ME, "")
        manager.directory.forget_default("nobody", ME.default)
        assert manager.directory.find(ME, "") is former
        manager.directory.forget_default(ME.principal, ME.default)
        assert manager.directory.find(ME, "") is None
        assert manager.directory.find(ME, former.handle) is former
        assert await manager.resolve(ME, "") is not former


async def test_only_so_many_clients_of_a_session_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CLIENTS", 2)
    clock = FakeClock()
    manager = new_manager(tmp_path, FakeSource(), clock)
    async with manager.running():
        told = []
        for client in ("a", "b", "a", "c", "b"):
            caller = Caller(client=client, response=ResponseContext(Handed()))
            await manager.resolve(caller, "")
            told.append(bool(caller.response.remarks))
            clock.now += 60
        assert told == [False, True, False, True, True]


async def test_code_counts_as_running_for_a_while_after_its_end(tmp_path: Path) -> None:
    clock = FakeClock()
    manager = new_manager(tmp_path, FakeSource(), clock)
    async with manager.running():
        session, other = await manager.create(ME), await manager.create(ME)
        assert manager.directory.at_work() == []
        await run(session, "a = 1")
        assert manager.directory.at_work() == [session]
        clock.now += module.JUST_NOW_S
        assert manager.directory.at_work() == []
        other.submit("wait", 0.0)
        await anyio.wait_all_tasks_blocked()
        clock.now += 60
        assert manager.directory.at_work() == [other]
        await other.scheduler.interrupt()
        assert not manager.directory.was_at_work(60)
        await manager.close(other)
        assert manager.directory.was_at_work(60)
        clock.now += 60 + module.JUST_NOW_S
        assert not manager.directory.was_at_work(60)


async def test_a_name_is_refused_to_a_second_session_until_the_first_has_ended(
    tmp_path: Path,
) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        first = await manager.create(ME, name="one")
        assert manager.directory.find(ME, "one") is first
        assert manager.directory.find(Caller(principal="other"), "one") is None
        with pytest.raises(InputError, match="already"):
            await manager.create(ME, name="one")
        await manager.close(first)
        assert manager.directory.find(ME, "one") is None
        assert (await manager.create(ME, name="one")).handle != first.handle
