"""The contents of a workspace are counted, bounded and cleared."""

import contextlib
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files import quota
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.linux import walk
from kernel_mcp.linux.safe_tree import Opener
from kernel_mcp.units import MIB


def test_disk_space_counts_blocks_and_links_once(workspace: Workspace, root: Path) -> None:
    (root / "a").write_bytes(bytes(100_000))
    os.link(root / "a", root / "b")
    with (root / "sparse").open("wb") as file:
        file.truncate(10_000_000_000)
    used = workspace.usage()
    assert 100_000 <= used.bytes < 200_000
    assert (used.entries, used.complete) == (3, True)


@pytest.mark.ways
def test_a_count_goes_no_further_than_what_a_workspace_may_hold(root: Path) -> None:
    for number in range(10_050):
        (root / str(number)).touch()
    used = Workspace(root, disk_bytes=MIB).usage()
    assert (used.entries, used.complete) == (10_001, False)


@pytest.mark.ways
def test_a_workspace_with_too_many_open_files_takes_no_file(root: Path) -> None:
    for number in range(9_998):
        (root / str(number)).touch()
    workspace = Workspace(root, disk_bytes=10 * MIB)
    workspace.write_file("a/b", "x")
    with pytest.raises(WorkspaceError, match="10,000 of 10,000 files and folders"):
        workspace.write_file("c", "x")


def test_files_written_at_once_do_not_share_the_same_room(root: Path) -> None:
    workspace = Workspace(root, disk_bytes=4 * MIB)

    def write(number: int) -> bool:
        with contextlib.suppress(WorkspaceError):
            workspace.write_file(f"{number}", "x" * MIB)
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(write, range(16))) <= 4
    assert workspace.usage().bytes <= 4 * MIB


def test_a_workspace_that_cannot_be_measured_takes_no_file(
    workspace: Workspace, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> walk.TreeSize:
        raise OSError(errno.EMFILE, "Too many open files")

    limited = Workspace(root, disk_bytes=MIB)
    monkeypatch.setattr(quota, "measure", failing)
    with pytest.raises(WorkspaceError, match=r"could not measure .* left .*\. Try again"):
        limited.write_file("a", "x")
    assert not list(root.iterdir())


@pytest.fixture
def deep(root: Path) -> Iterator[Path]:
    """A thousand folders in each other, with names that exceed PATH_MAX together."""
    fd = os.open(root, os.O_RDONLY)
    for _ in range(1000):
        os.mkdir("d" * 100, dir_fd=fd)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    yield root
    Workspace(root).remove()


def test_a_very_deep_tree_is_counted_and_removed(deep: Path, opener: Opener) -> None:
    workspace = Workspace(deep, opener=opener)
    assert workspace.usage().entries == 1001
    workspace.clear()
    assert list(deep.iterdir()) == []
    workspace.remove()
    assert not deep.exists()
    workspace.remove()


def test_clearing_keeps_the_folder_and_what_links_lead_to(workspace: Workspace, root: Path) -> None:
    workspace.write_file("a/b/c", "x")
    (root / "out").symlink_to(root.parent)
    before = root.stat().st_ino
    workspace.clear()
    assert root.stat().st_ino == before
    assert list(root.iterdir()) == []
    assert (root.parent / "secret.txt").exists()


def test_a_workspace_that_has_gone_is_said(workspace: Workspace, root: Path) -> None:
    root.rmdir()
    with pytest.raises(WorkspaceError, match=r"removed from outside.*reset"):
        workspace.list_files()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(alphabet="a./~\\ \0\ud800ä", max_size=30))
def test_no_path_gets_out(root: Path, path: str) -> None:
    workspace = Workspace(root)
    try:
        workspace.write_file(path, "x")
        workspace.read_file(path)
    except WorkspaceError:
        pass
    finally:
        workspace.clear()
    assert {entry.name for entry in root.parent.iterdir()} == {"secret.txt", "ws"}
