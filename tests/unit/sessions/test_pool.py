"""The reserve hands over spares with their folders, and clears what a killed server left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.environments.uv import silence
from kernel_mcp.errors import ConfigError
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.sessions.pool import WarmPool, pool_folder_in
from tests.unit.fake_kernels import FakeSource

pytestmark = [pytest.mark.anyio]


@asynccontextmanager
async def filled(folder: Path, source: FakeSource, size: int = 2) -> AsyncIterator[WarmPool]:
    """A pool that is full."""
    pool = WarmPool(source, size=size, folder=folder / "w", layers=folder / "p")
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.fill)
            while pool.ready < size:
                await anyio.lowlevel.checkpoint()
            yield pool
            tasks.cancel_scope.cancel()
    await pool.aclose()


def request(folder: Path, python: str = "") -> KernelRequest:
    """Return the request of a new session."""
    workspace, layer = folder / "w" / "session", folder / "p" / "session"
    for place in (workspace, layer):
        place.mkdir(parents=True, exist_ok=True)
    return KernelRequest("session", workspace, python, layer=layer)


async def test_a_session_takes_a_spare_and_its_folder(tmp_path: Path) -> None:
    source = FakeSource()
    async with filled(tmp_path, source) as pool:
        spares = {entry.name for entry in (tmp_path / "w").iterdir()}
        (tmp_path / "w" / min(spares) / "by-kernel").touch()
        (tmp_path / "w" / max(spares) / "by-kernel").touch()
        kernel: object = await pool.start(request(tmp_path), silence)
        assert kernel in source.kernels[:2]
        assert (tmp_path / "w" / "session" / "by-kernel").exists()


async def test_the_only_session_has_none_beside_it(tmp_path: Path) -> None:
    source = FakeSource()
    pool = WarmPool(source, size=3, at_first=1, folder=tmp_path / "w", layers=tmp_path / "p")
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.fill)
            for begun, kernels, spares in ((0, 1, 1), (1, 1, 0), (2, 5, 3)):
                while pool.ready < spares:
                    await anyio.lowlevel.checkpoint()
                await anyio.wait_all_tasks_blocked()
                assert len(source.kernels) == kernels
                await pool.start(request(tmp_path / f"{begun}"), silence)
            tasks.cancel_scope.cancel()
    await pool.aclose()


async def test_files_that_came_first_are_moved_into_the_folder_of_the_spare(tmp_path: Path) -> None:
    source = FakeSource()
    async with filled(tmp_path, source) as pool:
        wanted = request(tmp_path)
        (wanted.workspace / "data").mkdir()
        (wanted.workspace / "data" / "in.csv").write_text("a,b")
        await pool.start(wanted, silence)
        assert (wanted.workspace / "data" / "in.csv").read_text() == "a,b"


async def test_a_layer_that_is_being_filled_keeps_its_place(tmp_path: Path) -> None:
    source = FakeSource()
    async with filled(tmp_path, source) as pool:
        wanted = request(tmp_path)
        assert wanted.layer is not None
        (wanted.layer / "1").mkdir()
        kernel: object = await pool.start(wanted, silence)
        assert (wanted.layer / "1").exists()
        assert kernel not in source.kernels[:2]


async def test_a_layer_that_fills_at_the_last_moment_gets_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FakeSource()
    monkeypatch.setattr("kernel_mcp.sessions.pool._adds_nothing", lambda _layer: True)
    async with filled(tmp_path, source) as pool:
        wanted = request(tmp_path)
        assert wanted.layer is not None
        (wanted.layer / "1").mkdir()
        kernel: object = await pool.start(wanted, silence)
        assert (wanted.layer / "1").exists()
        assert kernel not in source.kernels[:2]


async def test_a_file_that_comes_while_folders_are_exchanged_is_not_lost(tmp_path: Path) -> None:
    source = FakeSource()
    async with filled(tmp_path, source) as pool:
        wanted = request(tmp_path)
        writer = os.open(wanted.workspace, os.O_PATH)
        await pool.start(wanted, silence)
        os.close(os.open("late", os.O_CREAT | os.O_WRONLY, dir_fd=writer))
        os.close(writer)
        while not (wanted.workspace / "late").exists():
            await anyio.lowlevel.checkpoint()


async def test_nothing_is_left_of_the_folders_that_were_replaced(tmp_path: Path) -> None:
    source = FakeSource()
    async with filled(tmp_path, source) as pool:
        await pool.start(request(tmp_path), silence)
    for top in ("w", "p"):
        assert [folder.name for folder in (tmp_path / top).iterdir()] == ["session"]


async def test_a_spare_that_has_died_is_passed_over_and_its_folder_removed(tmp_path: Path) -> None:
    source = FakeSource()
    async with filled(tmp_path, source) as pool:
        source.kernels[0].die()
        kernel: object = await pool.start(request(tmp_path), silence)
        assert kernel is source.kernels[1]
        assert source.kernels[0].closed


async def test_a_spare_that_was_stopped_is_passed_over(tmp_path: Path) -> None:
    source = FakeSource()
    async with filled(tmp_path, source) as pool:
        source.kernels[0].stopped = True
        kernel: object = await pool.start(request(tmp_path), silence)
        assert kernel is source.kernels[1]
        assert source.kernels[0].closed


async def test_a_session_with_wishes_of_its_own_gets_a_kernel_of_its_own(tmp_path: Path) -> None:
    source = FakeSource()
    async with filled(tmp_path, source) as pool:
        kernel: object = await pool.start(request(tmp_path, python="3.12"), silence)
        assert kernel not in source.kernels[:2]
        assert pool.ready == 2


async def test_what_was_taken_is_replaced(tmp_path: Path) -> None:
    source = FakeSource()
    async with filled(tmp_path, source) as pool:
        await pool.start(request(tmp_path), silence)
        while pool.ready < 2:
            await anyio.lowlevel.checkpoint()


async def test_closing_ends_the_spares_and_removes_their_folders(tmp_path: Path) -> None:
    source = FakeSource()
    async with filled(tmp_path, source):
        pass
    assert source.living == 0
    assert list((tmp_path / "w").iterdir()) == []
    assert list((tmp_path / "p").iterdir()) == []


async def test_a_spare_that_cannot_be_started_leaves_no_folder(tmp_path: Path) -> None:
    source = FakeSource()
    source.refuse = "own"
    pool = WarmPool(source, size=1, folder=tmp_path / "w", layers=tmp_path / "p")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.fill)
        with anyio.fail_after(60):
            while not source.requests or list((tmp_path / "w").iterdir()):
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert list((tmp_path / "p").iterdir()) == []


KILLED = """
import os, sys
from pathlib import Path
from kernel_mcp.sessions.pool import pool_folder_in
with pool_folder_in(Path(sys.argv[1])) as folder:
    (folder / ("0f" * 8) / "x").mkdir(parents=True)
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""


def killed(parent: Path) -> Path:
    """Return the folder that a killed server leaves."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, parent], capture_output=True, text=True, check=False
    )
    return Path(done.stdout.strip())


def test_nothing_of_it_stays(tmp_path: Path) -> None:
    with pool_folder_in(tmp_path) as folder:
        (folder / ("0f" * 8)).mkdir()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    left = killed(tmp_path)
    assert list(left.iterdir())
    with pool_folder_in(tmp_path) as living:
        assert not left.exists()
        with pool_folder_in(tmp_path):
            assert living.exists()


def test_what_may_be_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    with_file = killed(tmp_path)
    (with_file / "thesis.txt").write_text("mine")
    unlocked = tmp_path / ".kernel-mcp-00000000"
    unlocked.mkdir()
    other = tmp_path / ".kernel-mcp-notes"
    other.mkdir()
    (other / "lock").touch()
    (tmp_path / ".kernel-mcp-11111111").symlink_to(with_file)
    with pool_folder_in(tmp_path):
        pass
    assert (with_file / "thesis.txt").read_text() == "mine"
    assert {unlocked, other, with_file, tmp_path / ".kernel-mcp-11111111"} == set(
        tmp_path.iterdir()
    )


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--workspace"), pool_folder_in(tmp_path / "missing"):
        pass
