"""The view of a cell in a real browser, in the frame that the bridge of MCP Apps gives it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.node import installed
from tests.conftest import lacking
from tests.integration.agent import ANALYSIS

pytestmark = pytest.mark.full

PACKAGES = (
    "@modelcontextprotocol/ext-apps@2.0.4",
    "@modelcontextprotocol/client@2",
    "esbuild@0.28",
    "playwright-core@1",
)
HOST = Path(__file__).with_name("view.mjs")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of a person's use of the view."""
    browser = shutil.which("chromium")
    if browser is None:
        lacking("node", "needs chromium")
    folder = tmp_path_factory.mktemp("view")
    programs = installed(folder, *PACKAGES)
    host = folder / HOST.name
    host.write_text(HOST.read_text())
    server = [sys.executable, "-m", "kernel_mcp", "--allow", ANALYSIS, "--persist", "off"]
    done = subprocess.run(
        [str(programs / "node"), str(host), browser, str(folder), *server],
        cwd=folder,
        env=None,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_tables_are_sorted_and_filtered_by_mouse_and_keyboard(seen: dict[str, Any]) -> None:
    assert seen["table"] == ["10", "9", "2"]
    assert seen["sorted"] == ["2", "9", "10"]
    assert seen["reversed"] == ["10", "9", "2"]
    assert seen["aria"] == "descending"
    assert seen["filtered"] == ["zeta"]


def test_charts_are_drawn_from_their_numbers_and_others_are_pictures(seen: dict[str, Any]) -> None:
    assert seen["charts"] == ["line chart Lines, 2 elements", "bar chart , 2 elements"]
    assert (seen["lines"], seen["bars"]) == (2, 2)
    assert seen["pictures"] == [True]
    assert seen["background"] == "rgb(27, 27, 29)"  # as the host is dark


def test_what_would_be_drawn_otherwise_than_in_its_figure_is_a_picture(
    seen: dict[str, Any],
) -> None:
    assert seen["undrawn"] == 3
    assert seen["days"] == [f"2024-01-0{day}" for day in range(1, 6)]


def test_json_and_errors_are_readable(seen: dict[str, Any]) -> None:
    assert seen["json"] == 3
    assert seen["texts"][0] == ["text", "text\n"]
    assert seen["texts"][-1][0] == "error"
    assert seen["folded"] == [[False, "ZeroDivisionError: division by zero"]]


def test_a_running_cell_is_followed_and_stopped(seen: dict[str, Any]) -> None:
    assert seen["running"].startswith("Cell 5: running")
    assert seen["kept"] == ["2", "INPUT"]
    assert seen["stopped"].startswith("Cell 5: interrupted")
    assert (seen["hidden"], seen["focused"]) == (True, "main")
    assert "cell 5" in "".join(seen["told"])
    assert seen["gone"] == "Cell 7 is not followed any more."


def test_hostile_outputs_neither_run_nor_load_anything(seen: dict[str, Any]) -> None:
    assert (seen["dialogs"], seen["requests"], seen["errors"]) == (0, [], [])
    assert seen["frames"] == 2  # the host and its view


def test_the_host_is_told_how_large_the_view_is(seen: dict[str, Any]) -> None:
    assert seen["sizes"] > 0
