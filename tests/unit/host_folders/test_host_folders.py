"""Which folders may be mounted, and what file tools know of one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import kernel_mcp
from kernel_mcp.config.load import load
from kernel_mcp.config.settings import Settings
from kernel_mcp.config.values import Mount
from kernel_mcp.errors import ConfigError
from kernel_mcp.host_folders import Shown, checked, shown_folders
from kernel_mcp.host_folders.secrets import readable


def mount(path: Path | str, guest: str = "", mode: str = "ro") -> Mount:
    return Mount(Path(path), guest or str(path), mode)


def test_a_mount_is_seen_at_the_path_that_was_named(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    flags: dict[str, str | list[str]] = {"mount": ["link", f"{tmp_path}/real:/data"]}
    found = load(flags, {}, tmp_path).mounts
    assert found[0] == Mount(tmp_path / "real", str(tmp_path / "link"))
    assert found[1] == Mount(tmp_path / "real", "/data")


@pytest.mark.parametrize("text", ["", ":/x", "a:b:c", "/a:relative", "/a:/b:/c", "/a:/b:no"])
def test_what_is_no_mount_is_refused_in_words(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HOST"):
        load({"mount": [text]}, {}, tmp_path)


def test_a_file_of_the_current_folder_mounts_nothing(tmp_path: Path) -> None:
    (tmp_path / "kernel-mcp.toml").write_text('mount = ["/srv"]\n')
    found = load({}, {}, tmp_path)
    assert found.mounts == ()
    assert found.refusal is not None
    assert found.refusal.keys == ("mount",)
    named = load({"config": str(tmp_path / "kernel-mcp.toml")}, {}, tmp_path)
    assert named.mounts == (mount("/srv"),)


def test_outer_mounts_come_before_inner_ones(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    found = checked([mount(tmp_path / "a" / "b"), mount(tmp_path / "a")], [])
    assert [each.host.name for each in found] == ["a", "b"]


def test_homes_and_what_holds_one_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "me" / "project").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for path in (tmp_path / "me", tmp_path):
        with pytest.raises(ConfigError, match="home folder"):
            checked([mount(path)], [])
    checked([mount(tmp_path / "me" / "project")], [])


def test_places_of_the_server_are_refused_from_both_sides(tmp_path: Path) -> None:
    (tmp_path / "a" / "cache" / "x").mkdir(parents=True)
    own = [("the cache", tmp_path / "a" / "cache")]
    for path in (tmp_path / "a", tmp_path / "a" / "cache", tmp_path / "a" / "cache" / "x"):
        with pytest.raises(ConfigError, match="the cache"):
            checked([mount(path)], own)


def test_one_place_has_one_mount(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="that place"):
        checked([mount(tmp_path, "/data"), mount(tmp_path, "/data/")], [])


def test_what_code_could_replace_by_a_link_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / ".git" / "hooks").mkdir(parents=True)
    outer = mount(tmp_path, mode="rw")
    for inner in (mount(tmp_path / "a", "/data"), mount(tmp_path / "a" / "b")):
        with pytest.raises(ConfigError, match="could put a link in its place"):
            checked([outer, inner], [])
        checked([mount(tmp_path), inner], [])
    checked([outer, mount(tmp_path / "a"), mount(tmp_path / ".git" / "hooks")], [])


@pytest.mark.parametrize("program", [kernel_mcp.__path__[0], sys.base_prefix])
def test_what_the_server_runs_is_not_to_be_changed(program: str, tmp_path: Path) -> None:
    settings = Settings(mounts=(mount(Path(program).resolve(), "/data", "rw"),))
    with pytest.raises(ConfigError, match="which this server runs"):
        shown_folders(settings, "bwrap", tmp_path, tmp_path)


def test_names_for_people_are_text_of_one_line() -> None:
    assert readable(("a", os.fsdecode(b"\xff\n"))) == r"a/\xff\n"


def test_other_sandboxes_say_that_they_show_no_folder(tmp_path: Path) -> None:
    settings = Settings(mounts=(mount(tmp_path),))
    with pytest.raises(ConfigError, match="not with landlock"):
        shown_folders(settings, "landlock", tmp_path / "s", tmp_path / "c")


def test_tools_know_what_is_covered_by_path_name_and_inode(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("url = https://me:pass@host/")
    info = (tmp_path / "plain").stat()
    shown = Shown(mount(tmp_path), covers={("kept", "x"): "folder"})
    root = os.open(tmp_path, os.O_PATH)
    try:
        for covered in ((".env",), (".ssh", "id"), ("kept", "x", "y"), (".git", "config")):
            assert shown.covers_path(root, covered), covered
        for seen in ((), ("plain",), ("kept",), (".git", "HEAD"), ("environment",)):
            assert not shown.covers_path(root, seen), seen
    finally:
        os.close(root)
    assert not shown.covers_file(info)
    shown.inodes.add((info.st_dev, info.st_ino))
    assert shown.covers_file(info)


def test_a_path_belongs_to_a_mount_by_whole_components(tmp_path: Path) -> None:
    shown = Shown(mount(tmp_path, "/data"))
    assert shown.parts("/data") == ()
    assert shown.parts("/data/a/b") == ("a", "b")
    assert shown.parts("/database") is None
