"""The folder of kernels in reserve in a folder of the operator's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernel_mcp.errors import ConfigError
from kernel_mcp.sessions.pool import spare_folder

KILLED = """
import os, sys
from pathlib import Path
from kernel_mcp.sessions.pool import spare_folder
with spare_folder(Path(sys.argv[1])) as folder:
    (folder / ("0f" * 8) / "x").mkdir(parents=True)
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""


def killed(parent: Path) -> Path:
    """What a killed server leaves."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, parent], capture_output=True, text=True, check=False
    )
    return Path(done.stdout.strip())


def test_nothing_of_it_stays(tmp_path: Path) -> None:
    with spare_folder(tmp_path) as folder:
        (folder / ("0f" * 8)).mkdir()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    left = killed(tmp_path)
    assert list(left.iterdir())
    with spare_folder(tmp_path) as living:
        assert not left.exists()
        with spare_folder(tmp_path):
            assert living.exists()


def test_what_may_be_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    with_file = killed(tmp_path)
    (with_file / "thesis.txt").write_text("mine")
    unlocked = tmp_path / ".kernel-mcp-00000000"
    unlocked.mkdir()
    other = tmp_path / ".kernel-mcp-notes"
    other.mkdir()
    (other / "lock").touch()
    (tmp_path / ".kernel-mcp-11111111").symlink_to(with_file)
    with spare_folder(tmp_path):
        pass
    assert (with_file / "thesis.txt").read_text() == "mine"
    assert {unlocked, other, with_file, tmp_path / ".kernel-mcp-11111111"} == set(
        tmp_path.iterdir()
    )


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--workspace"), spare_folder(tmp_path / "missing"):
        pass
