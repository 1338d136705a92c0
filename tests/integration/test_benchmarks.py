"""`make bench` runs; how fast anything is, no test says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_benchmarks_print_a_table_and_write_all_values(tmp_path: Path) -> None:
    values = tmp_path / "values.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--only", "start", "--json", str(values)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Server start" in done.stdout
    figures = json.loads(values.read_text(encoding="utf-8"))["figures"]
    assert {figure["subject"] for figure in figures} > {"kernel-mcp, discover"}
    assert all(figure["median"] > 0 for figure in figures)
