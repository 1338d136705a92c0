"""Branches: which are refused, and what of a family stays until its last member ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from kernel_mcp.errors import BranchError, InputError
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.family import FOLDER, MOST, BranchOrigin
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session
from tests.unit.fake_kernels import FakeClock, FakeSource, new_manager
from tests.unit.sessions.test_kept import server

pytestmark = [pytest.mark.anyio]
ME = Caller()


def join(branch: Session, root: Session) -> None:
    """Make a session a branch of another, with a folder of its own."""
    folder = f"{FOLDER}/{branch.handle}"
    branch.family, branch.origin = root.family, BranchOrigin(root.handle, folder, ())
    branch.workspace, branch.installing = root.workspace, root.installing
    root.family.members.append(branch)
    (root.workspace.root / folder).mkdir(parents=True)


@asynccontextmanager
async def family(
    folder: Path,
) -> AsyncIterator[tuple[SessionManager, Session, Session, Session]]:
    """A manager, and a session with two branches."""
    manager = new_manager(folder, FakeSource(), FakeClock())
    with anyio.fail_after(60):
        async with manager.running():
            root, first, second = [await manager.create(ME) for _ in range(3)]
            join(first, root)
            join(second, root)
            yield manager, root, first, second


@pytest.mark.parametrize("count", [0, MOST + 1])
async def test_only_so_many_branches_are_made_at_once(tmp_path: Path, count: int) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        session = await manager.create(ME)
        with pytest.raises(InputError, match=f"n={count} is not usable"):
            await manager.branches.make(session, count)


async def test_a_kernel_without_checkpoints_has_no_branches(tmp_path: Path) -> None:
    manager = new_manager(tmp_path, FakeSource(), FakeClock())
    async with manager.running():
        session = await manager.create(ME)
        with pytest.raises(BranchError, match="No branches could be made"):
            await manager.branches.make(session, 2)
        assert manager.sessions == [session]
        assert session.family.members == [session]
        assert not (session.workspace.root / FOLDER).exists()


async def test_a_session_that_is_no_branch_cannot_be_adopted(tmp_path: Path) -> None:
    async with family(tmp_path) as (manager, root, _, _):
        with pytest.raises(BranchError, match="This is no branch"):
            await manager.branches.adopt(root)
        alone = await manager.create(ME)
        with pytest.raises(BranchError, match="This is no branch"):
            await manager.branches.adopt(alone)


async def test_one_branch_is_adopted_at_a_time(tmp_path: Path) -> None:
    async with family(tmp_path) as (manager, root, first, _):
        root.family.adopting = True
        with pytest.raises(BranchError, match="Another branch is being adopted"):
            await manager.branches.adopt(first)


async def test_a_failed_adoption_leaves_the_family_as_it_was(tmp_path: Path) -> None:
    async with family(tmp_path) as (manager, root, first, second):
        with pytest.raises(BranchError, match="This branch has no variables"):
            await manager.branches.adopt(first)
        assert root.family.members == [root, first, second]
        assert not root.family.adopting


async def test_a_branch_whose_root_has_ended_becomes_the_root(tmp_path: Path) -> None:
    async with family(tmp_path) as (manager, root, first, second):
        await manager.close(root)
        adopted, undone = await manager.branches.adopt(first)
        assert (adopted, undone) == (first, [])
        assert (first.family.root, first.origin) == (first, None)
        assert manager.sessions == [first]
        assert second.ended.is_set()


async def test_files_stay_until_the_last_member_has_ended(tmp_path: Path) -> None:
    async with family(tmp_path) as (manager, root, first, second):
        shared = root.workspace.root
        await manager.close(root)
        assert shared.is_dir()
        await manager.close(first)
        assert not (shared / FOLDER / first.handle).exists()
        assert (shared / FOLDER / second.handle).is_dir()
        await manager.close(second)
        assert not shared.exists()


async def test_the_store_knows_as_long_as_there_are_branches(tmp_path: Path) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        root = only.manager.sessions[0]
        branch = await only.manager.create(ME, name="branch")
        join(branch, root)
        third = await only.manager.create(ME, name="third")
        join(third, root)
        entry = root.persistence.entry
        assert entry is not None
        assert not entry.branched
        await only.manager.close(third)
        assert entry.branched
        await only.manager.close(branch)
        assert not entry.branched
