"""Which folders may be mounted, and what file tools know of one."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp import host_folders
from kernel_mcp.config.load import load
from kernel_mcp.config.mounts import Mount
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError
from kernel_mcp.host_folders import checked, exposed_mounts
from kernel_mcp.host_folders.exposed import ExposedMount
from kernel_specs.landlock import calls


def mount(path: Path | str, guest: str = "", mode: str = "ro") -> Mount:
    return Mount(Path(path), guest or str(path), mode)


def test_a_mount_is_seen_at_the_path_that_was_named(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    flags: dict[str, str | list[str]] = {"mount": ["link", f"{tmp_path}/real:/data"]}
    found = load(flags, {}, tmp_path).mounts
    assert found[0] == Mount(tmp_path / "real", str(tmp_path / "link"))
    assert found[1] == Mount(tmp_path / "real", "/data")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":/x",
        "a:b:c",
        "/a:relative",
        "/a:/b:/c",
        "/a:/b:no",
        ":strict",
        "/a:strict:rw",
        "/a:/b:strict:strict",
    ],
)
def test_what_is_no_mount_is_refused_in_words(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HOST"):
        load({"mount": [text]}, {}, tmp_path)


@pytest.mark.parametrize(
    ("text", "guest", "mode"),
    [("{}:strict", "{}", "ro"), ("{}:rw:strict", "{}", "rw"), ("{}:/b:ro:strict", "/b", "ro")],
)
def test_strict_comes_last(text: str, guest: str, mode: str, tmp_path: Path) -> None:
    (found,) = load({"mount": [text.format(tmp_path)]}, {}, tmp_path).mounts
    assert found == Mount(tmp_path, guest.format(tmp_path), mode, strict=True)
    assert str(found).endswith(f":{mode}:strict")


def test_what_is_strict_is_not_in_what_is_not(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    strict = [Mount(path, f"/data/{path.name}", strict=True) for path in (tmp_path, inner)]
    for loose in (Mount(tmp_path, "/data"),):
        with pytest.raises(ConfigError, match="has to be strict, too"):
            checked([loose, strict[1]], [])
    checked([replace(strict[0], guest="/data"), strict[1]], [])
    with pytest.raises(ConfigError, match="cannot be strict"):
        checked([replace(strict[0], guest="/tmp/x/y")], [])


@pytest.mark.parametrize("found", [1, OSError(errno.ENOSYS, "no such call")])
def test_strict_takes_landlock(
    found: int | OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version() -> int:
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(calls, "version", version)
    settings = Settings(mounts=(Mount(tmp_path, str(tmp_path / "guest"), strict=True),))
    with pytest.raises(ConfigError, match="Leave strict out"):
        exposed_mounts(settings, "bwrap", tmp_path / "s", tmp_path / "c")


def test_a_file_of_the_current_folder_mounts_nothing(tmp_path: Path) -> None:
    (tmp_path / "kernel-mcp.toml").write_text('mount = ["/srv"]\n')
    found = load({}, {}, tmp_path)
    assert found.mounts == ()
    assert found.ignored_keys is not None
    assert found.ignored_keys.keys == ("mount",)
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


def test_the_folder_of_a_gpus_driver_is_shown_where_it_is_and_not_to_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia/lib64").mkdir(parents=True)
    monkeypatch.setattr(host_folders, "_CLOSED", (str(tmp_path),))
    monkeypatch.setattr(host_folders, "_TAKEN", (str(tmp_path),))
    driver = tmp_path / "nvidia"
    with pytest.raises(ConfigError, match="belongs to the system"):
        checked([mount(driver)], [])
    monkeypatch.setattr(host_folders, "_DRIVERS", (str(driver),))
    assert checked([mount(driver)], []) == (mount(driver),)
    checked([mount(driver / "lib64")], [])
    for refused in (mount(tmp_path), mount(driver, mode="rw"), mount(driver, "/data")):
        with pytest.raises(ConfigError, match="belongs to the system"):
            checked([refused], [])


def test_bind_mounts_of_what_is_refused_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under whatever name Linux has the same folder, or one that it is in."""
    for name in ("me/project", "cache/x", "other"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    twins = {tmp_path / "other": tmp_path / "me"}
    found = os.stat

    def stat(path: Path | str, **more: Any) -> os.stat_result:
        return found(twins.get(Path(path), Path(path)), **more)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(ConfigError, match="home folder"):
        checked([mount(tmp_path / "other")], [])
    twins[tmp_path / "other"] = Path("/etc")
    with pytest.raises(ConfigError, match="belongs to the system"):
        checked([mount(tmp_path / "other")], [])
    twins[tmp_path / "other"] = tmp_path / "cache"
    with pytest.raises(ConfigError, match="the cache"):
        checked([mount(tmp_path / "other")], [("the cache", tmp_path / "cache")])


def test_in_another_mount_one_takes_a_place_that_is_there_and_shown(tmp_path: Path) -> None:
    for name in ("outer/.ssh", "outer/sub", "inner"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "outer" / ".ssh" / "known_hosts").touch()
    (tmp_path / "outer" / "link").symlink_to("sub")
    outer = mount(tmp_path / "outer", "/data")
    for place, why in {
        "/data/.ssh/known_hosts": "is covered",
        "/data/new": "nothing is made there",
        "/data/link": "nothing is made there",
    }.items():
        with pytest.raises(ConfigError, match=why):
            checked([outer, mount(tmp_path / "inner", place)], [])
    with pytest.raises(ConfigError, match="one is a folder"):
        checked([outer, mount(tmp_path / "outer" / ".ssh" / "known_hosts", "/data/sub")], [])
    checked([outer, mount(tmp_path / "inner", "/data/sub")], [])


@pytest.mark.parametrize("name", [".ssh", ".aws", ".config/gcloud", ".ssh/keys", ".Docker"])
def test_of_a_folder_of_secrets_single_files_can_be_mounted_alone(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "needed").touch()
    with pytest.raises(ConfigError, match=r"folder of secrets.*mount the one file"):
        checked([mount(folder)], [])
    checked([mount(folder / "needed")], [])


def test_places_of_the_server_are_refused_from_both_sides(tmp_path: Path) -> None:
    (tmp_path / "a" / "cache" / "x").mkdir(parents=True)
    own = [("the cache", tmp_path / "a" / "cache")]
    for path in (tmp_path / "a", tmp_path / "a" / "cache", tmp_path / "a" / "cache" / "x"):
        with pytest.raises(ConfigError, match="the cache"):
            checked([mount(path)], own)


def test_one_place_has_one_mount(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="that place"):
        checked([mount(tmp_path, "/data"), mount(tmp_path, "/data/")], [])


def test_landlock_shows_folders_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to("folder")

    def shown(one: Mount) -> tuple[Mount, ...]:
        settings = Settings(mounts=(one,))
        return exposed_mounts(settings, "landlock", tmp_path / "s", tmp_path / "c")

    assert shown(mount(folder, str(tmp_path / "link")))
    with pytest.raises(ConfigError, match="seen where it is"):
        shown(mount(folder, "/data"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match="users of their own"):
        shown(mount(folder, mode="rw"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (one,) = shown(replace(mount(folder, mode="rw"), first=True))
    assert one.writable
    assert not one.start


def test_without_a_sandbox_folders_have_no_effect_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(mounts=(mount(tmp_path),))
    assert exposed_mounts(settings, "none", tmp_path / "s", tmp_path / "c") == ()
    assert "no effect" in caplog.text


def test_tools_know_what_is_covered_by_path_name_and_inode(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("url = https://me:pass@host/")
    info = (tmp_path / "plain").stat()
    shown = ExposedMount(mount(tmp_path), covers={("kept", "x"): "folder"})
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
    shown = ExposedMount(mount(tmp_path, "/data"))
    assert shown.parts("/data") == ()
    assert shown.parts("/data/a/b") == ("a", "b")
    assert shown.parts("/database") is None


def test_an_environment_is_set_aside_by_its_file_and_all_else_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "pyvenv.cfg").touch()
    (tmp_path / "uv.toml").touch()  # such as the operator's own, which has no known name
    shown = ExposedMount(mount(tmp_path, mode="rw"))
    assert shown.executed_entries(("src",)) == [("src", "pyvenv.cfg")]
    assert shown.executed_entries(("uv.toml",)) == [("uv.toml",)]
    assert shown.executed_entries((".git",)) == [(".git",)]
    for name in ("src", "uv.toml"):
        (sign,) = shown.executed_entries((name,))
        shown.quarantine(sign)
    assert shown.executed_entries(("src",)) == [], "told of twice, it is set aside once"
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert names == {"src", "src/pyvenv.cfg.set-aside-1", "uv.toml.set-aside-2"}
