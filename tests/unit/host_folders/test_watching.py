"""Changes in mounted folders are reported, with what they mean for covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.host_folders.inodes import SharedInodes
from kernel_mcp.host_folders.makers import CODE, HOST, LIKELY, Makers, by_code, user_of
from kernel_mcp.host_folders.makers import counts_as_code as counts
from kernel_mcp.host_folders.mounted_folder import MountedFolder
from kernel_mcp.host_folders.watching import Change, Watches


def watched(host: Path, **more: Any) -> tuple[Watches, MountedFolder]:
    """A folder that is walked and watched from now on."""
    data = {"host": str(host), "guest": "/data", "own": [], "inner": [], "writable": False}
    watches = Watches()
    folder = MountedFolder(0, {**data, "strict": False, **more}, watches, SharedInodes())
    folder.walk.all()
    return watches, folder


def changed(watches: Watches) -> dict[tuple[str, ...], Change]:
    """The pending changes by path."""
    found = [change for change in watches.events() if change is not None]
    return {change.parts: change for change in found}


def test_what_is_new_is_reported_and_a_secret_is_urgent(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    watches, _ = watched(tmp_path)
    (tmp_path / "sub" / ".env").touch()
    (tmp_path / "plain").touch()
    found = changed(watches)
    assert {path: change.urgent for path, change in found.items()} == {
        ("sub", ".env"): True,
        ("plain",): False,
    }
    assert changed(watches) == {}


def test_a_secret_that_gets_another_name_stays_hidden(tmp_path: Path) -> None:
    (tmp_path / ".env").touch()
    watches, _ = watched(tmp_path)
    (tmp_path / ".env").rename(tmp_path / "plain")
    assert changed(watches)[("plain",)].hidden


def test_writes_matter_where_covers_depend_on_the_content(tmp_path: Path) -> None:
    for name in ("plain", "settings.yml", ".mcp.json"):
        (tmp_path / name).touch()
    watches, folder = watched(tmp_path)
    folder.sources.add(("settings.yml",))
    for name in ("plain", "settings.yml", ".mcp.json"):
        (tmp_path / name).write_text("x")
    assert {*changed(watches)} == {("settings.yml",), (".mcp.json",)}


def test_a_change_of_what_agents_obey_is_noted_in_a_writable_mount(tmp_path: Path) -> None:
    (tmp_path / "CLAUDE.md").touch()
    watches, folder = watched(tmp_path, writable=True)
    with (tmp_path / "CLAUDE.md").open("w") as file:
        file.write("x")
        file.flush()
        changed(watches)
        assert folder.obeyed == {("CLAUDE.md",): True}
    folder.obeyed.clear()
    (tmp_path / "CLAUDE.md").rename(tmp_path / "gone")
    changed(watches)
    assert folder.obeyed == {("CLAUDE.md",): False}


def test_a_file_elsewhere_is_watched_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    watches, _ = watched(tmp_path / "mount")
    watches.watch_outside([str(tmp_path / ".gitconfig"), str(tmp_path / "gone" / "x")])
    (tmp_path / "other").touch()
    assert (changed(watches), watches.outside_changed) == ({}, False)
    (tmp_path / ".gitconfig").touch()
    assert (changed(watches), watches.outside_changed) == ({}, True)


def test_what_this_process_makes_is_of_the_host(tmp_path: Path) -> None:
    if Makers().fileno() < 0:
        pytest.skip("fanotify takes root and Linux 5.15")
    watches, folder = watched(tmp_path, writable=True)
    if not folder.tells_makers:
        pytest.skip("this file system has no fanotify")
    (tmp_path / ".envrc").write_text("x")
    assert folder.maker((".envrc",)) == HOST
    assert folder.writer((".envrc",), modified=False) == HOST
    assert folder.maker(("plain",)) == ""
    watches.makers.note()


def test_makers_are_told_by_their_words() -> None:
    assert [by_code(each) for each in (CODE, f"{CODE}:7", LIKELY, HOST)] == [1, 1, 0, 0]
    assert [counts(each) for each in (f"{CODE}:7", LIKELY, HOST)] == [True, True, False]
    assert [user_of(each) for each in (f"{CODE}:7", CODE, HOST)] == [7, None, None]
