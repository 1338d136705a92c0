"""Claude Code logs a person in: `claude mcp login` with a browser, then calls with its token."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx2
import pytest

from tests.clients.node import installed
from tests.clients.test_authorization_server import PACKAGE as ISSUER
from tests.clients.test_authorization_server import PROGRAM, authorization_server, consent
from tests.clients.test_claude_code import PACKAGE as CLAUDE
from tests.clients.test_claude_code import SERVER, Cli
from tests.clients.test_http_clients import CALLS, COUNT
from tests.integration.httpserver import HttpServer, http_server

pytestmark = [pytest.mark.full, pytest.mark.anyio]

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("login")
    installed(made, ISSUER, CLAUDE)
    shutil.copy(PROGRAM, made)
    return made


@pytest.fixture
def server(folder: Path) -> Iterator[HttpServer]:
    with authorization_server(folder) as issuer, http_server("--issuer", issuer) as running:
        yield running


@dataclass(frozen=True)
class LoggedIn(Cli):
    """Claude Code with what it has written down itself."""

    def configured(self) -> list[str]:
        """See `Cli`."""
        return []

    def said(self, *words: str) -> str:
        """Return the output of one of its commands."""
        done = subprocess.run(
            [self.programs / "claude", *words],
            cwd=self.folder,
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    async def log_in(self, account: str) -> None:
        """Give a person's consent in the browser that it opens."""
        asked = self.folder / "asked"
        os.mkfifo(asked)
        browser = self.folder / "browser"
        browser.write_text(f'#!/bin/sh\necho "$1" > {asked}\n')
        browser.chmod(0o755)
        ours, terminal = pty.openpty()
        process = await anyio.open_process(
            [str(self.programs / "claude"), "mcp", "login", SERVER],
            cwd=self.folder,
            env={**self.environ(), "BROWSER": str(browser)},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        try:
            with anyio.fail_after(PATIENCE_S):
                async with process:
                    url = (await anyio.Path(asked).read_text()).strip()
                    async with httpx2.AsyncClient() as http:
                        page = await http.get(await consent(url, account))
                    assert page.status_code == 200, page.text
            assert process.returncode == 0, os.read(ours, 65536).decode()
        finally:
            os.close(ours)


async def test_a_person_logs_in_and_keeps_its_variables(
    server: HttpServer, folder: Path, tmp_path: Path
) -> None:
    claude = LoggedIn(folder / "node_modules/.bin", tmp_path)
    (line,) = [each for each in server.said if "claude mcp add" in each]
    claude.said(*line.split()[1:])
    assert "Needs authentication" in claude.said("mcp", "list")
    await claude.log_in("alice")
    assert "Connected" in claude.said("mcp", "list")
    seen = await anyio.to_thread.run_sync(
        lambda: claude.run(*[("execute", {"code": COUNT})] * CALLS)
    )
    assert [each.text for each in seen] == [str(number) for number in range(1, CALLS + 1)]
