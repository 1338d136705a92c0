"""A session and its branches: waiting for all of them, and stopping the cells of all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from kernel_mcp.sessions.cell import Status
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.family import BranchOrigin
from kernel_mcp.sessions.session import Session
from tests.unit.fake_kernels import FakeClock, FakeSource, new_manager

pytestmark = [pytest.mark.anyio]


@asynccontextmanager
async def family(folder: Path) -> AsyncIterator[tuple[Session, Session]]:
    """A session and a branch of it."""
    manager = new_manager(folder, FakeSource(), FakeClock())
    async with manager.running():
        root, branch = [await manager.create(Caller()) for _ in range(2)]
        branch.family, branch.origin = root.family, BranchOrigin(root.handle, "", ())
        root.family.members.append(branch)
        with anyio.fail_after(30):
            yield root, branch


async def test_settling_stops_running_cells_and_withdraws_waiting_ones(tmp_path: Path) -> None:
    async with family(tmp_path) as (root, branch):
        assert not await root.family.settle()
        running, waiting = branch.submit("wait", 0.0), branch.submit("a = 1", 0.0)
        await anyio.wait_all_tasks_blocked()
        assert await root.family.settle()
        assert (running.status, waiting.status) == (Status.INTERRUPTED, Status.INTERRUPTED)
        assert waiting.outcome is not None
        assert waiting.outcome.cause == "the server ended before this cell began"
        assert not await root.family.settle()


async def test_settling_waits_for_whoever_uses_a_kernel(tmp_path: Path) -> None:
    async with family(tmp_path) as (root, branch):
        settled = anyio.Event()

        async def settle() -> None:
            await root.family.settle()
            settled.set()

        async with anyio.create_task_group() as tasks, branch.turn:
            tasks.start_soon(settle)
            await anyio.wait_all_tasks_blocked()
            assert not settled.is_set()
        assert settled.is_set()


async def test_one_waits_for_the_work_of_the_server_and_for_no_cell(tmp_path: Path) -> None:
    async with family(tmp_path) as (root, branch):
        assert not await root.family.wait_until_free()
        waited: list[bool] = []

        async def wait() -> None:
            waited.append(await root.family.wait_until_free())

        async with anyio.create_task_group() as tasks, branch.turn:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            assert waited == []
        assert waited == [True]
        branch.submit("wait", 0.0)
        await anyio.wait_all_tasks_blocked()
        assert not await root.family.wait_until_free()
        await branch.scheduler.interrupt()
