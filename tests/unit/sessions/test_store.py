"""Entries on disk: whole after every crash, one holder each, bounded in size and time."""

from __future__ import annotations

import contextlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_mcp.linux.pipes import checksum
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.sessions.manifest import OF_PRINCIPAL, Saved, SessionKey
from kernel_mcp.sessions.snapshot import CHANGED, CUT, damage, missing
from kernel_mcp.sessions.store import ROOM, SessionStore
from kernel_mcp.sessions.store_entry import StoreEntry

pytestmark = [pytest.mark.anyio]

KEY = SessionKey("/home/me/project", "default")
ROW = {"names": ["a"], "lost": {}, "variables": [], "stored": ["a"], "copies": [], "files": []}


def store(folder: Path, most_bytes: int = 10**9, most_s: float = 100.0) -> SessionStore:
    made = SessionStore(folder / "kept", most_bytes=most_bytes, most_s=most_s)
    made.make()
    return made


def opened(made: SessionStore, key: SessionKey = KEY) -> StoreEntry:
    entry = made.open(key)
    assert entry is not None
    return entry


def save(entry: StoreEntry, data: bytes, cell: int = 1) -> None:
    path = entry.new_dump_path()
    path.write_bytes(data)
    key = entry.key
    saved = Saved(key.folder, key.name, cell=cell, moment=1.0, dump=path.name)
    entry.commit(replace(saved, size=len(data), checksum=checksum(data), variables=ROW))


def test_what_was_saved_is_there_for_the_next_who_opens_the_entry(tmp_path: Path) -> None:
    entry = opened(store(tmp_path))
    assert entry.saved is None
    assert entry.dump() is None
    save(entry, b"first")
    save(entry, b"second", cell=7)
    entry.close()
    again = opened(store(tmp_path))
    dump = again.dump()
    assert again.saved is not None
    assert again.saved.cell == 7
    assert dump is not None
    assert (dump.path.read_bytes(), dump.names) == (b"second", ("a",))
    assert len(list(again.folder.glob("variables-*"))) == 1


def test_only_this_user_may_look(tmp_path: Path) -> None:
    made = store(tmp_path)
    opened(made)
    for folder in (tmp_path / "kept", *(tmp_path / "kept").iterdir()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_crash_at_any_point_leaves_what_was_saved_before(tmp_path: Path) -> None:
    entry = opened(store(tmp_path))
    save(entry, b"old")
    entry.new_dump_path().write_bytes(b"half of the n")
    (entry.folder / "manifest.json.new").write_bytes(b'{"format": 1, "fol')
    entry.close()
    again = opened(store(tmp_path))
    dump = again.dump()
    assert dump is not None
    assert dump.path.read_bytes() == b"old"
    save(again, b"new")
    assert again.saved is not None
    there = {path.name for path in again.folder.iterdir()}
    assert there == {"manifest.json", "manifest.copy.json", "r", again.saved.dump}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1, "folder": 3}', "[" * 100_000])
def test_a_manifest_that_cannot_be_read_is_a_problem_and_no_failure(
    tmp_path: Path, text: str
) -> None:
    entry = opened(store(tmp_path))
    (entry.folder / "manifest.json").write_text(text)
    entry.close()
    again = opened(store(tmp_path))
    assert again.saved is None
    assert again.problem


async def test_a_dump_that_is_not_whole_does_not_count(tmp_path: Path) -> None:
    entry = opened(store(tmp_path))
    save(entry, b"data")
    dump = entry.dump()
    assert dump is not None
    assert await damage(dump) == ""
    for data, why in ((b"dat", CUT), (b"dada", CHANGED)):
        dump.path.write_bytes(data)
        assert await damage(dump) == why
    dump.path.unlink()
    assert "No such file" in await damage(dump)


def test_a_manifest_names_no_file_outside_its_entry(tmp_path: Path) -> None:
    entry = opened(store(tmp_path))
    save(entry, b"data")
    (tmp_path / "elsewhere").write_bytes(b"data")
    assert entry.saved is not None
    entry.commit(replace(entry.saved, dump="../../../elsewhere"))
    entry.close()
    dump = opened(store(tmp_path)).dump()
    assert dump is not None
    assert dump.path == entry.folder / "elsewhere"
    assert "No such file" in missing(dump)


def test_one_holds_an_entry_until_it_lets_go(tmp_path: Path) -> None:
    entry = opened(store(tmp_path))
    assert store(tmp_path).open(KEY) is None
    assert store(tmp_path).open(SessionKey(KEY.folder, "other")) is not None
    entry.close()
    assert store(tmp_path).open(KEY) is not None


def test_an_entry_that_is_being_let_go_is_waited_for(tmp_path: Path) -> None:
    entry = opened(store(tmp_path))
    entry.mark_closing()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(store(tmp_path).open, KEY)
        entry.close()
        assert waiting.result() is not None


def test_a_removed_entry_can_be_had_again(tmp_path: Path) -> None:
    made = store(tmp_path)
    entry = opened(made)
    save(entry, b"data")
    entry.workspace.mkdir()
    (entry.workspace / "file").touch()
    entry.close()
    assert made.has(KEY)
    assert made.forget(KEY.id)
    assert not made.has(KEY)
    assert not entry.workspace.exists()
    again = opened(made)
    assert again.saved is None
    assert not made.forget(KEY.id)


class _Killed(BaseException):
    """The kill of a server at any moment."""


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("again", ["collect", "open"])
def test_a_removal_that_was_cut_short_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, again: str
) -> None:
    made = store(tmp_path)
    entry = opened(made)
    save(entry, b"data")
    for folder in (entry.workspace, entry.layer):
        folder.mkdir()
        (folder / "file").touch()
    entry.close()
    steps = 0

    def interrupted(path: Path) -> None:
        nonlocal steps
        steps += 1
        if steps > step:
            raise _Killed
        remove_tree(path)

    with monkeypatch.context() as patch:
        patch.setattr("kernel_mcp.sessions.store_entry.remove_tree", interrupted)
        with pytest.raises(_Killed) if step < 4 else contextlib.nullcontext():
            made.forget(KEY.id)
    assert not made.has(KEY)
    assert made.entries() == []
    if again == "open":
        successor = opened(made)
        assert (successor.saved, successor.problem) == (None, "")
        assert not successor.workspace.exists()
        made.collect()
        assert successor.folder.exists()
    else:
        made.collect()
        assert [*tmp_path.glob("kept/[wpkl]/*")] == []


def test_what_a_server_has_is_not_collected(tmp_path: Path) -> None:
    made = store(tmp_path)
    entry = opened(made)
    entry.workspace.mkdir()
    entry.folder.rename(tmp_path / "away")  # as while it is being made
    made.collect()
    assert entry.workspace.exists()
    entry.close()
    made.collect()
    assert not entry.workspace.exists()


def test_an_entry_that_was_not_used_for_long_is_gone(tmp_path: Path) -> None:
    made = store(tmp_path)
    entry = opened(made)
    save(entry, b"data")
    entry.close()
    later = SessionStore(
        tmp_path / "kept", most_bytes=0, most_s=100.0, now=lambda: made.now() + 101
    )
    assert not later.has(KEY)
    empty = opened(later)
    assert empty.saved is None
    assert empty.removed is not None
    assert (empty.removed[0].split(" (")[0], empty.removed[1]) == (
        "it was not used for 2 min",
        ("a",),
    )
    empty.close()
    assert opened(later).removed is None


def test_the_longest_unused_go_when_all_hold_too_much_and_those_in_use_stay(
    tmp_path: Path,
) -> None:
    made = store(tmp_path)
    for number, name in enumerate(("held", "oldest", "newer")):
        entry = opened(made, SessionKey("/p", name))
        save(entry, bytes(200_000))
        for path in (entry.folder, entry.folder / "manifest.json"):
            os.utime(path, (made.now() - 50 + number,) * 2)
        if name != "held":
            entry.close()
    small = SessionStore(tmp_path / "kept", most_bytes=500_000, most_s=100.0)
    removed = [each.saved.name for each in small.make_room() if each.saved is not None]
    assert removed == ["oldest"]
    (tmp_path / "kept" / "r" / ("0" * 32 + ".was")).write_text("[")
    small.collect()
    again = opened(small, SessionKey("/p", "oldest"))
    assert again.removed == (ROOM, ("a",))
    again.close()
    assert small.forget(again.key.id)
    assert opened(small, SessionKey("/p", "oldest")).removed is None
    assert small.forget(again.key.id) is False  # it is in use
    (tmp_path / "kept" / "r" / ("1" * 32 + ".was")).write_text("{}")
    small.collect()
    assert list((tmp_path / "kept" / "r").glob("*.was"))
    small.drop_words()
    assert not list((tmp_path / "kept" / "r").glob("*.was"))
    assert {each.saved.name for each in small.entries() if each.saved} == {"held", "newer"}


def test_a_principal_that_keeps_much_takes_no_room_from_others(tmp_path: Path) -> None:
    made = store(tmp_path)
    kept = [("other", "old"), ("greedy", "a"), ("greedy", "held"), ("greedy", "b"), ("greedy", "c")]
    for number, (principal, name) in enumerate(kept):
        entry = opened(made, SessionKey(f"{OF_PRINCIPAL}{principal}", name))
        save(entry, bytes(200_000))
        for path in (entry.folder, entry.folder / "manifest.json"):
            os.utime(path, (made.now() - 50 + number,) * 2)
        if name != "held":
            entry.close()
    for most, gone in ((700_000, ["a", "b"]), (450_000, ["c"]), (150_000, ["old"])):
        small = SessionStore(tmp_path / "kept", most_bytes=most, most_s=100.0)
        assert [each.saved.name for each in small.make_room() if each.saved is not None] == gone


def test_variables_that_are_dropped_do_not_come_back(tmp_path: Path) -> None:
    entry = opened(store(tmp_path))
    save(entry, b"data")
    entry.drop_variables(9)
    entry.close()
    again = opened(store(tmp_path))
    assert again.dump() is None
    assert again.saved is not None
    assert again.saved.cell == 9
    assert list(again.folder.glob("variables-*")) == []


def test_what_no_server_has_put_there_is_no_session(tmp_path: Path) -> None:
    made = store(tmp_path)
    opened(made).close()
    (made.records / "evil\x1b[2J").mkdir()
    (made.records / ("a" * 32)).write_text("")
    (made.records / ("b" * 32)).symlink_to(tmp_path)
    assert [each.id for each in made.entries()] == [KEY.id]
    assert tmp_path.is_dir()
