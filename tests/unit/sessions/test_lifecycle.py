"""A session's kernel that dies, goes back to a checkpoint or a save, or is replaced."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import KernelGone, LaunchError, UndoError
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.launch.checkpoint import Checkpoint
from kernel_mcp.launch.process import StartReport
from kernel_mcp.sessions.checkpoints import Checkpoints
from kernel_mcp.sessions.events import NO_START, START, Events, SessionEvents
from kernel_mcp.sessions.hibernation import SavedState
from kernel_mcp.sessions.kernel_state import KernelState
from kernel_mcp.sessions.lifecycle import KernelLifecycle
from kernel_mcp.sessions.notifications import NotificationQueue
from kernel_mcp.sessions.recovery import KernelRecovery
from kernel_mcp.sessions.session_save import SessionSave
from kernel_mcp.sessions.snapshot import Dump
from kernel_mcp.sessions.starter import KernelStarter, restore
from tests.unit.fake_kernels import FakeKernel, FakeSource

pytestmark = [pytest.mark.anyio]


class Copy:
    """A checkpoint: the variables of a kernel at one moment."""

    def __init__(self, kernel: CopiedKernel) -> None:
        self.variables = dict(kernel.variables)
        self.usable, self.users, self.pid = True, 1, 1
        self.failures = 0


class CopiedKernel(FakeKernel):
    """A fake kernel that can be copied, and restored from a copy."""

    def __init__(self, source: FakeSource, group: SimpleNamespace | None = None) -> None:
        super().__init__(source)
        self.dropped: list[Copy] = []
        self.closed_files: tuple[str, ...] = ()
        self.folder = ""
        self.handle = SimpleNamespace(  # type: ignore[assignment]
            pid=1,
            report=StartReport((), kind="forked"),
            egress=self.egress,
            sandbox_group=group or SimpleNamespace(drop=self.dropped.append, clear=_nothing),
        )

    async def checkpoint(self) -> tuple[Copy, float]:
        return Copy(self), 0.001

    async def wake(self, copy: Copy, folder: str) -> CopiedKernel:
        if copy.failures:
            copy.failures -= 1
            raise LaunchError("no kernel from this copy")
        fresh = CopiedKernel(self._source, self.handle.sandbox_group)
        fresh.variables, fresh.folder = dict(copy.variables), folder
        fresh.names.add(list(copy.variables))
        self._source.kernels.append(fresh)
        return fresh

    async def become_branch(self, folder: str) -> None:
        self.folder = folder


async def _nothing() -> None:
    pass


class CopiedSource(FakeSource):
    """Makes kernels that can be copied."""

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        self.requests.append(request)
        if self.refuse:
            raise LaunchError("no kernel today")
        self.kernels.append(CopiedKernel(self))
        return cast(Kernel, self.kernels[-1])


class Noted(SessionEvents):
    """Keeps the events of a session, but for the starts of kernels."""

    def __init__(self) -> None:
        super().__init__(Events(), "", "s-1")
        self.told: list[tuple[str, Any]] = []

    def note(self, event: str, /, **facts: Any) -> None:
        if event not in (START, "checkpoint"):
            self.told.append((event, facts))


class Rig:
    """The kernel of one session, without the session."""

    def __init__(self, folder: Path, source: FakeSource) -> None:
        self.source, self.events = source, Noted()
        self.notifications = NotificationQueue()
        self.saved: tuple[SavedState, int] | None = None
        self.calls: list[str] = []
        (folder / "w").mkdir()
        self.state = KernelState(
            "s-1",
            self.notifications,
            Checkpoints("auto", lambda: 0.0, self.notifications.add),
        )
        self.recovery = KernelRecovery(
            self.state,
            self.events,
            on_death=lambda: self.calls.append("died"),
            last_save=lambda: self.saved,
            on_rollback=lambda: self.calls.append("rollback"),
        )
        self.lifecycle = KernelLifecycle(
            KernelRequest("s-1", folder / "w"),
            KernelStarter(source, self.notifications, self.events),
            self.recovery,
            session_save=cast(SessionSave, SimpleNamespace(drop=lambda: self.calls.append("drop"))),
            admit=self._admit,
            events=self.events,
        )

    async def _admit(self) -> None:
        self.calls.append("admit")

    @property
    def kernel(self) -> CopiedKernel:
        return cast(CopiedKernel, self.state.kernel)

    @property
    def texts(self) -> list[str]:
        return [notice.text for notice in self.notifications.pending]

    async def cell(self, number: int, code: str, *, checkpoint: bool = False) -> None:
        """Run a cell, as the runner does."""
        kernel = await self.lifecycle.ensure()
        if checkpoint:
            await self.lifecycle.checkpoint(self.state.checkpoints.asked)
        with self.recovery.running_cell():
            kernel.submit(code, lambda _event: None)
            self.state.note_cell_run(number, 0.0)

    async def die(self) -> None:
        self.kernel.die()
        await anyio.wait_all_tasks_blocked()

    def save(self, folder: Path, as_of: int, size: int | None = None) -> None:
        """Note a save of the present variables, of which the server knows `size` bytes."""
        path = folder / "dump"
        path.write_bytes(b"1234")
        names = tuple(self.kernel.variables)
        dump = Dump(path, 4 if size is None else size, names, {}, (), names)
        self.saved = SavedState(0.0, 0.0, dump=dump, saved_when="a save"), as_of


@asynccontextmanager
async def rig(folder: Path, source: Callable[[], FakeSource] = CopiedSource) -> AsyncIterator[Rig]:
    async with anyio.create_task_group() as tasks:
        found = Rig(folder, source())
        found.recovery.watch_in(tasks)
        yield found
        tasks.cancel_scope.cancel()


async def test_the_live_kernel_is_used_again_and_a_dead_one_without_variables_replaced(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, FakeSource) as it:
        first = await it.lifecycle.ensure()
        assert await it.lifecycle.ensure() is first
        await it.die()
        assert it.calls == []
        assert await it.lifecycle.ensure() is not first
        assert it.texts == []


async def test_a_death_between_cells_without_a_copy_is_told_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path, FakeSource) as it:
        await it.cell(1, "a = 1")
        assert (it.state.holds, it.state.as_of) == (True, 1)
        await it.die()
        assert [kind for kind, _ in it.events.told] == ["kill"]
        (notice,) = it.notifications.pending
        assert "between cells: all variables" in notice.text
        assert notice.loss is not None
        assert notice.loss.names == ("a",)
        await it.lifecycle.ensure()
        assert it.state.as_of is None
        assert len(it.texts) == 1


async def test_no_death_is_told_while_a_cell_runs(tmp_path: Path) -> None:
    async with rig(tmp_path, FakeSource) as it:
        await it.cell(1, "a = 1")
        with it.recovery.running_cell():
            await it.die()
            assert it.texts == []
        assert len(it.texts) == 1


async def test_a_kernel_that_begins_a_cell_and_is_gone_holds_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path, FakeSource) as it:
        await it.lifecycle.ensure()
        with suppress(KernelGone), it.recovery.running_cell():
            assert it.state.used
            await it.die()
            raise KernelGone("gone")
        assert not it.state.used
        assert it.texts == []


async def test_a_dead_kernel_goes_back_to_its_newest_copy(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await it.cell(1, "a = 1")
        await it.cell(2, "b = 2", checkpoint=True)
        await it.cell(3, "c = 3")
        await it.die()
        assert it.calls == ["died"]
        await it.recovery.note_death()
        assert it.kernel.variables == {"a": "1"}
        assert it.events.told[0] == ("revival", {"cell": 1})
        (notice,) = it.notifications.pending
        assert "Variables are as after cell 1; run cells 2–3 again" in notice.text  # noqa: RUF001
        assert notice.loss is not None
        assert set(notice.loss.names) == {"b", "c"}
        assert notice.loss.kept
        assert it.state.as_of == 1
        assert it.calls == ["died", "rollback"]
        assert it.source.living == 1


async def test_a_copy_that_fails_twice_is_dropped_for_an_older_one(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await it.cell(1, "a = 1")
        await it.cell(2, "b = 2", checkpoint=True)
        await it.cell(3, "c = 3", checkpoint=True)
        newest = cast(Copy, it.state.checkpoints.newest)
        newest.failures = 2
        await it.die()
        await it.lifecycle.ensure()
        assert it.kernel.variables == {"a": "1"}
        assert newest.failures == 0


async def test_a_copy_that_fails_once_is_tried_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await it.cell(1, "a = 1")
        await it.cell(2, "b = 2", checkpoint=True)
        cast(Copy, it.state.checkpoints.newest).failures = 1
        await it.die()
        await it.lifecycle.ensure()
        assert it.kernel.variables == {"a": "1"}


async def test_without_a_copy_the_last_save_is_loaded(tmp_path: Path) -> None:
    async with rig(tmp_path, FakeSource) as it:
        await it.cell(1, "a = 1")
        it.save(tmp_path, 1)
        await it.cell(2, "b = 2")
        await it.die()
        assert it.calls == ["died"]
        await it.recovery.note_death()
        assert it.state.kernel is None
        assert it.state.pending_restore is not None
        assert it.state.pending_restore.back == ["a"]
        assert (it.state.holds, it.state.as_of) == (True, 1)
        (notice,) = it.notifications.pending
        assert notice.loss is not None
        assert notice.loss.names == ("b",)


@pytest.mark.parametrize("trouble", ["damaged", "undone", "empty"])
async def test_a_save_that_is_of_no_use_is_not_loaded(tmp_path: Path, trouble: str) -> None:
    async with rig(tmp_path, FakeSource) as it:
        await it.cell(1, "a = 1")
        it.save(tmp_path, 7 if trouble == "undone" else 1, 5 if trouble == "damaged" else None)
        if trouble == "empty":
            it.saved = SavedState(0.0, 0.0), 1
        await it.die()
        await it.recovery.note_death()
        assert it.state.pending_restore is None
        assert not it.state.holds
        assert "all variables, imports and definitions made before are lost" in it.texts[0]


async def test_an_undo_goes_back_and_names_the_cells(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await it.cell(1, "a = 1")
        await it.cell(2, "b = 2", checkpoint=True)
        await it.cell(3, "c = 3", checkpoint=True)
        back = await it.recovery.undo(2)
        assert (back.as_of, back.undone, set(back.names)) == (1, (2, 3), {"b", "c"})
        assert it.events.told[-1] == ("undo", {"cells": [2, 3]})
        assert it.texts == []
        await it.cell(4, "d = 4")
        assert it.kernel.variables == {"a": "1", "d": "4"}


async def test_an_undo_without_a_copy_leaves_the_kernel(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        with pytest.raises(UndoError, match="nothing to undo"):
            await it.recovery.undo(1)
        await it.cell(1, "a = 1")
        kernel = it.kernel
        with pytest.raises(UndoError, match="No checkpoint reaches back before cell 1"):
            await it.recovery.undo(1)
        with pytest.raises(UndoError, match="cells=2 is more than there are: cell 1"):
            await it.recovery.undo(2)
        assert it.kernel is kernel
        assert kernel.exit is None


async def test_an_undo_that_fails_tells_that_all_is_lost(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await it.cell(1, "a = 1")
        await it.cell(2, "b = 2", checkpoint=True)
        cast(Copy, it.state.checkpoints.newest).failures = 9
        with pytest.raises(LaunchError, match="could not be woken"):
            await it.recovery.undo(1)
        assert "An undo has failed: all variables" in it.texts[0]
        assert it.state.kernel is None
        assert not it.state.holds
        assert it.calls == ["rollback"]


async def test_a_hibernated_session_undoes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await it.cell(1, "a = 1")
        it.save(tmp_path, 1)
        assert it.saved is not None
        it.lifecycle.continue_from(it.saved[0], 1)
        await it.state.drop()
        with pytest.raises(UndoError, match="its last variables alone"):
            await it.recovery.undo(1)


async def test_a_workspace_that_was_removed_is_made_anew_unless_variables_are_there(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as it:
        first = await it.lifecycle.ensure()
        (tmp_path / "w").rmdir()
        assert await it.lifecycle.ensure() is not first
        assert (tmp_path / "w").is_dir()
        assert "has a new, empty one" in it.texts[0]
        await it.cell(1, "a = 1")
        kernel = it.kernel
        (tmp_path / "w").rmdir()
        for _ in range(2):
            await it.lifecycle.ensure()
            assert it.kernel is kernel
        assert ["this kernel can write none" in text for text in it.texts] == [False, True]
        assert restore(it.lifecycle.request) != []
        assert restore(it.lifecycle.request) == []


async def test_a_start_that_fails_leaves_a_hibernated_session_so(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await it.cell(1, "a = 1")
        it.save(tmp_path, 1)
        assert it.saved is not None
        await it.state.drop()
        it.lifecycle.continue_from(it.saved[0], 1)
        it.source.refuse = "own"
        with pytest.raises(LaunchError, match="no kernel today"):
            await it.lifecycle.ensure()
        with pytest.raises(LaunchError, match="Nothing was reset"):
            await it.lifecycle.start_fresh()
        assert it.calls == ["admit", "admit"]
        assert not it.lifecycle.awake
        assert it.state.pending_restore is not None
        assert [kind for kind, _ in it.events.told] == [NO_START] * 2


async def test_a_reset_replaces_the_kernel_and_withdraws_what_was_told_of_the_save(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as it:
        await it.cell(1, "a = 1")
        it.save(tmp_path, 1)
        assert it.saved is not None
        await it.state.drop()
        it.lifecycle.continue_from(it.saved[0], 1)
        assert len(it.texts) == 1
        fresh = await it.lifecycle.start_fresh()
        assert it.source.requests[-1].beside
        await it.lifecycle.forget(fresh)
        assert it.state.kernel is fresh
        assert it.state.pending_restore is None
        assert it.texts == []
        assert it.calls[-1] == "drop"


async def test_a_branch_continues_from_the_copy_of_another_and_goes_back_to_it(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as it:
        kernel = CopiedKernel(it.source)
        it.source.kernels.append(kernel)
        kernel.variables, kernel.closed_files = {"a": "1"}, ("/w/db",)
        copy = cast(Checkpoint, Copy(kernel))
        it.state.start_as_branch(cast(Kernel, kernel), copy, ".branches/s-2")
        assert "Closed, as they have changed" in it.texts[0]
        assert "/w/db" in it.texts[0]
        await it.cell(1, "b = 2")
        kernel.die()
        await it.recovery.note_death()
        assert it.kernel.variables == {"a": "1"}
        assert it.kernel.folder == ".branches/s-2"
        await it.state.drop()
        await it.lifecycle.ensure()
        assert it.kernel.folder == ".branches/s-2"


async def test_a_root_takes_over_the_kernel_of_a_branch(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        await it.cell(1, "a = 1")
        await it.cell(2, "b = 2")
        own, other = it.kernel, CopiedKernel(it.source)
        assert await it.lifecycle.take_over_kernel(cast(Kernel, other), (1,)) == [2]
        assert own.closed
        assert it.kernel is other
        assert it.state.worked == [1]
        assert it.calls == ["rollback"]
        it.state.release_kernel()
        assert it.state.kernel is None
        assert not it.state.holds
        assert not other.closed


async def test_work_gives_way_to_who_needs_the_session(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:

        async def quickly() -> int:
            return 1

        assert await it.lifecycle.unless_needed(quickly) == 1
        found: list[object] = []

        async def slowly() -> None:
            found.append(await it.lifecycle.unless_needed(anyio.sleep_forever))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slowly)
            await anyio.wait_all_tasks_blocked()
            it.lifecycle.cancel_hibernation()
        assert found == [None]


async def test_what_other_clients_ran_is_told_in_one_notice(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        kernel = await it.lifecycle.ensure()
        for number in range(7):
            kernel.overheard(f"x{number} = 1\nmore")
        (text,) = it.texts
        assert text.startswith("another client of this kernel ran: 2 other cells; x2 = 1; ")
        it.notifications.mark_delivered(it.notifications.pending)
        kernel.overheard("y = 1")
        assert it.texts == ["another client of this kernel ran: y = 1"]
