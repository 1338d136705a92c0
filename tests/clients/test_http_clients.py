"""MCP clients of others over HTTP: each keeps its state over fifty calls."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import uv

from tests.clients.node import installed
from tests.clients.test_claude_code import PACKAGE as CLAUDE
from tests.clients.test_claude_code import Cli
from tests.clients.test_inspector import ERAS as INSPECTOR_ERAS
from tests.clients.test_inspector import PACKAGE as INSPECTOR
from tests.conftest import lacking
from tests.integration.agent import ERAS
from tests.integration.httpclient import bearer, http_agent
from tests.integration.httpserver import HttpServer, http_server

pytestmark = pytest.mark.full

MCPORTER = "mcporter@0.9"
FASTMCP = "fastmcp>=4,<5"
CALLS = 50
COUNT = "n = globals().get('n', 0) + 1\nn"
"""A cell whose answer is how often it has run in its session."""
BY_FASTMCP = """
import asyncio, sys
from fastmcp import Client
from fastmcp.client.transports import StreamableHttpTransport

async def main(url, token, code, calls):
    headers = {"Authorization": f"Bearer {token}"}
    async with Client(StreamableHttpTransport(url, headers=headers)) as client:
        for _ in range(int(calls)):
            print((await client.call_tool("execute", {"code": code})).content[0].text)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("clients"), CLAUDE, INSPECTOR, MCPORTER)


def said(argv: list[str], folder: Path) -> str:
    """Return the output of a program."""
    done = subprocess.run(
        argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return done.stdout


def counts(call: Callable[[], str]) -> None:
    """Each of the calls finds what those before it left."""
    for number in range(1, CALLS + 1):
        assert call() == str(number)


@dataclass(frozen=True)
class HttpCli(Cli):
    """Claude Code with the line that the server has printed."""

    url: str = ""
    token: str = ""

    def server(self) -> dict[str, Any]:
        """See `Cli`."""
        return {"type": "http", "url": self.url, "headers": bearer(self.token)}


def test_claude_code(server: HttpServer, programs: Path, tmp_path: Path) -> None:
    cli = HttpCli(programs, tmp_path, url=server.mcp, token=server.token)
    seen = cli.run(*[("execute", {"code": COUNT})] * CALLS)
    assert [each.text for each in seen] == [str(number) for number in range(1, CALLS + 1)]
    (later,) = cli.run(("execute", {"code": COUNT}))
    assert str(CALLS + 1) in later.text, "it comes back to its variables"


def test_claude_code_takes_the_printed_line(
    server: HttpServer, programs: Path, tmp_path: Path
) -> None:
    (line,) = [each for each in server.said if "claude mcp add" in each]
    script = f"export HOME={tmp_path} PATH={programs}:$PATH\n{line}\nclaude mcp list"
    assert "Connected" in said(["sh", "-ec", script], tmp_path)


@pytest.mark.parametrize("era", INSPECTOR_ERAS, ids=["handshake", "modern"])
def test_inspector(
    server: HttpServer, programs: Path, tmp_path: Path, era: tuple[str, ...]
) -> None:
    inspector = [str(programs / "node"), str(programs / "mcp-inspector"), "--cli", server.mcp]
    header = ("--transport", "http", "--header", f"Authorization: Bearer {server.token}")
    call = ("--method", "tools/call", "--tool-name", "execute", "--tool-arg", f"code={COUNT}")

    def execute() -> str:
        answer = json.loads(said([*inspector, *header, *era, *call], tmp_path))
        return str(answer["content"][0]["text"])

    counts(execute)


def test_mcporter(server: HttpServer, programs: Path, tmp_path: Path) -> None:
    config = tmp_path / "mcporter.json"
    entry = {"url": server.mcp, "headers": bearer(server.token)}
    config.write_text(json.dumps({"mcpServers": {"notebook": entry}}))
    mcporter = [str(programs / "node"), str(programs / "mcporter"), "--config", str(config)]
    call = ["call", "notebook.execute", "--args", json.dumps({"code": COUNT}), "--output", "raw"]

    def execute() -> str:
        found = said([*mcporter, *call], tmp_path)
        return found.partition("text: '")[2].partition("'")[0]

    counts(execute)


def test_fastmcp(server: HttpServer, tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    tool = [uv.find_uv_bin()]
    environment = [
        [
            *tool,
            "venv",
            "--quiet",
            "--no-config",
            "--python",
            sys.executable,
            str(tmp_path / "venv"),
        ],
        [*tool, "pip", "install", "--quiet", "--no-config", "--python", str(python), FASTMCP],
    ]
    for argv in environment:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            lacking("node", f"uv cannot install {FASTMCP}: {done.stderr[-300:]}")
    argv = [str(python), "-c", BY_FASTMCP, server.mcp, server.token, COUNT, str(CALLS)]
    assert said(argv, tmp_path).split() == [str(number) for number in range(1, CALLS + 1)]


@pytest.mark.parametrize("era", ERAS)
def test_the_sdk(server: HttpServer, era: str) -> None:
    async def run() -> None:
        async with http_agent(server, era) as notebook:
            for number in range(1, CALLS + 1):
                assert (await notebook.run(COUNT)).text == str(number)

    anyio.run(run)
