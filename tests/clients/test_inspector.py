"""The protocol's own inspector, a client in another language, drives the server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.node import installed

pytestmark = pytest.mark.full

PACKAGE = "@modelcontextprotocol/inspector@2.12.0"
ERAS = ((), ("--protocol-era", "modern"))


@pytest.fixture(scope="module")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of the inspector, installed for this run."""
    programs = installed(tmp_path_factory.mktemp("inspector"), PACKAGE)
    return [str(programs / "node"), str(programs / "mcp-inspector"), "--cli"]


def ask(inspector: list[str], *words: str) -> dict[str, Any]:
    """One request to a server of its own."""
    server = [sys.executable, "-m", "kernel_mcp", "--warm", "0", "--no-template"]
    done = subprocess.run(
        [*inspector, *server, *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("era", ERAS, ids=["handshake", "modern"])
def test_it_lists_the_tools_and_runs_a_cell(inspector: list[str], era: tuple[str, ...]) -> None:
    tools = {tool["name"] for tool in ask(inspector, *era, "--method", "tools/list")["tools"]}
    assert {"execute", "wait", "install", "run_script", "read_file", "export_notebook"} <= tools
    call = ("--method", "tools/call", "--tool-name", "execute")
    answer = ask(inspector, *era, *call, "--tool-arg", "code=6 * 7")
    assert answer["content"][0] == {"type": "text", "text": "42"}
    assert answer["_meta"]["kernel-mcp/cell"]["status"] == "ok"


def test_a_wrong_argument_is_an_error_that_it_shows(inspector: list[str]) -> None:
    call = ("--method", "tools/call", "--tool-name", "execute", "--tool-arg", "cells=1")
    answer = ask(inspector, *call)
    assert answer["isError"] is True
    assert "code" in answer["content"][0]["text"]
