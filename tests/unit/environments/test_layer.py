"""The folder of a session's own packages."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from kernel_mcp.environments.folder import tree_size
from kernel_mcp.environments.layer import STAGING, Generation, Layer, versions
from tests.unit.packages.wheels import wheel


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    layer = Layer(tmp_path / "layer")
    layer.make()
    return layer


def add(layer: Layer, name: str, version: str, tmp_path: Path, **more: tuple[str, ...]) -> None:
    """Install a wheel as `uv` would."""
    staging = layer.stage()
    with zipfile.ZipFile(wheel(tmp_path / "wheels", name, version)) as archive:
        archive.extractall(staging)
    found = layer.describe((f"{name}=={version}",))
    layer.commit(
        Generation(found.requested, found.packages, found.modules, more.get("permitted", ()))
    )


def test_a_new_layer_is_empty(layer: Layer) -> None:
    assert layer.empty
    assert layer.packages() == {}
    assert layer.next_name == "1"
    assert layer.folder.stat().st_mode & 0o777 == 0o755


def test_a_committed_generation_is_there_and_sealed(layer: Layer, tmp_path: Path) -> None:
    add(layer, "one", "1.0", tmp_path, permitted=("one",))
    assert layer.packages() == {"one": "1.0"}
    assert layer.modules() == {"one": ("one",)}
    assert layer.requested() == ("one==1.0",)
    assert layer.permitted() == {"one"}
    assert [folder.name for folder in layer.folders()] == ["1"]
    assert (layer.folder / "1/one.py").stat().st_mode & 0o222 == 0
    assert not (layer.folder / STAGING).exists()


def test_the_newest_generation_counts_and_the_older_stay(layer: Layer, tmp_path: Path) -> None:
    add(layer, "one", "1.0", tmp_path)
    add(layer, "two", "1.0", tmp_path)
    add(layer, "one", "2.0", tmp_path)
    assert layer.packages() == {"one": "2.0", "two": "1.0"}
    assert layer.requested() == ("one==2.0", "two==1.0")
    assert [folder.name for folder in layer.folders()] == ["3", "2", "1"]


def test_what_was_staged_and_not_committed_does_not_count(layer: Layer) -> None:
    (layer.stage() / "half.py").write_text("x = 1")
    assert layer.empty
    assert list(layer.stage().iterdir()) == []
    layer.discard()
    assert list(layer.folder.iterdir()) == []


def test_links_and_special_files_do_not_get_into_a_layer(layer: Layer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    staging = layer.stage()
    (staging / "link.py").symlink_to(secret)
    (staging / "kernel-mcp.json").symlink_to(secret)
    (staging / "folder").symlink_to(tmp_path)
    os.mkfifo(staging / "pipe")
    layer.commit(layer.describe(("x",)))
    assert list((layer.folder / "1").iterdir()) == []
    assert secret.read_text() == "secret"


def test_programs_stay_and_locks_of_the_installer_are_left_out(layer: Layer) -> None:
    staging = layer.stage()
    (staging / "bin").mkdir()
    (staging / "bin/tool").write_text("#!")
    (staging / "bin/tool").chmod(0o755)
    (staging / ".lock").touch()
    layer.describe(())
    assert [entry.name for entry in staging.iterdir()] == ["bin"]
    assert (staging / "bin/tool").stat().st_mode & 0o777 == 0o555


def test_a_program_is_no_module(layer: Layer, tmp_path: Path) -> None:
    staging = layer.stage()
    files = {"one.py": "", "bin/one_tool.py": "#!"}
    with zipfile.ZipFile(wheel(tmp_path / "wheels", "one", files=files)) as archive:
        archive.extractall(staging)
    assert layer.describe(()).modules == {"one": ("one",)}


def test_a_cleared_layer_is_the_same_folder_without_content(layer: Layer, tmp_path: Path) -> None:
    before = layer.folder.stat().st_ino
    add(layer, "one", "1.0", tmp_path)
    layer.clear()
    assert layer.empty
    assert layer.folder.stat().st_ino == before


def test_versions_come_from_pins() -> None:
    assert versions(["a==1", "b==2.0"]) == {"a": "1", "b": "2.0"}


def test_the_size_of_a_tree_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(b"12345")
    assert tree_size(tmp_path) == 5
