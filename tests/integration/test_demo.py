"""The client of `make demo` as a person runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "analyse_csv.py"


def demo(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DEMO, *flags],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_the_demo_ends_well_and_leaves_a_picture(tmp_path: Path) -> None:
    done = demo(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    picture = tmp_path / "demo-output" / "plot.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "demo-output/plot.png" in done.stdout
    assert "stations: Harbour, Museum, North Gate, University" in done.stdout
    assert "Start the server with --allow seaborn to have it." in done.stdout
    assert "KeyboardInterrupt" in done.stdout
    assert "all still here" in done.stdout


@pytest.mark.ways
def test_a_server_that_does_not_start_fails_the_demo_in_words(tmp_path: Path) -> None:
    done = demo(tmp_path, "--sandbox", "nope")
    assert done.returncode == 1
    assert "--sandbox nope: expected auto, bwrap" in done.stderr
    assert "The demo failed:" in done.stderr
    assert "Traceback" not in done.stderr
