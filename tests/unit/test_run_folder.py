"""The files of a test run are removed with it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_folder import PLACE, VARIABLE, RunFolder, short_of

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
(folder.path / "cache" / "kernel-mcp").mkdir(parents=True)
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_is_told_by_variables_and_goes_with_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    environ: dict[str, str] = {}
    folder.tell(environ)
    assert environ[VARIABLE] == str(folder.path)
    assert Path(environ["XDG_CACHE_HOME"]).parent == folder.path
    folder.tell(kept := {"XDG_CACHE_HOME": "/somewhere"})
    assert kept["XDG_CACHE_HOME"] == "/somewhere"
    (folder.path / "cache").mkdir()
    another = RunFolder(tmp_path)
    assert folder.path.is_dir()  # its run goes on
    folder.close()
    another.close()
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    run = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(run, cwd=Path(__file__).parents[2], capture_output=True, check=False)
    left = Path(done.stdout.decode().strip())
    assert (left / "cache").is_dir()
    RunFolder(tmp_path).close()
    assert not left.exists()


def test_what_another_run_removes_meanwhile_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "kernel-mcp-tests-0-gone"
    monkeypatch.setattr(Path, "glob", lambda _place, _pattern: iter([gone]))
    RunFolder(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_one_sentence() -> None:
    assert short_of(1) == ""
    said = short_of(shutil.disk_usage(PLACE).total + 1)
    assert said.startswith("the tests need ")
    assert said.endswith(f"make room in {PLACE}")
