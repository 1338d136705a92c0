"""Changes of saved state by a disk, a person or another version of the server are noticed."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_mcp.sessions import manifest
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.cell_journal import DAMAGED, CellJournal, read_journal
from kernel_mcp.sessions.manifest import COPY, FORMAT, MANIFEST, READABLE, Saved, UnknownFormat
from kernel_mcp.sessions.store import SessionStore
from tests.unit.sessions.test_kept import ME, Server, server

pytestmark = [pytest.mark.anyio]

SAMPLES = 240
"""Bytes that are changed, one in each run."""


async def saved(folder: Path) -> Path:
    """The folder of an entry with two variables, and a cell that ran after the save."""
    async with server(folder, orderly=False) as first:
        for code in ("a = 41", "b = 'text'"):
            await first.run(code)
        await first.save()
        await first.run("c = 3")
        (entry,) = (folder / "kept" / "r").iterdir()
        shutil.copytree(entry, folder / "copy")
    shutil.rmtree(entry)
    shutil.copytree(folder / "copy", entry)
    return entry


async def comes_back(folder: Path) -> tuple[Server, Cell]:
    """A new server, and its first cell."""
    async with server(folder, orderly=False) as second:
        return second, await second.run("d = 4")


def told(cell: Cell) -> tuple[str, list[str], bool]:
    """The notices of a cell, the names that it says are lost, and whether it says all is there."""
    outcome = cell.meta("s", omitted=0, outputs=[])
    return " ".join(cell.notices), outcome["lost"], outcome["state_kept"]


ALL = {"a": "41", "b": "'text'", "d": "4"}


async def test_of_an_entry_that_is_whole_everything_comes_back(tmp_path: Path) -> None:
    await saved(tmp_path)
    second, cell = await comes_back(tmp_path)
    text, lost, _ = told(cell)
    assert second.variables == ALL
    assert "Cell 3 ran after that was saved" in text
    assert lost == []


async def test_a_changed_byte_anywhere_brings_back_no_wrong_value_and_is_told(
    tmp_path: Path,
) -> None:
    entry = await saved(tmp_path)
    files = sorted(path.relative_to(entry) for path in entry.rglob("*") if path.is_file())
    names = {str(path) for path in files}
    assert {MANIFEST, COPY, "cells.now", "variables-a"} <= names
    chance = random.Random(0)
    places = [
        (path, offset)
        for path in files
        for offset in range(len((entry / path).read_bytes().rstrip(b"\0")))
    ]
    for path, offset in chance.sample(places, min(SAMPLES, len(places))):
        shutil.rmtree(entry)
        shutil.copytree(tmp_path / "copy", entry)
        data = bytearray((entry / path).read_bytes())
        data[offset] ^= chance.choice((0x01, 0x20, 0x80, 0xFF, data[offset] or 1))
        (entry / path).write_bytes(data)
        second, cell = await comes_back(tmp_path)
        text, lost, kept = told(cell)
        where = f"{path} at {offset}"
        if str(path).startswith("variables-"):
            assert second.variables == {"d": "4"}, where
            assert (sorted(lost), kept) == (["a", "b"], False), where
            assert "changed on the disk" in text, where
        else:
            assert second.variables == ALL, where
            assert "Cell 3 ran after that was saved" in text, where
            assert ("its copy beside it was used" in text) is (str(path) == MANIFEST), where
            assert cell.number == 4, where


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [_cut, _remove])
async def test_variables_that_are_not_whole_are_lost_by_name(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    entry = await saved(tmp_path)
    harm(entry / "variables-a")
    second, cell = await comes_back(tmp_path)
    text, lost, kept = told(cell)
    assert second.variables == {"d": "4"}
    assert (sorted(lost), kept) == (["a", "b"], False)
    assert "All variables of earlier cells are lost: a, b" in text


@pytest.mark.parametrize("harm", [_cut, _remove])
@pytest.mark.parametrize("name", [MANIFEST, COPY])
async def test_of_two_manifests_one_is_enough(
    tmp_path: Path, harm: Callable[[Path], None], name: str
) -> None:
    entry = await saved(tmp_path)
    harm(entry / name)
    second, cell = await comes_back(tmp_path)
    assert second.variables == ALL
    assert told(cell)[1] == []


@pytest.mark.parametrize("harm", [_cut, _remove])
async def test_without_any_manifest_the_loss_is_told(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    entry = await saved(tmp_path)
    (entry / "cells.now").unlink()
    harm(entry / MANIFEST)
    harm(entry / COPY)
    second, cell = await comes_back(tmp_path)
    text, _, kept = told(cell)
    assert second.variables == {"d": "4"}
    assert "What was kept of this session cannot be read" in text
    assert kept is False


async def test_a_save_that_was_changed_while_the_server_runs_is_not_gone_back_to(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as only:
        await only.run("a = 1")
        await only.save()
        (dump,) = (tmp_path / "kept" / "r").glob("*/variables-*")
        dump.write_bytes(dump.read_bytes().replace(b"1", b"2"))
        only.source.kernels[-1].die()
        cell = await only.run("b = 2")
        assert only.variables == {"b": "2"}
        text, lost, kept = told(cell)
        assert (lost, kept) == (["a"], False)
        assert "Variables are as after cell" not in text


def test_cells_in_a_damaged_trace_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "cells.now"
    trace = CellJournal(path)
    for number in range(3, 7):
        trace.add(number, f"x = {number}")
    trace.close()
    data = path.read_bytes()
    starts = [0, *(i + 2 for i in range(len(data)) if data[i : i + 2] == b"\n\n")][:4]
    for number, start in enumerate(starts, 3):
        for harm in (b"\0", b"z"):
            path.write_bytes(data[: start + 12] + harm + data[start + 13 :])
            found = read_journal(path)
            assert list(found) == [3, 4, 5, 6]
            assert [each for each, code in found.items() if code == DAMAGED] == [number]


def test_a_changed_end_of_a_line_of_a_trace_hides_no_cell(tmp_path: Path) -> None:
    path = tmp_path / "cells.now"
    trace = CellJournal(path)
    for number in range(3, 6):
        trace.add(number, f"x = {number}")
    trace.close()
    data = path.read_bytes()
    for place in (i for i, byte in enumerate(data) if byte == ord("\n")):
        path.write_bytes(data[:place] + b"\x0b" + data[place + 1 :])
        assert list(read_journal(path)) == [3, 4, 5]


@pytest.mark.parametrize("harm", [_cut, _remove])
async def test_cells_of_a_trace_that_is_not_whole_are_told_to_be_lost(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    entry = await saved(tmp_path)
    harm(entry / "cells.now")
    second, cell = await comes_back(tmp_path)
    assert second.variables == ALL
    text, _, kept = told(cell)
    assert "what cells after cell 2 did to variables is lost" in text
    assert kept is False


async def test_without_any_manifest_cells_after_it_hide_no_loss(tmp_path: Path) -> None:
    entry = await saved(tmp_path)
    (entry / MANIFEST).unlink()
    (entry / COPY).unlink()
    _, cell = await comes_back(tmp_path)
    text, _, kept = told(cell)
    assert "cannot be read: its manifest is missing" in text
    assert kept is False


@pytest.mark.parametrize("name", [MANIFEST, COPY])
async def test_a_manifest_that_the_disk_does_not_give_is_read_from_its_copy(
    tmp_path: Path, name: str
) -> None:
    entry = await saved(tmp_path)
    (entry / name).unlink()
    (entry / name).mkdir()
    second, cell = await comes_back(tmp_path)
    assert second.variables == ALL
    assert ("it cannot be read: Is a directory" in told(cell)[0]) is (name == MANIFEST)


async def test_manifests_that_the_disk_does_not_give_are_not_replaced(tmp_path: Path) -> None:
    entry = await saved(tmp_path)
    for name in (MANIFEST, COPY):
        (entry / name).unlink()
        (entry / name).mkdir()
    async with server(tmp_path) as second:
        cell = await second.run("d = 4")
        assert "This session is not kept: Is a directory" in " ".join(cell.notices)
    assert (entry / "variables-a").exists()


# Formats: whoever changes what an entry holds raises `FORMAT`, and adds the format of before here.

_KEY = ["folder", "name"]
_FACTS = ["moment", "cell", "through", "python", "environment", "doors", "asked", "dump", "size"]
_REST = ["variables", "history", "undone"]
FIELDS = {
    1: [*_KEY, *_FACTS, *_REST],
    2: [*_KEY, *_FACTS, "checksum", *_REST],
    3: [*_KEY, *_FACTS, "checksum", *_REST],
}
"""The fields of each format. Dumps of format 3 have settings beside variables."""


def test_a_format_has_the_fields_that_it_had_when_it_was_made() -> None:
    assert [each.name for each in dataclasses.fields(Saved)] == FIELDS[FORMAT]
    assert tuple(FIELDS) == READABLE
    assert max(READABLE) == FORMAT


async def _as_format(entry: Path, known: object, *, seal: bool) -> None:
    """Change the format that an entry states."""
    for name in (MANIFEST, COPY):
        data = json.loads((entry / name).read_bytes())
        data.pop("kernel-mcp/digest", None)
        data["format"] = known
        text = manifest.encode(data) if seal else json.dumps(data).encode()
        (entry / name).write_bytes(text)


def _of_the_first_format(entry: Path) -> Path:
    """Rewrite an entry as an older version would leave it, and return its folder."""
    (entry / COPY).unlink()
    data = json.loads((entry / MANIFEST).read_bytes())
    old = {key: data[key] for key in FIELDS[1]}
    (entry / MANIFEST).write_text(json.dumps({"format": 1, **old}))
    rows = entry / "cells.now"
    size = rows.stat().st_size
    lines = rows.read_bytes().rstrip(b"\0").split(b"\n\n")[:-1]
    text = b"".join(line.partition(b" ")[2] + b"\n" for line in lines)
    rows.write_bytes(text.ljust(size, b"\0"))
    former = entry.parents[1] / "k" / entry.name
    shutil.rmtree(former)
    return entry.rename(former)


async def test_an_entry_of_the_first_format_comes_back(tmp_path: Path) -> None:
    former = _of_the_first_format(await saved(tmp_path))
    second, cell = await comes_back(tmp_path)
    assert second.variables == ALL
    text, lost, _ = told(cell)
    assert "Cell 3 ran after that was saved" in text
    assert "is not whole" not in text
    assert lost == []
    assert [path.name for path in former.iterdir()] == [MANIFEST]


async def test_an_entry_of_the_second_format_comes_back(tmp_path: Path) -> None:
    await _as_format(await saved(tmp_path), 2, seal=True)
    second, cell = await comes_back(tmp_path)
    assert second.variables == ALL
    assert told(cell)[1] == []


async def test_an_entry_of_the_first_format_survives_what_removes_leftovers(
    tmp_path: Path,
) -> None:
    former = _of_the_first_format(await saved(tmp_path))
    store = SessionStore(tmp_path / "kept", most_bytes=0, most_s=3600)
    store.collect()
    assert [each.id for each in store.entries()] == [former.name]
    assert (tmp_path / "kept" / "w" / former.name).is_dir()
    assert store.forget(former.name)
    assert not former.exists()


async def test_what_an_older_version_does_with_a_session_destroys_nothing_and_is_told(
    tmp_path: Path,
) -> None:
    entry = await saved(tmp_path)
    former = tmp_path / "kept" / "k" / entry.name
    assert json.loads((former / MANIFEST).read_bytes()) == {"format": 2}
    data = json.loads((entry / MANIFEST).read_bytes())
    theirs = {key: data[key] for key in FIELDS[1]}
    theirs["variables"]["names"] = ["e"]
    (former / MANIFEST).write_text(json.dumps({"format": 1, **theirs}))
    async with server(tmp_path) as second:
        cell = await second.run("d = 4")
        text, lost, kept = told(cell)
        assert second.variables == ALL
        assert (lost, kept) == (["e"], False)
        assert "An older version of kernel-mcp has begun this session anew" in text
        await second.save()
    third, cell = await comes_back(tmp_path)
    assert third.variables == ALL
    assert told(cell)[1:] == ([], True)


@pytest.mark.parametrize("seal", [True, False])
@pytest.mark.parametrize("known", [0, FORMAT + 1, "new", None])
async def test_a_save_of_another_version_stays_as_it_is(
    tmp_path: Path, known: object, seal: bool
) -> None:
    entry = await saved(tmp_path)
    await _as_format(entry, known, seal=seal)
    before = {path: path.read_bytes() for path in entry.rglob("*") if path.is_file()}
    async with server(tmp_path) as second:
        cell = await second.run("d = 4")
        text, lost, kept = told(cell)
        assert second.variables == {"d": "4"}
        assert (sorted(lost), kept) == (["a", "b"], False)
        assert f"its format is {known!r}" in text
        assert second.manager.sessions[0].persistence.entry is None
    assert {path: path.read_bytes() for path in entry.rglob("*") if path.is_file()} == before
    await _as_format(entry, FORMAT, seal=True)
    third, _ = await comes_back(tmp_path)
    assert third.variables == ALL


async def test_a_save_of_another_version_is_forgotten_when_that_is_asked_for(
    tmp_path: Path,
) -> None:
    entry = await saved(tmp_path)
    await _as_format(entry, FORMAT + 1, seal=True)
    async with server(tmp_path) as second:
        await second.run("d = 4")
        session = await second.manager.create(ME, name="default", fresh=True)
        await second.run("e = 5", session)
    third, cell = await comes_back(tmp_path)
    assert third.variables == {"e": "5", "d": "4"}
    assert told(cell)[2] is True


def test_a_manifest_of_this_format_needs_its_digest(tmp_path: Path) -> None:
    data = Saved("/project", "default").data()
    assert manifest.decode(manifest.encode(data)) == Saved("/project", "default")
    with pytest.raises(ValueError, match="no digest"):
        manifest.decode(json.dumps(data).encode())
    with pytest.raises(UnknownFormat):
        manifest.decode(manifest.encode({**data, "format": FORMAT + 1}))


async def test_the_saves_of_two_sessions_that_were_mixed_up_come_back_under_no_other_name(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as first:
        await first.run("a = 41")
        await first.run("b = 2", await first.manager.create(ME, name="named"))
    one, other = sorted((tmp_path / "kept" / "r").iterdir())

    def swap() -> None:
        one.rename(tmp_path / "aside")
        other.rename(one)
        (tmp_path / "aside").rename(other)

    swap()
    before = {path: path.read_bytes() for path in tmp_path.glob("kept/r/*/*") if path.is_file()}
    async with server(tmp_path) as second:
        cell = await second.run("d = 4")
        text, lost, kept = told(cell)
        assert (second.variables, lost, kept) == ({"d": "4"}, [], False)
        assert "has the save of another session" in text
        named = await second.run("e = 5", await second.manager.create(ME, name="named"))
        assert second.variables == {"e": "5"}
        assert "has the save of another session" in told(named)[0]
    after = {path: path.read_bytes() for path in before}
    assert after == before
    swap()
    third, cell = await comes_back(tmp_path)
    assert (third.variables, told(cell)[1:]) == ({"a": "41", "d": "4"}, ([], True))


async def test_of_two_manifests_that_of_another_session_is_not_read(tmp_path: Path) -> None:
    entry = await saved(tmp_path)
    data = json.loads((entry / MANIFEST).read_text())
    data.pop("kernel-mcp/digest")
    (entry / MANIFEST).write_bytes(manifest.encode({**data, "name": "other"}))
    second, cell = await comes_back(tmp_path)
    text, lost, _ = told(cell)
    assert (second.variables, lost) == (ALL, [])
    assert "its copy beside it was used" in text
