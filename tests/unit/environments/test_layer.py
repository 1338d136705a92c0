"""The folder of a session's own packages, and the first lines of its programs."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from kernel_mcp.environments.folder import tree_size
from kernel_mcp.environments.layer import STAGING, Generation, Layer, retarget, versions
from tests.unit.packages.wheels import requirements, wheel


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
    found = layer.describe(requirements(f"{name}=={version}"))
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
    assert layer.requested() == requirements("one==1.0")
    assert layer.permitted() == {"one"}
    assert [folder.name for folder in layer.folders()] == ["1"]
    assert (layer.folder / "1/one.py").stat().st_mode & 0o222 == 0
    assert not (layer.folder / STAGING).exists()


def test_the_newest_generation_counts_and_the_older_stay(layer: Layer, tmp_path: Path) -> None:
    add(layer, "one", "1.0", tmp_path)
    add(layer, "two", "1.0", tmp_path)
    add(layer, "one", "2.0", tmp_path)
    assert layer.packages() == {"one": "2.0", "two": "1.0"}
    assert layer.requested() == requirements("one==2.0", "two==1.0")
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
    layer.commit(layer.describe(requirements("x")))
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


BASE, PYTHON = Path("/base/bin/python3"), Path("/env/bin/python")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "head",
    [b"#!/base/bin/python3\n", b"#!/bin/sh\n'''exec' /base/bin/python3 \"$0\" \"$@\"\n' '''\n"],
)
def test_a_script_of_the_base_starts_the_environments_python(programs: Path, head: bytes) -> None:
    script = programs / "tool"
    script.write_bytes(head + b"import x\n")
    script.chmod(0o755)
    retarget(programs, base=BASE, python=PYTHON)
    assert script.read_bytes() == b"#!/env/bin/python\nimport x\n"
    assert script.stat().st_mode & 0o777 == 0o755


def test_options_of_another_python_and_programs_stay(programs: Path) -> None:
    contents = [b"#!/base/bin/python3.9\nx\n", b"#!/bin/sh\necho\n", b"\x7fELF", b""]
    for number, content in enumerate(contents):
        (programs / str(number)).write_bytes(content)
    retarget(programs, base=BASE, python=PYTHON)
    assert [(programs / str(number)).read_bytes() for number in range(4)] == contents


def test_links_and_pipes_are_left_alone(programs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"#!/base/bin/python3\n")
    (programs / "link").symlink_to(outside)
    os.mkfifo(programs / "pipe")
    retarget(programs, base=BASE, python=PYTHON)
    assert outside.read_bytes() == b"#!/base/bin/python3\n"
    (tmp_path / "linked").symlink_to(programs)
    retarget(tmp_path / "linked", base=BASE, python=PYTHON)
    retarget(tmp_path / "missing", base=BASE, python=PYTHON)


def test_a_long_path_is_started_by_a_shell(programs: Path) -> None:
    (programs / "tool").write_bytes(b"#!/base/bin/python3\nx\n")
    long = Path("/", *["folder"] * 30, "it's python")
    retarget(programs, base=BASE, python=long)
    first, second, third, rest = (programs / "tool").read_text().splitlines()
    assert (first, third, rest) == ("#!/bin/sh", "' '''", "x")
    assert second.startswith("'''exec' '/folder/")
    assert compile((programs / "tool").read_text(), "tool", "exec")
