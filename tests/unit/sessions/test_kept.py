"""Sessions of one server after the other, with kernels that are fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.errors import HibernationError, InputError, InstallError, SessionNotFound
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.output.text import Masks
from kernel_mcp.sessions import manifest
from kernel_mcp.sessions.cell import Cell, Status
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.persistence import Persistence
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.store_entry import SaveFolder
from tests.unit.fake_kernels import FakeClock, FakeKernel, FakeSource, deliver, new_manager
from tests.unit.sessions.test_persistence import persistence

pytestmark = [pytest.mark.anyio]
ME = Caller()


@dataclass
class Server:
    """A manager with a source of fake kernels."""

    manager: SessionManager
    source: FakeSource
    persistence: Persistence

    async def run(self, code: str, session: Session | None = None) -> Cell:
        found = session or await self.manager.resolve(ME, "")
        cell = found.submit(code, 0.0)
        with anyio.fail_after(30):
            await cell.finished.wait()
        deliver(found, cell)
        return cell

    async def save(self) -> None:
        for session in self.manager.sessions:
            with anyio.fail_after(30):
                while await session.persistence.save() is None:
                    await anyio.lowlevel.checkpoint()

    @property
    def variables(self) -> dict[str, str]:
        return self.source.kernels[-1].variables


@asynccontextmanager
async def server(folder: Path, *, orderly: bool = True, **given: Any) -> AsyncIterator[Server]:
    """A server; one that does not end `orderly` saves nothing at its end."""
    source = FakeSource()
    kept = persistence(folder, **given)
    manager = new_manager(folder / "run", source, FakeClock(), persistence=kept)
    async with manager.running():
        yield Server(manager, source, kept)
        if not orderly:
            for session in manager.sessions:
                manager._saver.forget(session.persistence)


async def test_variables_and_cells_are_there_for_the_next_server(tmp_path: Path) -> None:
    async with server(tmp_path) as first:
        await first.run("a = 1")
        await first.run("say something")
    async with server(tmp_path) as second:
        cell = await second.run("b = 2")
        assert second.variables == {"a": "1", "b": "2"}
        assert cell.number == 3
        assert "Continued from today" in cell.notices[0]
        session = second.manager.sessions[0]
        assert "".join(session.cells[1].log.text()) == "something"


async def test_cells_since_the_last_save_are_named_and_their_code_is_kept(tmp_path: Path) -> None:
    async with server(tmp_path, orderly=False) as first:
        await first.run("a = 1")
        await first.save()
        session = first.manager.sessions[0]
        await first.run("b = 2")
        assert session.persistence.entry is not None
        trace = session.persistence.entry.journal_path.read_bytes()
        manifest = (session.persistence.entry.folder / "manifest.json").read_bytes()
        folder = session.persistence.entry.folder
    (folder / "manifest.json").write_bytes(manifest)  # as a killed server leaves both
    (folder / "cells.now").write_bytes(trace)
    async with server(tmp_path) as second:
        cell = await second.run("c = 3")
        assert second.variables == {"a": "1", "c": "3"}
        assert "Cell 2 ran after that was saved" in cell.notices[0]
        lost = second.manager.sessions[0].cells[1]
        assert (lost.code, lost.status) == ("b = 2", Status.KILLED)
    async with server(tmp_path) as third:
        cell = await third.run("d = 4")
        assert cell.number == 4
        assert "ran after" not in cell.notices[0]


async def test_a_reset_is_for_good_even_while_a_save_goes_on(tmp_path: Path) -> None:
    async with server(tmp_path, orderly=False) as first:
        await first.run("a = 1")
        await first.save()
        session = first.manager.sessions[0]
        async with anyio.create_task_group() as tasks:
            await first.run("b = 2")
            tasks.start_soon(session.persistence.save)
            await anyio.lowlevel.checkpoint()
            await session.reset(packages=False, files=False)
    async with server(tmp_path) as second:
        cell = await second.run("c = 3")
        assert second.variables == {"c": "3"}
        assert "run them again" not in " ".join(cell.notices)


async def test_a_closed_session_is_gone_even_while_a_save_goes_on(tmp_path: Path) -> None:
    async with server(tmp_path) as first:
        await first.run("a = 1")
        session = first.manager.sessions[0]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.persistence.save)
            await anyio.lowlevel.checkpoint()
            await first.manager.close(session)
    async with server(tmp_path) as second:
        assert (await second.run("b = 2")).number == 1


async def test_a_session_that_did_nothing_leaves_nothing(tmp_path: Path) -> None:
    async with server(tmp_path) as first:
        await first.manager.resolve(ME, "")
    assert list((tmp_path / "kept" / "r").iterdir()) == []


async def test_a_name_finds_what_was_kept_and_no_other_does(tmp_path: Path) -> None:
    async with server(tmp_path) as first:
        await first.run("a = 1", await first.manager.create(ME, name="named"))
        await first.run("a = 2", await first.manager.create(ME))
    async with server(tmp_path) as second:
        await second.run("b = 1", await second.manager.resolve(ME, "named"))
        assert second.variables == {"a": "1", "b": "1"}
        with pytest.raises(SessionNotFound):
            await second.manager.resolve(ME, "other")
        with pytest.raises(InputError):
            await second.manager.create(ME, name="named")


async def test_a_name_finds_a_session_that_was_never_saved(tmp_path: Path) -> None:
    async with server(tmp_path, orderly=False) as first:
        await first.run("a = 1", await first.manager.create(ME, name="named"))
    async with server(tmp_path) as second:
        cell = await second.run("b = 1", await second.manager.resolve(ME, "named"))
        assert cell.number == 2
        assert "Cell 1 ran after that was saved" in " ".join(cell.notices)


async def test_the_work_of_an_adopted_branch_is_saved_or_told_to_be_lost(tmp_path: Path) -> None:
    async with server(tmp_path, orderly=False) as first:
        await first.run("a = 1")
        await first.save()
        session = first.manager.sessions[0]
        assert not session.persistence.changed
        await session.persistence.note_adoption()
        assert session.persistence.changed
        assert session.persistence.last_save() is None
    async with server(tmp_path) as second:
        cell = await second.run("b = 2")
        assert "A branch was adopted after that was saved" in " ".join(cell.notices)
        assert not cell.meta("s", omitted=0, outputs=[])["state_kept"]
        await second.manager.sessions[0].persistence.note_adoption()
        await second.save()
    async with server(tmp_path) as third:
        cell = await third.run("c = 3")
        assert "adopted" not in " ".join(cell.notices)


async def test_what_cannot_be_used_stays_as_it_is(tmp_path: Path) -> None:
    def refuse(packages: object) -> Any:
        raise InstallError("not permitted")

    async with server(tmp_path) as first:
        session = await first.manager.create(ME, name="named")
        await first.run("a = 1", session)
        save = session.persistence._save
        assert save is not None
        save._base = _asking_for_packages(save._base)
        await save.save_cells()
    async with server(tmp_path) as second:
        second.persistence._permits = refuse
        session = await second.manager.create(ME, name="named")
        assert session.persistence.entry is None
        cell = await second.run("b = 2", session)
        assert "not permitted" in cell.notices[0]
        assert second.variables == {"b": "2"}
    async with server(tmp_path) as third:
        await third.run("c = 3", await third.manager.create(ME, name="named"))
        assert third.variables == {"a": "1", "c": "3"}


def _asking_for_packages(saved: Any) -> Any:
    import dataclasses

    return dataclasses.replace(saved, asked={**saved.asked, "packages": ["rich"]})


async def test_a_kernel_that_dies_goes_back_to_the_last_save(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        await only.save()
        await only.run("b = 2")
        only.source.kernels[-1].die()
        cell = await only.run("c = 3")
        assert only.variables == {"a": "1", "c": "3"}
        told = " ".join(cell.notices)
        assert "Variables are as after cell 1; run cell 2 again" in told


async def test_hidden_values_are_in_no_record_of_cells_and_no_preview(tmp_path: Path) -> None:
    value = "hunter2-hunter2"
    async with server(tmp_path, orderly=False) as first:
        factory = first.manager._factory
        factory._context = replace(factory._context, masks=Masks([("TOKEN", value)]))
        await first.run(f"a = {value}")
        first.source.unpicklable["bad"] = f"ValueError: {value}"
        await first.run("bad = 1")
        await first.save()
        await first.run(f"b = {value}")  # in the trace alone
        found = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert any(b"[TOKEN masked]" in path.read_bytes() for path in found)
        having = [path.name for path in found if value.encode() in path.read_bytes()]
        assert having == ["variables-a"]
        assert first.variables["a"] == value


async def test_hibernated_sessions_outlive_the_server_too(tmp_path: Path) -> None:
    async with server(tmp_path, orderly=False) as first:
        await first.run("a = 1")
        session = first.manager.sessions[0]
        assert await session.hibernate("for a test")
        assert not session.persistence.changed
    async with server(tmp_path) as second:
        await second.run("b = 2")
        assert second.variables == {"a": "1", "b": "2"}


async def test_a_variable_that_ends_a_kernel_costs_only_what_it_shares_with(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as first:
        for name in ("a", "bad", "b"):
            await first.run(f"{name} = 1")
    async with server(tmp_path) as second:
        second.source.fatal.add("bad")
        cell = await second.run("c = 2")
        assert second.variables == {"a": "1", "b": "1", "c": "2"}
        assert "bad (ended the kernel that read it" in " ".join(cell.notices)


async def test_a_kernel_that_others_have_ended_while_it_read_a_variable_costs_nothing(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as first:
        for name in ("a", "b", "c"):
            await first.run(f"{name} = 1")
    async with server(tmp_path) as second:
        second.source.unlucky += ["a", "b"]  # the kernel that wakes, and one that looks for why
        cell = await second.run("d = 2")
        assert second.variables == {"a": "1", "b": "1", "c": "1", "d": "2"}
        assert "Not back" not in " ".join(cell.notices)


async def test_a_save_of_what_was_undone_since_does_not_come_back(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        await only.run("b = 2")
        await only.save()
        state = only.manager.sessions[0].kernel_state
        state.worked.remove(2)  # as `undo` does
        only.source.kernels[-1].die()
        cell = await only.run("c = 3")
        assert only.variables == {"c": "3"}
        assert "all variables, imports and definitions made before are lost" in cell.notices[0]


async def test_a_kernel_that_saves_itself_gives_way_to_a_cell_and_spares_its_programs(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        await only.save()
        await only.run("b = 2")
        only.source.dump = "hang"
        session = only.manager.sessions[0]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.persistence.save)
            with anyio.fail_after(30):
                await only.source.dumping.wait()
            only.source.dump = ""
            await only.run("c = 3")
        assert only.source.interrupts == [True]
        assert session.persistence.changed
        assert session.persistence.entry is not None
        assert session.persistence.entry.saved is not None
        assert session.persistence.entry.saved.cell == 1


async def test_an_urgent_save_waits_for_a_cell_and_no_cell_that_waits_ends_it(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        session = only.manager.sessions[0]
        running = session.submit("wait", 0.0)
        only.source.dump = "hang"
        written: list[object] = []

        async def save() -> None:
            written.append(await session.persistence.save(urgent=True))

        async with anyio.create_task_group() as tasks:
            await anyio.wait_all_tasks_blocked()
            assert await session.persistence.save() is None
            tasks.start_soon(save)
            await anyio.wait_all_tasks_blocked()
            assert not only.source.dumping.is_set()
            only.source.kernels[-1].interrupt()
            with anyio.fail_after(30):
                await running.finished.wait()
                await only.source.dumping.wait()
            next_one = session.submit("b = 2", 0.0)
            await anyio.wait_all_tasks_blocked()
            assert not next_one.finished.is_set()
            only.source.dump = ""
            kernel = only.source.kernels[-1]
            assert kernel._pending is not None
            kernel._make(kernel._pending, {"leave": [], "max_bytes": 10**9}, b"")
            with anyio.fail_after(30):
                await next_one.finished.wait()
        assert written[0] is not None
        assert session.persistence.entry is not None
        assert session.persistence.entry.saved is not None
        assert session.persistence.entry.saved.names == ["a"]


async def test_the_last_save_waits_for_none_that_waits_for_a_cell(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        session = only.manager.sessions[0]
        session.submit("wait", 0.0)
        async with anyio.create_task_group() as tasks:
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(lambda: session.persistence.save(urgent=True))
            await anyio.wait_all_tasks_blocked()
            assert await session.persistence.save(most_bytes=9) is None
            await anyio.wait_all_tasks_blocked()
            assert not session.persistence._lock.locked()
            only.source.kernels[-1].interrupt()


async def _killed_after_an_undo(folder: Path) -> None:
    async with server(folder, orderly=False) as first:
        await first.run("a = 1")
        await first.run("b = 2")
        await first.save()
        session = first.manager.sessions[0]
        session.kernel_state.worked.remove(2)  # as `undo` does
        session._note_rollback()
        await session.persistence.mark_undone()


async def test_what_was_undone_does_not_come_back_by_itself(tmp_path: Path) -> None:
    await _killed_after_an_undo(tmp_path)
    async with server(tmp_path, orderly=False) as second:
        cell = await second.run("c = 3")
        assert second.variables == {"c": "3"}
        assert "its variables are as after cell 2, to before which" in cell.notices[0]
        session = await second.manager.create(ME, name="default", resume=True)
        await second.run("d = 4", session)
        assert second.variables == {"a": "1", "b": "2", "d": "4"}
        assert await session.persistence.save()
    async with server(tmp_path) as third:
        await third.run("e = 5")
        assert third.variables == {"a": "1", "b": "2", "d": "4", "e": "5"}


async def test_a_session_that_went_back_is_saved_at_once(tmp_path: Path) -> None:
    async with server(tmp_path, orderly=False) as first:
        await first.run("a = 1")
        await first.run("b = 2")
        await first.save()
        session = first.manager.sessions[0]
        assert first.manager._saver.due()[session.handle] > session.family.last_used
        session.kernel_state.worked.remove(2)
        first.source.kernels[-1].variables.pop("b")
        session._note_rollback()
        await session.persistence.mark_undone()
        assert first.manager._saver.due()[session.handle] <= session.family.last_used
        await first.save()
    async with server(tmp_path) as second:
        await second.run("c = 3")
        assert second.variables == {"a": "1", "c": "3"}


async def test_whoever_asks_second_waits_until_it_is_noted_that_a_session_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path, orderly=False) as first:
        await first.run("a = 1")
        await first.save()
        session = first.manager.sessions[0]
        assert session.persistence.entry is not None
        begun, go_on, told = anyio.Event(), anyio.Event(), []

        async def disown() -> bool:
            begun.set()
            await go_on.wait()
            told.append("noted")
            return False

        async def second() -> None:
            await session.persistence.mark_undone()
            told.append("answered")

        monkeypatch.setattr(session.persistence._save, "mark_undone", disown)
        session._note_rollback()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.persistence.mark_undone)
            await begun.wait()
            tasks.start_soon(second)
            await anyio.wait_all_tasks_blocked()
            go_on.set()
        assert told == ["noted", "answered"]


async def test_a_session_that_cannot_be_saved_anew_sleeps_as_of_the_save_before(
    tmp_path: Path,
) -> None:
    async with server(tmp_path, orderly=False) as first:
        await first.run("a = 1")
        await first.save()
        await first.run("b = 2")
        first.source.size = 2**60  # which the server refuses
        session = first.manager.sessions[0]
        assert await session.hibernate("for a test")
        assert session.kernel_state.pending_restore is not None
        assert session.kernel_state.pending_restore.back == ["a"]
        assert session.persistence.entry is not None
        folder = session.persistence.entry.folder
        trace = session.persistence.entry.journal_path.read_bytes()
        manifest = (folder / "manifest.json").read_bytes()
        cell = await first.run("c = 3")
        assert first.variables == {"a": "1", "c": "3"}
        told = " ".join(cell.notices)
        assert "could not be saved anew: its kernel said something impossible" in told
        assert "Variables are as after cell 1; run cell 2 again" in told
    (folder / "manifest.json").write_bytes(manifest)  # as a killed server leaves both
    (folder / "cells.now").write_bytes(trace)
    async with server(tmp_path) as second:
        cell = await second.run("c = 3")
        assert cell.number == 3
        assert "Cell 2 ran after that was saved" in cell.notices[0]


async def test_a_kernel_that_has_no_time_to_save_itself_leaves_what_was_saved_before(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        await only.run("b = 2")
        await only.save()
        only.source.unpicklable["b"] = "took longer than 0.5 s"
        await only.run("c = 3")
        session = only.manager.sessions[0]
        assert session.persistence.entry is not None
        for _ in range(4):  # each with twice the time
            with pytest.raises(HibernationError, match="not enough for b, which was saved before"):
                await session.persistence.save()
            assert session.persistence.entry.saved is not None
            assert session.persistence.entry.saved.names == ["a", "b"]
            assert session.persistence.changed
        await session.persistence.save()
        assert session.persistence.entry.saved is not None
        assert session.persistence.entry.saved.names == ["a", "c"]


async def test_a_save_that_fails_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        await only.save()
        session = only.manager.sessions[0]
        assert session.persistence.entry is not None
        before = {path.name for path in session.persistence.entry.folder.iterdir()}
        await only.run("b = 2")
        only.source.size = 10_000  # more than comes
        with pytest.raises(HibernationError):
            await session.persistence.save()
        assert {path.name for path in session.persistence.entry.folder.iterdir()} == before


async def test_what_was_saved_of_a_dead_kernel_outlasts_a_sleep(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        await only.save()
        only.source.kernels[-1].die()
        session = only.manager.sessions[0]
        with anyio.fail_after(30):
            while session.kernel is not None:
                await anyio.lowlevel.checkpoint()
        assert await session.hibernate()
        cell = await only.run("c = 3")
        assert only.variables == {"a": "1", "c": "3"}
        assert cell.meta("s", omitted=0, outputs=[])["lost"] == []


async def test_a_sleep_that_is_forced_loses_nothing_that_was_saved_before(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("a = " + 100 * "1")
        await only.save()
        session = only.manager.sessions[0]
        assert await session.hibernate("for a test")
        cell = await only.run("b = 2")
        assert only.variables["a"] == 100 * "1"
        assert cell.meta("s", omitted=0, outputs=[])["lost"] == []


async def test_a_full_disk_puts_to_sleep_what_is_saved_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path) as only:
        await only.run("a = " + 100 * "1")
        await only.save()
        session = only.manager.sessions[0]
        monkeypatch.setattr(SaveFolder, "free", lambda _: 10)
        await only.run("b = 2")
        with pytest.raises(OSError, match="the disk has no room"):
            await session.hibernate("for a test")
        assert session.state == "idle"
        assert session.persistence.entry is not None
        assert session.persistence.entry.saved is not None
        assert session.persistence.entry.saved.names == ["a"]
        monkeypatch.undo()
        await only.save()
        monkeypatch.setattr(SaveFolder, "free", lambda _: 10)
        with pytest.raises(OSError, match="the disk has no room"):
            await session.hibernate()
        assert await session.hibernate("for a test")
        cell = await only.run("c = 3")
        assert only.variables == {"a": 100 * "1", "b": "2", "c": "3"}
        assert cell.meta("s", omitted=0, outputs=[])["lost"] == []


async def test_a_session_that_ends_with_the_server_sleeps_as_one_that_does_not(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as only:
        for name in ("named", ""):
            session = await only.manager.create(ME, name=name)
            await only.run("a = 1", session)
            assert await session.hibernate()
        found = [path.parent for path in tmp_path.rglob("variables-a")]
        assert len(found) == 2
        for folder in found:
            names = {path.name for path in folder.iterdir() if path.is_file()}
            assert names >= {"manifest.json", "manifest.copy.json", "variables-a"}
            assert manifest.read(folder)[0] is not None


async def test_a_session_that_sleeps_wakes_in_the_python_that_it_was_saved_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server(tmp_path) as only:
        monkeypatch.setattr(FakeKernel, "environment", environment("3.11.1"))
        session = await only.manager.create(ME)
        await only.run("a = 1", session)
        assert await session.hibernate()
        monkeypatch.setattr(FakeKernel, "environment", environment("3.12.1"))
        cell = await only.run("b = 2", session)
        assert only.variables == {"b": "2"}
        assert "saved by Python 3.11 and cannot be read by 3.12.1" in cell.notices[0]
        assert cell.meta("s", omitted=0, outputs=[])["lost"] == ["a"]


async def test_a_sleep_that_is_given_up_makes_no_earlier_save_that_of_the_kernel(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        await only.save()
        session = only.manager.sessions[0]
        await session.persistence.note_adoption()
        only.source.dump = "hang"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.hibernate)
            with anyio.fail_after(30):
                await only.source.dumping.wait()
            session.lifecycle.cancel_hibernation()
        assert session.state == "idle"
        assert session.persistence.last_save() is None


def environment(version: str) -> KernelEnvironment:
    return KernelEnvironment(Path("python"), (), version=version)


@pytest.mark.parametrize("name", ["", "mine"])
async def test_a_session_waits_for_the_end_of_the_one_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("kernel_mcp.sessions.manager.CLOSE_TIMEOUT_S", 0.0)  # a busy machine
    async with server(tmp_path) as mine:
        if name:
            await mine.manager.create(ME, name=name)
        old = await mine.manager.resolve(ME, name)
        await mine.run("x = 1", old)
        opened: list[Session] = []

        async def open_again() -> None:
            if name:
                opened.append(await mine.manager.create(ME, name=name))
            else:
                opened.append(await mine.manager.resolve(ME, ""))

        async with anyio.create_task_group() as tasks, old.installing:
            await mine.manager.close(old)
            assert not old.ended.is_set()
            assert mine.manager.directory.find(ME, name) is None
            tasks.start_soon(open_again)
            await anyio.wait_all_tasks_blocked()
            assert opened == []
        (new,) = opened
        assert new is not old
        assert old.ended.is_set()
        ran = await mine.run("y = 2", new)
        assert new.persistence.entry is not None, "it is persisted as the old one was"
        assert not [notice for notice in ran.notices if "Another server" in notice]
