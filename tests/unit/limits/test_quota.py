"""Folder quotas: what is measured, how often, and when a folder may not grow any more."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernel_mcp.limits import quota
from kernel_mcp.limits.quota import FolderQuota
from kernel_mcp.linux.walk import TreeSize
from kernel_mcp.units import MIB


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "workspace"
    path.mkdir()
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watched(folder: Path, clock: Clock) -> Iterator[FolderQuota]:
    found = FolderQuota(folder, "the workspace", 4 * MIB, clock=clock)
    yield found
    found.close()


def fill(path: Path, size: int) -> None:
    path.write_bytes(b"x" * size)


def test_a_folder_within_its_limit_is_left_alone(folder: Path, watched: FolderQuota) -> None:
    fill(folder / "a", 3 * MIB)
    watched.look()
    assert not watched.full
    assert not watched.growing


def test_growing_over_the_limit_is_noticed_and_told(folder: Path, watched: FolderQuota) -> None:
    watched.look()
    fill(folder / "a", 5 * MIB)
    watched.look()
    assert watched.full
    assert watched.growing
    assert not watched.severe
    assert watched.sentence() == "disk quota (the workspace holds 5 MiB, limit 4 MiB)"


def test_a_folder_that_is_full_may_be_worked_in_but_not_grow(
    folder: Path, watched: FolderQuota, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "SLACK_BYTES", MIB)
    fill(folder / "a", 5 * MIB)
    watched.look()
    watched.start()
    fill(folder / "note", 4096)
    watched.look()
    assert not watched.growing
    fill(folder / "b", 2 * MIB)
    watched.look()
    assert watched.growing


def test_room_that_was_made_is_not_given_back(folder: Path, watched: FolderQuota) -> None:
    fill(folder / "a", 30 * MIB)
    watched.look()
    watched.start()
    (folder / "a").unlink()
    watched.look()
    fill(folder / "a", 30 * MIB)
    watched.look()
    assert watched.growing


def test_twice_the_limit_is_severe(
    folder: Path, watched: FolderQuota, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "_far", 8 * MIB)
    fill(folder / "a", 9 * MIB)
    watched.look()
    assert watched.severe
    assert "more than" in watched.sentence()


def test_too_many_files_are_told_by_their_number(
    folder: Path, watched: FolderQuota, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "_entries", 20)
    for number in range(25):
        (folder / str(number)).touch()
    watched.look()
    assert watched.growing
    assert watched.sentence() == ("disk quota (the workspace holds 25 files and folders, limit 20)")


def test_files_without_a_name_belong_to_the_folder(folder: Path, watched: FolderQuota) -> None:
    fd = os.open(folder / "gone", os.O_RDWR | os.O_CREAT)
    (folder / "gone").unlink()
    os.write(fd, b"x" * 5 * MIB)
    watched.look(lambda: [os.getpid()])
    os.close(fd)
    assert watched.growing


def test_it_is_looked_at_twice_a_second_at_most(watched: FolderQuota, clock: Clock) -> None:
    assert watched.due()
    watched.look()
    assert not watched.due()
    clock.now += 0.5
    assert watched.due()


def test_what_takes_long_is_done_seldom(
    watched: FolderQuota, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object, **__: object) -> TreeSize:
        clock.now += 1
        return TreeSize()

    monkeypatch.setattr(quota, "measure", slow)
    watched.look()
    clock.now += 10
    assert not watched.due()
    clock.now += 10
    assert watched.due()


def test_scans_of_many_folders_take_no_more_of_a_processor_than_that_of_one(
    watched: FolderQuota, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "time", SimpleNamespace(thread_time=iter([0.0, 0.01]).__next__))
    watched.look()
    clock.now += 0.6
    assert watched.due()
    assert watched.due(1)
    assert not watched.due(99)  # 100 folders, 10 ms each, are 1 s of processor time
    clock.now += 20
    assert watched.due(99)


def test_among_many_the_first_scan_of_processes_has_its_part_of_a_processor_too(
    watched: FolderQuota, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "time", SimpleNamespace(thread_time=lambda: 0.0))
    watched.look()  # the folder alone, which takes no time
    clock.now += 0.6
    assert watched.due()
    assert not watched.due(99)
    clock.now += 6
    assert watched.due(99)


def test_a_disk_that_fills_up_quickly_hurries_the_next_look(
    watched: FolderQuota, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [10**9]
    monkeypatch.setattr(watched, "_free_now", lambda: free[0])
    watched.look()
    clock.now += 0.1
    assert not watched.due()
    free[0] -= 20 * MIB
    assert watched.due()


def test_a_renamed_folder_is_still_the_same(folder: Path, watched: FolderQuota) -> None:
    moved = folder.rename(folder.with_name("elsewhere"))
    fill(moved / "a", 5 * MIB)
    watched.look()
    assert watched.full


def test_nothing_is_looked_at_once_it_is_closed(watched: FolderQuota, clock: Clock) -> None:
    watched.look()
    watched.close()
    watched.look()
    clock.now += 0.1
    assert not watched.due()
    watched.close()


def test_processes_that_hold_too_much_to_look_at_are_too_much(
    watched: FolderQuota, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "MOST_FILES", 2)
    watched.look(lambda: [os.getpid()])
    assert watched.growing
    assert watched.severe
    assert watched.sentence() == "disk quota (processes hold more files than can be measured)"


def test_finding_the_processes_is_a_part_of_the_time_that_a_look_takes(
    watched: FolderQuota, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow() -> list[int]:
        clock.now += 1
        return []

    monkeypatch.setattr(FolderQuota, "_free_now", lambda _self: 0)  # others write to this disk
    watched.look(slow)
    clock.now += 10
    assert not watched.due()


@pytest.mark.parametrize("reason", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_a_look_that_fails_keeps_what_the_last_one_found(
    folder: Path, watched: FolderQuota, monkeypatch: pytest.MonkeyPatch, reason: Exception
) -> None:
    monkeypatch.setattr(FolderQuota, "_free_now", lambda _self: 0)  # others write to this disk
    fill(folder / "a", 5 * MIB)
    watched.look()
    watched.start()
    before = watched.measured

    def failing(*_: object, **__: object) -> TreeSize:
        raise reason

    monkeypatch.setattr(quota, "measure", failing)
    with pytest.raises(type(reason)):
        watched.look()
    assert watched.measured == before
    assert not watched.growing
    assert not watched.severe
    assert not watched.due()
