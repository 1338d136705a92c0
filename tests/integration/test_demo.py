"""`kernel-mcp demo` as a person runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernel_mcp.demo import main
from kernel_mcp.demo.generate import FILE, generate


def test_the_csv_is_the_one_its_generator_writes() -> None:
    assert FILE.read_text(encoding="utf-8") == generate()


def test_the_demo_ends_well_and_leaves_a_picture(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernel_mcp", "demo"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    picture = tmp_path / "demo-output" / "plot.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "demo-output/plot.png" in done.stdout
    assert "stations: Harbour, Museum, North Gate, University" in done.stdout
    assert "--allow os" in done.stdout
    assert "all still here" in done.stdout


def test_a_server_that_does_not_start_fails_the_demo_in_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path), "--sandbox", "nope"]) == 1
    error = capfd.readouterr().err
    assert "--sandbox nope: expected auto, bwrap" in error
    assert "kernel-mcp demo failed:" in error
    assert "Traceback" not in error
