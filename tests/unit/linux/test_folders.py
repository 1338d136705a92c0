"""Folders whose content a server believes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.linux.folders import home_folder, is_own, own_folder, private_folder, runtime_folder

STRANGER = 12_399
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that everybody may write to."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def test_missing_folders_are_made_and_nobody_else_may_write_there(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert own_folder(tmp_path / "a" / "b" / "c") == tmp_path / "a" / "b" / "c"
        private_folder(tmp_path / "c")
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c", "c")]
    assert modes == [0o755, 0o755, 0o755, 0o700]


def test_a_private_folder_that_others_could_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    assert private_folder(tmp_path / "a").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o555, 0o711])
def test_a_folder_with_files_that_others_use_stays_open(tmp_path: Path, mode: int) -> None:
    (tmp_path / "system" / "lib").mkdir(parents=True)
    (tmp_path / "system").chmod(mode)
    with pytest.raises(PermissionError, match="has files in it and is open to others"):
        private_folder(tmp_path / "system")
    assert (tmp_path / "system").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(mode)
    for make in (own_folder, private_folder):
        with pytest.raises(PermissionError, match=r"others may write to .*chmod go-w"):
            make(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mode & 0o7777 == mode


def test_a_folder_that_others_could_replace_is_refused(shared: Path) -> None:
    (shared / "mine").mkdir(mode=0o700)
    for path in (shared / "mine", shared / "mine" / "deeper", shared / "missing"):
        with pytest.raises(PermissionError, match=f"could replace .*others may write to {shared}"):
            own_folder(path)
    assert [entry.name for entry in shared.iterdir()] == ["mine"]
    shared.chmod(0o1777)
    own_folder(shared / "mine" / "deeper")


def test_links_are_followed_with_the_same_eyes(tmp_path: Path, shared: Path) -> None:
    (shared / "real").mkdir()
    (tmp_path / "link").symlink_to(shared / "real")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "link", tmp_path / "link" / "x", tmp_path / "loop" / "x"):
        with pytest.raises(PermissionError, match="could replace"):
            own_folder(path)
    (tmp_path / "good").mkdir()
    (tmp_path / "to-good").symlink_to("good")
    own_folder(tmp_path / "to-good")
    own_folder(tmp_path / "to-good" / "x")
    (tmp_path / "to-shared").symlink_to(shared)
    with pytest.raises(PermissionError, match="others may write"):
        own_folder(tmp_path / "to-shared")


def test_a_file_in_the_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(OSError, match="not a folder of this user"):
        own_folder(tmp_path / "a")


@needs_root
def test_what_a_stranger_has_prepared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s" / "mine").mkdir(parents=True)
    os.chown(tmp_path / "s", STRANGER, STRANGER)
    for path in (tmp_path / "s", tmp_path / "s" / "mine", tmp_path / "s" / "missing"):
        with pytest.raises(PermissionError, match=f"belongs to user {STRANGER}"):
            own_folder(path)
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (tmp_path / "target").mkdir()
    (sticky / "link").symlink_to(tmp_path / "target")
    os.lchown(sticky / "link", STRANGER, STRANGER)
    with pytest.raises(PermissionError, match=f"belongs to user {STRANGER}"):
        own_folder(sticky / "link" / "x")
    assert list((tmp_path / "target").iterdir()) == []


@needs_root
def test_a_group_of_others_may_not_write_but_roots_may(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "g").chmod(0o770)
    own_folder(tmp_path / "g")
    os.chown(tmp_path / "g", -1, STRANGER)
    (tmp_path / "g").chmod(0o770)
    with pytest.raises(PermissionError, match="others may write"):
        own_folder(tmp_path / "g")


def test_a_meeting_place_that_somebody_else_has_prepared_is_refused_in_words(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    with pytest.raises(SandboxUnavailable, match="set XDG_RUNTIME_DIR to a folder of this user"):
        runtime_folder("uids")
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("home", ["/", "", "/usr/share/httpd", "/proc", "relative"])
def test_a_folder_of_the_system_is_nobodys_home(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    assert home_folder() is None


def test_who_is_in_no_list_of_users_has_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_folder() == tmp_path

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    assert home_folder() is None


@needs_root
def test_what_others_own_is_not_ones_own(tmp_path: Path) -> None:
    assert is_own(tmp_path / "a" / "b")
    (tmp_path / "other").mkdir()
    os.chown(tmp_path / "other", STRANGER, STRANGER)
    assert not is_own(tmp_path / "other" / "cache")
