"""When a session is saved, and what its notices say of saves that fail or are rare."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from kernel_mcp.errors import HibernationError
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.session_save import Headroom
from tests.unit.fake_kernels import FakeClock, FakeSource, new_manager
from tests.unit.sessions.test_kept import server

pytestmark = [pytest.mark.anyio]


async def test_the_first_of_several_failed_saves_is_reported(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        session = only.manager.sessions[0]
        session.persistence.unsaved("the disk is full")
        session.persistence.unsaved("the disk is full")
        (notice,) = session.notifications.pending
        assert "could not be saved in the background: the disk is full" in notice.text
        assert session.persistence.trouble == "the disk is full"
        session.persistence.unsaved("")
        assert session.persistence.trouble == ""
        session.persistence.unsaved("again")
        assert len(session.notifications.pending) == 2


async def test_a_pause_between_saves_is_reported_once_until_it_ends(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        session = only.manager.sessions[0]
        for pause_s, reported in ((100.0, 1), (200.0, 1), (0.0, 1), (100.0, 2)):
            session.persistence.rarely_saved(pause_s)
            assert session.persistence.saved_every_s == pause_s
            assert len(session.notifications.pending) == reported


async def test_a_variable_without_room_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path) as only:
        await only.run("large = " + "x" * 100)
        session = only.manager.sessions[0]
        monkeypatch.setattr(session.persistence._save, "room", lambda: Headroom(50, 10**9))
        await only.save()
        (notice,) = session.notifications.pending
        assert "no room to save large in the background" in notice.text
        await only.run("b = 1")
        await only.save()
        assert session.notifications.pending == ()


async def test_only_a_changed_session_that_is_persisted_is_to_be_saved(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        session = only.manager.sessions[0]
        assert session.persistence.changed
        await only.save()
        assert not session.persistence.changed
        await only.run("b = 1")
        assert session.persistence.changed
        session.close()
        assert not session.persistence.changed
    manager = new_manager(tmp_path / "other", FakeSource(), FakeClock())
    async with manager.running():
        unpersisted = await manager.create(Caller())
        cell = unpersisted.submit("a = 1", 0.0)
        await cell.finished.wait()
        assert not unpersisted.persistence.changed
        assert await unpersisted.persistence.save() is None


async def test_a_save_at_the_end_fails_if_a_variable_has_no_room(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("large = " + "x" * 100)
        session = only.manager.sessions[0]
        with pytest.raises(HibernationError, match="too large"):
            await session.persistence.save(most_bytes=50)
        assert await session.persistence.save() is not None


async def test_whoever_stops_saves_waits_for_the_one_that_runs(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        session, stopped = only.manager.sessions[0], anyio.Event()
        only.source.dump = "hang"

        async def stop() -> None:
            async with session.persistence.paused():
                stopped.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.persistence.save)
            await only.source.dumping.wait()
            tasks.start_soon(stop)
            with anyio.fail_after(30):
                await stopped.wait()
        assert session.persistence.changed
        only.source.dump = ""
