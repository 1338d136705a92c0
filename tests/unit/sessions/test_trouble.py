"""A failure in one session costs that session a cell, and other sessions nothing."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import ServerFailure
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.kernels.run import Run, Sink
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.sessions.cell import Cell, Status
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.hibernation import IDLE
from kernel_mcp.sessions.idle_hibernator import IdleHibernator
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session
from tests.unit.fake_kernels import FakeClock, FakeKernel, FakeSource, deliver, new_manager

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

pytestmark = [pytest.mark.anyio]

FAILURES: dict[str, Callable[[], Exception]] = {
    "descriptors": lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "disk": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "threads": lambda: RuntimeError("can't start new thread"),
    "memory": MemoryError,
    "several": lambda: ExceptionGroup("several", [OSError(errno.EIO, "Input/output error")]),
}

failures = pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)


class FailingSource(FakeSource):
    """Raises `failure` at the next start."""

    failure: Exception | None = None

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return await super().start(request, progress)


async def ended(cell: Cell) -> Cell:
    with anyio.fail_after(60):
        await cell.finished.wait()
    return cell


async def with_data(manager: SessionManager) -> Session:
    """A session that holds `a`."""
    session = await manager.create(Caller())
    assert (await ended(session.submit("a = 1", 0.0))).status is Status.OK
    return session


async def unharmed(session: Session) -> None:
    """The session still has its variables and runs cells."""
    kernel: Any = session.kernel
    assert kernel.variables["a"] == "1"
    assert (await ended(session.submit("b = 2", 0.0))).status is Status.OK


@failures
async def test_a_start_that_fails_costs_one_cell(
    tmp_path: Path, failure: Callable[[], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    source = FailingSource()
    manager = new_manager(tmp_path, source, FakeClock())
    async with manager.running():
        other = await with_data(manager)
        session = await manager.create(Caller())
        source.failure = failure()
        cell = await ended(session.submit("x = 1", 0.0))
        assert isinstance(cell.error, ServerFailure)
        assert session.handle in caplog.text
        assert (await ended(session.submit("x = 1", 0.0))).status is Status.OK
        await unharmed(other)


@failures
async def test_a_start_ahead_that_fails_costs_nothing(
    tmp_path: Path, failure: Callable[[], Exception]
) -> None:
    source = FailingSource()
    manager = new_manager(tmp_path, source, FakeClock())
    async with manager.running():
        other = await with_data(manager)
        session = await manager.create(Caller())
        source.failure = failure()
        session.scheduler.begin()
        await session.scheduler.begun.wait()
        assert (await ended(session.submit("x = 1", 0.0))).status is Status.OK
        await unharmed(other)


@failures
async def test_a_cell_that_cannot_be_sent_leaves_the_variables(
    tmp_path: Path, failure: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        session = await with_data(manager)

        def submit(self: FakeKernel, code: str, sink: Sink, *_: object) -> Run:
            raise failure()

        with monkeypatch.context() as patched:
            patched.setattr(FakeKernel, "submit", submit)
            cell = await ended(session.submit("x = 1", 0.0))
        assert "Variables are kept" in str(cell.error)
        await unharmed(session)


@failures
async def test_a_failure_while_a_cell_runs_interrupts_it_and_keeps_the_variables(
    tmp_path: Path, failure: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock(), limits=Limits(cpu_seconds=60.0))
    async with manager.running():
        session = await with_data(manager)
        kernel: Any = session.kernel
        used = [kernel.usage()]

        def usage() -> Any:
            if not used:
                raise failure()
            return used.pop()

        with monkeypatch.context() as patched:
            patched.setattr(kernel, "usage", usage)
            cell = await ended(session.submit("wait", 0.0))
        assert "interrupted; variables are kept" in str(cell.error)
        await unharmed(session)


@failures
async def test_a_kernel_that_does_not_end_cleanly_costs_nobody_else(
    tmp_path: Path, failure: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        other, session = await with_data(manager), await with_data(manager)

        async def aclose() -> None:
            raise failure()

        with monkeypatch.context() as patched:
            patched.setattr(session.kernel, "aclose", aclose)
            await session.reset(packages=False, files=False)
        assert (await ended(session.submit("x = 1", 0.0))).status is Status.OK
        await unharmed(other)


@failures
async def test_files_that_cannot_be_removed_cost_nobody_else(
    tmp_path: Path, failure: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        other, session = await with_data(manager), await with_data(manager)

        def remove(path: Path) -> None:
            raise failure()

        with monkeypatch.context() as patched:
            patched.setattr("kernel_mcp.sessions.storage.remove_tree", remove)
            await manager.close(session)
        assert session.ended.is_set()
        assert manager.sessions == [other]
        await unharmed(other)


@failures
async def test_idle_sessions_that_cannot_be_hibernated_stay(
    tmp_path: Path, failure: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    manager = new_manager(tmp_path, FakeSource(), clock)
    async with manager.running():
        session = await with_data(manager)
        clock.now += 100

        async def hibernate(reason: str = IDLE) -> bool:
            raise failure()

        with monkeypatch.context() as patched:
            patched.setattr(session, "hibernate", hibernate)
            await IdleHibernator(manager, 10.0, clock).hibernate_expired()
        assert manager.admission.retry_at(session) > clock.now
        await unharmed(session)


async def test_a_workspace_that_was_removed_is_told_and_made_again_by_reset(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        session = await with_data(manager)
        remove_tree(tmp_path / "w")
        told = await ended(session.submit("b = 2", 0.0))
        deliver(session, told)
        silent = await ended(session.submit("b = 2", 0.0))
        deliver(session, silent)
        assert "removed from outside" in " ".join(told.notices)
        assert "reset" in " ".join(told.notices)
        assert silent.notices == []
        await session.reset(packages=True, files=True)
        assert session.workspace.root.is_dir()
        again = await ended(session.submit("b = 2", 0.0))
        deliver(session, again)
        assert "new, empty one" in " ".join(again.notices)
        assert (await manager.create(Caller())).workspace.root.is_dir()


async def test_a_folder_that_was_removed_before_there_is_a_kernel_is_made_again(
    tmp_path: Path,
) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        session = await manager.create(Caller())
        for place in ("w", "r", "p"):
            remove_tree(tmp_path / place)
        cell = await ended(session.submit("a = 1", 0.0))
        assert cell.status is Status.OK
        deliver(session, cell)
        assert "new, empty one" in cell.notices[0]
        assert session.workspace.root.is_dir()
