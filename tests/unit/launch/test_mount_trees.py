"""Mounts of folders for users of their own, and the sandboxes in which paths are masked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kernel_mcp.config.mounts import Mount
from kernel_mcp.errors import ConfigError
from kernel_mcp.host_folders.exposed import ExposedMount
from kernel_mcp.launch.masked_sandboxes import MaskedSandboxes
from kernel_mcp.launch.mount_trees import MountTrees
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.base import BY_BINDS, BY_RULES, BY_TREES

pytestmark = [pytest.mark.anyio]


async def no_namespace(_rows: Sequence[tuple[int, int]]) -> int:
    raise AssertionError("no ids are mapped")


def made(method: str, folder: Path, mode: str = "ro") -> tuple[MountTrees, ExposedMount]:
    shown = ExposedMount(Mount(folder, "/data", mode))
    return MountTrees([shown], method, no_namespace), shown


@pytest.mark.parametrize("method", [BY_BINDS, BY_RULES])
async def test_a_sandbox_without_trees_has_none_and_reads_what_all_may(
    tmp_path: Path, method: str
) -> None:
    trees, shown = made(method, tmp_path)
    assert await trees.make(Identity(1, 1)) == []
    await trees.probe()
    assert not shown.id_mapped
    assert shown.rights != ""


async def test_binds_cannot_give_files_to_the_owner_of_a_folder(tmp_path: Path) -> None:
    trees, _ = made(BY_BINDS, tmp_path, "rw")
    with pytest.raises(ConfigError, match="docker cannot give what they make"):
        await trees.probe()
    await made(BY_RULES, tmp_path, "rw")[0].probe()


async def test_kernels_of_the_servers_own_user_need_no_trees(tmp_path: Path) -> None:
    trees, _ = made(BY_TREES, tmp_path)
    assert await trees.make(None) == []


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started


def test_a_sandbox_is_held_until_it_ends(process: subprocess.Popen[bytes]) -> None:
    sandboxes = MaskedSandboxes()
    with sandboxes.adding(process.pid) as held:
        assert sandboxes.running() == []
    assert sandboxes.running() == [held]
    assert sandboxes.namespaces == {Path("/proc/self/ns/mnt").stat().st_ino}
    process.communicate(b"\n")
    assert sandboxes.running() == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held[0])


def test_a_sandbox_that_is_not_masked_is_not_held(process: subprocess.Popen[bytes]) -> None:
    sandboxes = MaskedSandboxes()
    with pytest.raises(KeyError), sandboxes.adding(process.pid):
        raise KeyError
    assert sandboxes.running() == []
    with sandboxes.adding(process.pid) as held:
        pass
    sandboxes.close()
    assert sandboxes.namespaces == frozenset()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held[1])
