"""Folders that code has built, in and out of one file."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from kernel_mcp.fleet.packing import MOST_DEPTH, Packed, pack, unpack
from kernel_mcp.fleet.signed import NotOurs

MOST = 10_000_000


def packed(folder: Path, most_bytes: int = MOST, most_entries: int = 1000) -> tuple[bytes, Packed]:
    file = io.BytesIO()
    left = pack(folder, file, most_bytes=most_bytes, most_entries=most_entries)
    return file.getvalue(), left


def back(folder: Path, tmp_path: Path) -> Path:
    data, left = packed(folder)
    assert left.count == 0
    unpack(io.BytesIO(data), tmp_path / "back")
    return tmp_path / "back"


def made(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    folder.mkdir()
    return folder


def test_files_folders_links_rights_and_times_come_back(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "deep" / "a.txt").write_text("a")
    (folder / "run").write_bytes(b"#!/bin/sh\n")
    (folder / "run").chmod(0o755)
    os.utime(folder / "run", (1000, 1000))
    (folder / "link").symlink_to("/etc/passwd")
    (folder / os.fsdecode(b"n\xf6t utf-8")).write_bytes(b"x")
    found = back(folder, tmp_path)
    assert (found / "deep" / "a.txt").read_text() == "a"
    assert (found / "deep" / "deeper").is_dir()
    assert (found / "empty").is_dir()
    assert (found / "run").stat().st_mode & 0o777 == 0o755
    assert (found / "run").stat().st_mtime == 1000
    assert (found / "link").readlink() == Path("/etc/passwd")
    assert (found / os.fsdecode(b"n\xf6t utf-8")).read_bytes() == b"x"


def test_a_folder_that_is_not_there_is_an_empty_one(tmp_path: Path) -> None:
    assert list(back(tmp_path / "missing", tmp_path).iterdir()) == []


def test_what_is_no_file_is_left_out_and_named(tmp_path: Path) -> None:
    folder = made(tmp_path)
    os.mkfifo(folder / "pipe")
    (folder / "file").write_text("x")
    data, left = packed(folder)
    assert (left.left_out, left.count) == (("pipe",), 1)
    unpack(io.BytesIO(data), tmp_path / "back")
    assert [each.name for each in (tmp_path / "back").iterdir()] == ["file"]


def test_what_is_too_much_is_left_out_and_counted(tmp_path: Path) -> None:
    folder = made(tmp_path)
    with (folder / "a-sparse").open("wb") as file:
        file.truncate(10**12)
    (folder / "b").write_text("kept")
    data, left = packed(folder, most_bytes=1000)
    assert left.left_out == ("a-sparse",)
    assert len(data) < 100_000
    for number in range(50):
        (folder / f"n{number}").write_text("")
    assert packed(folder, most_entries=10)[1].count == 43  # the sparse one, too


def test_depth_is_bounded(tmp_path: Path) -> None:
    folder = made(tmp_path)
    deep = folder
    for _ in range(MOST_DEPTH + 50):
        deep = deep / "d"
        deep.mkdir()
    data, left = packed(folder)
    assert left.count == 1
    unpack(io.BytesIO(data), tmp_path / "back")


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", "a//b", "."])
def test_a_name_that_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    file.seek(0)
    with pytest.raises(NotOurs):
        unpack(file, tmp_path / "back")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        link = tarfile.TarInfo("a")
        link.type, link.linkname = tarfile.SYMTYPE, str(target)
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("a/file"))
    file.seek(0)
    with pytest.raises((NotOurs, OSError)):
        unpack(file, tmp_path / "back")
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_other_kinds_of_entries_are_refused(kind: bytes, tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        entry = tarfile.TarInfo("a")
        entry.type = kind
        archive.addfile(entry)
    file.seek(0)
    with pytest.raises(NotOurs):
        unpack(file, tmp_path / "back")


def test_a_file_that_shrinks_while_it_is_read_is_filled_up(tmp_path: Path) -> None:
    from kernel_mcp.fleet.packing import _ExactReader

    file = io.BytesIO(b"abc")
    whole = _ExactReader(file, 5)
    assert whole.read(4) + whole.read(4) == b"abc\0\0"
