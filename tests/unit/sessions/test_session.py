"""A session whose kernel is started before it has a cell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import InstallError, LaunchError
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.kernels.run import Run, Sink
from kernel_mcp.sessions.cell import Cell, Status
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.session import Session
from tests.unit.fake_kernels import FakeClock, FakeSource, new_manager

pytestmark = [pytest.mark.anyio]


class SlowSource(FakeSource):
    """Starts no kernel before `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_once = anyio.Event()
        self.go = anyio.Event()

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        self.asked_once.set()
        await self.go.wait()
        return await super().start(request, progress)


@asynccontextmanager
async def begun(folder: Path, source: FakeSource) -> AsyncIterator[Session]:
    """A session that was told to begin."""
    manager = new_manager(folder, source, FakeClock())
    with anyio.fail_after(60):
        async with manager.running():
            session = await manager.create(Caller())
            session.scheduler.begin()
            yield session


async def ended(cell: Cell) -> Cell:
    await cell.finished.wait()
    return cell


async def test_its_kernel_is_there_before_the_first_cell(tmp_path: Path) -> None:
    source = SlowSource()
    async with begun(tmp_path, source) as session:
        await source.asked_once.wait()
        assert session.state == "new"
        source.go.set()
        cell = await ended(session.submit("a = 1", 0.0))
        assert cell.status is Status.OK
        assert len(source.kernels) == 1


async def test_a_cell_waits_for_the_kernel_that_is_starting(tmp_path: Path) -> None:
    source = SlowSource()
    async with begun(tmp_path, source) as session:
        await source.asked_once.wait()
        cell = session.submit("a = 1", 0.0)
        source.go.set()
        assert (await ended(cell)).status is Status.OK
        assert len(source.kernels) == 1


async def test_a_failed_start_is_tried_again_and_told_by_the_first_cell(tmp_path: Path) -> None:
    source = FakeSource()
    source.refuse = "own"
    async with begun(tmp_path, source) as session:
        cell = await ended(session.submit("a = 1", 0.0))
        assert cell.error is not None
        assert "no kernel today" in str(cell.error)
        assert len(source.requests) == 2
        source.refuse = ""
        assert (await ended(session.submit("a = 1", 0.0))).status is Status.OK


async def test_a_cell_is_interrupted_before_its_kernel_is_there(tmp_path: Path) -> None:
    source = SlowSource()
    async with begun(tmp_path, source) as session:
        await source.asked_once.wait()
        cell = session.submit("a = 1", 0.0)
        assert await session.scheduler.interrupt() is cell
        assert cell.status is Status.INTERRUPTED
        assert await session.scheduler.interrupt() is None
        source.go.set()
        assert (await ended(session.submit("b = 2", 0.0))).status is Status.OK
        assert source.kernels[0].variables == {"b": "2"}


async def test_a_reset_does_not_wait_for_the_start(tmp_path: Path) -> None:
    source = SlowSource()
    async with begun(tmp_path, source) as session:
        await source.asked_once.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: session.reset(packages=False, files=False))
            await session.scheduler.begun.wait()
            assert source.kernels == []
            source.go.set()
        assert len(source.kernels) == 1


async def test_closing_it_gives_up_the_start(tmp_path: Path) -> None:
    source = SlowSource()
    async with begun(tmp_path, source) as session:
        await source.asked_once.wait()
        session.close()
        await session.ended.wait()
        assert source.kernels == []


async def test_a_session_that_was_not_told_to_begin_has_no_kernel(tmp_path: Path) -> None:
    source = FakeSource()
    manager = new_manager(tmp_path, source, FakeClock())
    async with manager.running():
        session = await manager.create(Caller())
        await anyio.wait_all_tasks_blocked()
        assert (session.state, source.requests) == ("new", [])


@pytest.mark.parametrize("noticed", ["by nobody", "by the request"])
async def test_a_cell_whose_kernel_was_gone_runs_on_a_fresh_one(
    tmp_path: Path, noticed: str
) -> None:
    source = FakeSource()
    manager = new_manager(tmp_path, source, FakeClock())
    async with manager.running():
        session = await manager.create(Caller())
        await ended(session.submit("a = 1", 0.0))
        source.mortal = 1
        if noticed == "by the request":
            source.mortal = 0
            assert session.kernel is not None
            kernel = source.kernels[-1]
            submit = kernel.submit

            def die_first(
                code: str,
                sink: Sink,
                number: int | None = None,
                notebook: str = "",
                asks: object = None,
            ) -> Run:
                kernel.die()
                return submit(code, sink, number, notebook, asks)

            kernel.submit = die_first  # type: ignore[method-assign]
        cell = await ended(session.submit("b = 2", 0.0))
        assert cell.status is Status.OK
        assert cell.error is None
        assert source.kernels[-1].variables == {"b": "2"}
        assert cell.meta("s", omitted=0, outputs=[])["lost"] == ["a"]
        (notice,) = session.notifications.pending
        assert "exited with code 7" in notice.text


async def test_a_cell_is_tried_twice_and_no_more(tmp_path: Path) -> None:
    source = FakeSource()
    source.mortal = 5
    manager = new_manager(tmp_path, source, FakeClock())
    async with manager.running():
        session = await manager.create(Caller())
        cell = await ended(session.submit("a = 1", 0.0))
        assert "Run it again" in str(cell.error)
        assert source.mortal == 3
        assert session.notifications.pending == ()


async def test_a_reset_that_cannot_start_a_kernel_keeps_the_old_one(tmp_path: Path) -> None:
    source = FakeSource()
    manager = new_manager(tmp_path, source, FakeClock())
    async with manager.running():
        session = await manager.create(Caller())
        session.workspace.write_file("kept.txt", "x")
        await ended(session.submit("a = 1", 0.0))
        source.refuse = "beside"
        with pytest.raises(LaunchError, match="variables are as they were"):
            await session.reset(packages=True, files=True)
        assert (session.notifications.pending, source.living) == ((), 1)
        assert source.kernels[-1].variables == {"a": "1"}
        assert session.workspace.list_files().entries
        source.refuse = ""
        notice = await session.reset(packages=True, files=True)
        assert notice is not None
        assert session.notifications.pending == (notice,)
        assert (source.living, source.kernels[-1].variables) == (1, {})
        assert not session.workspace.list_files().entries


async def test_a_reset_that_was_cancelled_early_has_cost_nothing(tmp_path: Path) -> None:
    source = SlowSource()
    source.go.set()
    manager = new_manager(tmp_path, source, FakeClock())
    async with manager.running():
        session = await manager.create(Caller())
        await ended(session.submit("a = 1", 0.0))
        source.go = anyio.Event()
        running = session.submit("wait", 0.0)
        with anyio.move_on_after(0.05):
            await session.reset(packages=False, files=False)
        assert running.outcome is None
        assert source.living == 1
        assert session.notifications.pending == ()
        await session.scheduler.interrupt()
        assert source.kernels[-1].variables == {"a": "1"}


async def test_a_reset_that_was_cancelled_late_has_cost_what_it_tells(tmp_path: Path) -> None:
    source = SlowSource()
    source.go.set()
    manager = new_manager(tmp_path, source, FakeClock())
    async with manager.running(), anyio.create_task_group() as tasks:
        session = await manager.create(Caller())
        await ended(session.submit("a = 1", 0.0))
        scope = anyio.CancelScope()

        async def reset() -> None:
            with scope:
                await session.reset(packages=False, files=False)

        async with session.turn:
            tasks.start_soon(reset)
            await anyio.wait_all_tasks_blocked()
            (notice,) = session.notifications.pending
            scope.cancel()
            await anyio.wait_all_tasks_blocked()
        await ended(session.submit("b = 1", 0.0))
        assert notice.loss is not None
        assert source.living == 1
        assert "a" not in source.kernels[-1].variables


class Prepared:
    """Prepares cells that contain `%`; `go` lets it end."""

    def __init__(self) -> None:
        self.begun = anyio.Event()
        self.go = anyio.Event()

    def concerns(self, code: str) -> bool:
        return "%" in code

    async def prepare(self, session: Session, cell: Cell) -> None:
        await session.ensure_kernel()
        await cell.step("installing")
        self.begun.set()
        await self.go.wait()
        if "bad" in cell.code:
            raise InstallError("no such package")
        cell.plain = cell.code.replace("%", "say installed")


@asynccontextmanager
async def preparing(folder: Path) -> AsyncIterator[tuple[Session, Prepared]]:
    work = Prepared()
    manager = new_manager(folder, FakeSource(), FakeClock(), preparation=work)
    with anyio.fail_after(60):
        async with manager.running():
            yield await manager.create(Caller()), work


async def test_a_cell_is_prepared_before_it_runs_and_the_next_one_waits(tmp_path: Path) -> None:
    async with preparing(tmp_path) as (session, work):
        cell, after = session.submit("%", 0.0), session.submit("say after", 0.0)
        await work.begun.wait()
        assert (cell.status, after.status) == (Status.RUNNING, Status.QUEUED)
        assert cell.steps == ["installing"]
        work.go.set()
        assert (await ended(cell)).log.news(cell.reported, 100) == "installed"
        assert (await ended(after)).status is Status.OK
        assert cell.code == "%"


async def test_a_cell_whose_preparation_fails_does_not_run(tmp_path: Path) -> None:
    async with preparing(tmp_path) as (session, work):
        work.go.set()
        cell, after = session.submit("%bad", 0.0), session.submit("say after", 0.0)
        assert (await ended(cell)).status is Status.ERROR
        assert str(cell.error) == "no such package"
        assert (await ended(after)).status is Status.OK


@pytest.mark.parametrize("way", ["interrupt", "cancel", "reset", "close"])
async def test_the_preparation_of_a_cell_can_be_stopped(tmp_path: Path, way: str) -> None:
    async with preparing(tmp_path) as (session, work):
        cell = session.submit("%", 0.0)
        await work.begun.wait()
        if way == "interrupt":
            assert await session.scheduler.interrupt() is cell
        elif way == "cancel":
            session.queue.abandon(cell)
        elif way == "reset":
            await session.reset(packages=False, files=False)
        else:
            session.close()
        await ended(cell)
        assert cell.status in (Status.INTERRUPTED, Status.KILLED)
        assert cell.outcome is not None
        assert cell.outcome.cause is not None
        if way != "close":
            assert "no line of it was run" in cell.outcome.cause
            assert (await ended(session.submit("say after", 0.0))).status is Status.OK
