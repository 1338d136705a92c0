"""The folder of an environment, and how much an installer may write."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kernel_mcp.environments import folder
from kernel_mcp.environments import folder as folders
from kernel_mcp.environments.folder import REST, Spending
from kernel_mcp.environments.interpreters import Interpreter
from kernel_mcp.environments.metadata import note_file, noted_modules

pytestmark = pytest.mark.anyio


BASE = "/usr/local/python/bin/python3.12"
PYTHON = Interpreter(BASE, "3.12.1", "cpython", "/usr/local/python", "/usr/local/python")


@pytest.fixture
def env(tmp_path: Path) -> Path:
    folder = tmp_path / "env"
    folders.lay_out(folder, PYTHON)
    (folder / "lib/python3.12/site-packages").mkdir(parents=True)
    return folder


def test_the_skeleton_is_that_of_a_virtual_environment(env: Path) -> None:
    assert (env / "bin/python").readlink() == Path(BASE)
    assert (env / "bin/python3.12").readlink() == Path("python")
    assert (env / "lib64").readlink() == Path("lib")
    lines = (env / "pyvenv.cfg").read_text().splitlines()
    assert "home = /usr/local/python/bin" in lines
    assert "include-system-site-packages = false" in lines


def test_interpreter_and_settings_are_made_anew(env: Path) -> None:
    (env / "bin/python").unlink()
    (env / "bin/python").write_text("#!/bin/sh\n")
    (env / "bin/python3").unlink()
    (env / "bin/python3").mkdir()
    (env / "bin/pyvenv.cfg").write_text("home = /evil")
    (env / "pyvenv.cfg").write_text("home = /evil")
    folders.tidy(env, PYTHON)
    test_the_skeleton_is_that_of_a_virtual_environment(env)
    assert (env / "bin/python3").readlink() == Path("python")
    assert not (env / "bin/pyvenv.cfg").exists()


def test_nothing_leads_out_of_the_folder_and_nothing_outside_is_changed(
    env: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (env / "lib/python3.12/site-packages/link.py").symlink_to(outside / "file")
    (env / "lib/python3.12/site-packages/folder").symlink_to(outside)
    (env / "pyvenv.cfg").unlink()
    (env / "pyvenv.cfg").symlink_to(outside / "file")
    os.mkfifo(env / "pipe")
    folders.tidy(env, PYTHON)
    folders.seal(env)
    assert (outside / "file").read_text() == "kept"
    assert (outside / "file").stat().st_mode & stat.S_IWUSR
    kept = {path.name for path in env.rglob("*") if path.is_symlink()}
    assert kept == {"python", "python3", "python3.12", "lib64"}
    assert not (env / "pipe").exists()


def test_a_folder_of_any_depth_is_measured_sealed_and_removed(tmp_path: Path) -> None:
    folder = place = tmp_path / "deep"
    folder.mkdir()
    for _ in range(sys.getrecursionlimit() + 100):
        place /= "d"
        place.mkdir()
    (place / "file").write_bytes(b"12345")
    assert folders.tree_size(folder) == 5
    folders.seal(folder)
    assert place.stat().st_mode & 0o222 == 0
    folders.remove(folder)
    assert not folder.exists()


@pytest.mark.parametrize("other", ["3.0", "3.120", "3.12x", "3"])
def test_only_where_the_interpreter_looks_are_packages(env: Path, other: str) -> None:
    for version, name in (("3.12", "real"), (other, "forged")):
        info = env / f"lib/python{version}/site-packages/{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "RECORD").write_text(f"{name}.py,,\n")
    folders.finish(env, PYTHON, (), agent=False)
    note = folders.read_note(env)
    assert note is not None
    assert note.packages == ("real==1.0",)
    assert noted_modules(env) == {"real": ["real"]}
    threads = replace(PYTHON, version="3.14.0", implementation="cpythont")
    assert folders.site_packages(env, threads) == env / "lib/python3.14t/site-packages"


def test_an_environment_counts_with_a_note_beside_it_and_never_by_one_in_it(env: Path) -> None:
    assert folders.load(env, PYTHON) is None
    (env / "kernel-mcp.json").write_text('{"format": 1}')
    assert folders.load(env, PYTHON) is None
    folders.finish(env, PYTHON, ("x",), agent=True)
    (env / "bin/python").unlink()
    (env / "bin/python").symlink_to(sys.executable)
    other = replace(PYTHON, executable="/other/bin/python", prefix="/other", exec_prefix="/other")
    found = folders.load(env, other)
    assert found is not None
    assert found.base == Path("/other/bin/python")
    assert found.readonly == (env, Path("/other"))
    folders.remove(env)
    assert not note_file(env).exists()


MOST = 1000


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "LOOK_S", 0)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the folders at each measurement: 100 bytes more than at the last."""
    found: list[int] = []

    def size(_: Path) -> int:
        found.append(100 * (len(found) + 1))
        return found[-1]

    monkeypatch.setattr(folder, "tree_size", size)
    return found


async def test_folders_are_looked_at_for_a_part_of_the_time(
    tmp_path: Path, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = count()
    calls = count()
    bounded = Spending(MOST, [tmp_path], clock=lambda: next(moments))
    monkeypatch.setattr(bounded, "_written", lambda: next(calls) * 0)
    await bounded.beyond()
    assert looks[-1] == MOST + 100
    assert next(calls) >= len(looks) * (REST - 1)


async def test_what_is_written_meanwhile_is_seen(
    tmp_path: Path, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = count(step=10**6)
    bounded = Spending(MOST, [tmp_path], clock=lambda: next(moments))
    written = iter((0, MOST, 2 * MOST, 2 * MOST + 1))
    monkeypatch.setattr(bounded, "_written", lambda: next(written))
    await bounded.beyond()
    assert len(looks) == 1
