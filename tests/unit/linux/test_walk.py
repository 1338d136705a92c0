"""The one walk that measures folders: what counts, and what hostile code cannot do against it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.linux import walk
from kernel_mcp.linux.safe_tree import empty_tree, open_beneath
from kernel_mcp.linux.walk import measure
from kernel_mcp.units import MIB

PLENTY: dict[str, Any] = {"most_entries": 10**6, "most_bytes": 10**12}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "workspace"
    path.mkdir()
    return path


@pytest.fixture
def root(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    yield fd
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    os.close(fd)
    empty_tree(folder)  # which pytest cannot do with deep ones


def fill(path: Path, size: int) -> None:
    path.write_bytes(b"x" * size)


def dig(folder: Path, depth: int, *, beside: int = 0) -> None:
    """Make folders within each other, and some beside each on the way."""
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        for number in range(beside):
            os.mkdir(f"beside{number}", dir_fd=inner)
        os.mkdir("d" * 20, dir_fd=inner)
        deeper = os.open("d" * 20, os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = deeper
    os.close(inner)


def test_bytes_on_disk_and_entries_are_counted(folder: Path, root: int) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    fill(folder / "deep" / "er" / "a", MIB)
    (folder / "link").symlink_to("/usr")
    os.truncate(folder / "deep" / "er" / "a", 100 * MIB)  # a hole takes no space
    large: dict[tuple[int, int], int] = {}
    found = measure(root, **PLENTY, large=large)
    assert MIB <= found.bytes < 2 * MIB
    assert (found.entries, found.complete, found.unreadable) == (4, True, 0)
    assert list(large.values()) == [MIB]


def test_a_file_with_two_names_counts_once(folder: Path, root: int) -> None:
    for size in (MIB, 100_000):
        fill(folder / f"a{size}", size)
        os.link(folder / f"a{size}", folder / f"b{size}")
    assert MIB <= measure(root, **PLENTY).bytes < 1.3 * MIB


def test_a_walk_ends_when_there_is_too_much(folder: Path, root: int) -> None:
    for number in range(50):
        (folder / str(number)).touch()
    found = measure(root, most_entries=10, most_bytes=10**12)
    assert (found.entries, found.complete) == (11, False)


def test_a_tree_that_is_too_deep_to_be_measured_is_told_apart(
    folder: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dig(folder, 40)
    assert measure(root, **PLENTY).complete
    monkeypatch.setattr(walk, "MOST_STEPS", 30)
    assert not measure(root, **PLENTY).complete


def test_a_thousand_folders_in_each_other_and_others_beside_them_are_measured(
    folder: Path, root: int
) -> None:
    dig(folder, 1000, beside=3)
    found = measure(root, **PLENTY)
    assert (found.entries, found.complete) == (4000, True)


def test_a_folder_that_moves_meanwhile_counts_once(
    folder: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (folder / name / "in").mkdir(parents=True)
        fill(folder / name / "in" / "file", 100_000)
    real = walk._looked_at
    moved: list[Path] = []

    def moving(inner: int, entry: os.DirEntry[str]) -> os.stat_result | None:
        if entry.name == "file" and not moved:
            here = Path(f"/proc/self/fd/{inner}").readlink().parent
            other = folder / ("b" if here.name == "a" else "a")
            moved.append((here / "in").rename(other / "moved"))
        return real(inner, entry)

    monkeypatch.setattr(walk, "_looked_at", moving)
    found = measure(root, **PLENTY)
    assert moved
    assert 200_000 <= found.bytes < 250_000


def test_what_the_server_lacks_is_no_property_of_the_folder(folder: Path, root: int) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    used = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/", os.O_PATH))
        with pytest.raises(OSError, match="Too many open files"):
            measure(root, **PLENTY)
        os.close(held.pop())
        with pytest.raises(OSError, match="Too many open files"):
            measure(root, **PLENTY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
    assert measure(root, **PLENTY).entries == 2


def test_folders_that_are_closed_again_and_again_are_given_up(
    folder: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a").mkdir()
    real = open_beneath

    def closed(parent: int, names: Any, flags: int, **named: Any) -> int:
        if names and not flags & os.O_PATH:
            raise PermissionError
        return real(parent, names, flags, **named)

    monkeypatch.setattr(walk, "open_beneath", closed)
    assert not measure(root, **PLENTY).complete


def test_what_belongs_to_others_and_is_closed_is_said_to_be_unseen(
    folder: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    fill(folder / "b" / "file", MIB)
    monkeypatch.setattr(walk, "_reclaimed", lambda _folder: False)
    real = open_beneath

    def closed(parent: int, names: Any, flags: int, **named: Any) -> int:
        if tuple(names) == ("a",):
            raise PermissionError
        return real(parent, names, flags, **named)

    monkeypatch.setattr(walk, "open_beneath", closed)
    found = measure(root, **PLENTY)
    assert found.bytes >= MIB
    assert (found.entries, found.complete, found.unreadable) == (3, True, 1)
