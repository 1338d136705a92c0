"""JupyterLab on running sessions, in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import lacking

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
VISITOR = Path(__file__).with_name("lab_visitor.py")


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, Any]]:
    """The record of a person's visit to JupyterLab."""
    browser = shutil.which("chromium")
    if browser is None:
        lacking("node", "needs chromium")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # sockets have short paths
        folder = Path(place)
        python = folder / "lab" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "lab")], check=True)
        packages = [f"{ROOT}[lab]", "playwright>=1.50"]
        made = subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", *packages],
            check=False,
            capture_output=True,
            text=True,
        )
        if made.returncode:
            lacking("node", f"JupyterLab cannot be installed: {made.stderr[-500:]}")
        done = subprocess.run(
            [str(python), str(VISITOR), str(browser), str(folder)],
            env={**os.environ, "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert isinstance(found, dict)
        yield found


def test_cells_of_the_agent_appear_as_they_run(seen: dict[str, Any]) -> None:
    assert seen["listed"].endswith(".ipynb")
    assert seen["while it runs"]


def test_a_person_runs_edits_and_stops_cells_and_the_agent_hears_of_it(
    seen: dict[str, Any],
) -> None:
    assert "a person ran cell 3 (ok): x += 1" in seen["answer"]
    assert seen["answer"].startswith("42")
    assert seen["queued"].startswith("'after the person'")
    assert "(interrupted): import time" in seen["queued"]


def test_restarts_are_refused_in_words_and_nothing_follows_them(seen: dict[str, Any]) -> None:
    assert len(seen["refusals"]) == 3
    for words in seen["refusals"]:
        assert "The kernel was not restarted" in words
        assert "ask the agent for reset" in words
    assert "before 41" in seen["after refusals"]
    assert "a person ran" not in seen["next"]


def test_hostile_outputs_of_either_are_shown_and_do_nothing(seen: dict[str, Any]) -> None:
    assert all(seen["words"])
    assert seen["tables"] == 2
    assert (seen["pwned"], seen["elements"], seen["dialogs"]) == (None, 0, 0)
    assert (seen["requests"], seen["frames"]) == ([], 1)


def test_there_are_no_terminals_files_or_kernels_but_sessions(seen: dict[str, Any]) -> None:
    statuses = seen["statuses"]
    refused = {"terminal": 404, "kernel": 404, "upload": 403, "new": 403, "file": 404}
    refused |= {"beside": 404, "export": 404, "build": 404, "plugins": 404, "restart": 404}
    assert {name: statuses[name] for name in refused} == refused
    assert seen["foreign"] == 403
    assert seen["alive"].startswith("42")


def test_a_notebook_follows_its_session_to_the_next_server(seen: dict[str, Any]) -> None:
    assert seen["back"].startswith("6")
    assert "a person ran cell 3 (ok): y += 1" in seen["back"]


def test_outputs_that_are_cleared_or_many_are_told_as_they_are(seen: dict[str, Any]) -> None:
    assert seen["kept line"]


def test_it_ends_when_it_is_told_to(seen: dict[str, Any]) -> None:
    assert seen["end"] == 0
