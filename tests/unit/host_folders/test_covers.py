"""Covers of one mount keep what is above a read-only path, and end with it."""

from __future__ import annotations

import pytest

from kernel_mcp.host_folders import covers as module
from kernel_mcp.host_folders.covers import Covers, TooManySecrets
from kernel_mcp.host_folders.secrets import FILE, FIXED, FOLDER, KEPT


@pytest.fixture
def covers() -> Covers:
    return Covers(-1, ())


def test_the_folders_above_a_read_only_path_are_kept(covers: Covers) -> None:
    covers.fix(("a", "b", ".git"))
    assert covers.kinds == {("a",): KEPT, ("a", "b"): KEPT, ("a", "b", ".git"): FIXED}
    assert covers.take_fresh() == list(covers.kinds)
    assert covers.take_fresh() == []
    assert covers.fixes(("a", "b", ".git", "hooks"))
    assert not covers.fixes(("a", "b"))


def test_a_folder_is_kept_until_nothing_in_it_is_read_only(covers: Covers) -> None:
    covers.fix(("a", "one"))
    covers.fix(("a", "two"))
    covers.end([("a", "one")], ("a",))
    assert covers.kinds == {("a",): KEPT, ("a", "two"): FIXED}
    covers.end([("a", "two")], ("a",))
    assert covers.kinds == {}
    assert covers.removed == [("a", "one"), ("a", "two"), ("a",)]


def test_only_hiding_covers_hide_what_is_below(covers: Covers) -> None:
    covers.add((".ssh",), FOLDER)
    covers.fix((".git",))
    assert covers.hides_above((".ssh", "deep", "id"))
    assert not covers.hides_above((".ssh",))
    assert not covers.hides_above((".git", "config"))


def test_what_is_hidden_is_not_shown_again_by_being_read_only(covers: Covers) -> None:
    covers.add(("deep", ".mcp.json"), FILE)
    covers.fix(("deep", ".mcp.json"))
    covers.fix_link(("deep", ".mcp.json"))
    assert covers.kinds == {("deep",): KEPT, ("deep", ".mcp.json"): FILE}


def test_beyond_the_limit_only_a_running_walk_fails(
    covers: Covers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_COVERS", 2)
    monkeypatch.setattr("os.path.lexists", lambda _path: True)
    covers.add((".env",), FILE)
    covers.fix_link(("link",))
    covers.add((".netrc",), FILE)
    assert covers.writable_links == 1
    with pytest.raises(TooManySecrets):
        covers.fix((".git",))
    covers.done = True
    covers.fix((".git",))
    assert covers.over_limit == [(".git",)]
    with pytest.raises(TooManySecrets):
        covers.add((".pgpass",), FILE)
