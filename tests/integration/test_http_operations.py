"""An operator's view of a real server over HTTP: health, metrics, log, audit trail, sessions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from kernel_mcp.cli import main
from tests.integration.httpclient import HELD, Said, bearer, begun, http_agent, let_go, until, wire
from tests.integration.httpserver import HttpServer, http_server

pytestmark = [pytest.mark.anyio]

STRANGER = "kmcp_" + "x" * 43


@dataclass(frozen=True)
class Operated:
    """A server with all that it tells operators."""

    server: HttpServer
    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "s"

    @property
    def log(self) -> list[dict[str, Any]]:
        lines = self.server.log.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    @property
    def trail(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "audit").read_text().splitlines()]

    def get(self, path: str, token: str = "") -> httpx2.Response:
        return httpx2.get(f"{self.server.url}{path}", headers=bearer(token), timeout=30)

    async def ready(self) -> None:
        await until(lambda: self.get("/readyz").status_code == 200)

    def end(self) -> None:
        known = self.server.processes
        self.server.signal()
        self.server.stopped(known=known)


@contextmanager
def operating(*more: str, token: str = "") -> Iterator[Operated]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        folder = Path(place)
        flags = ["--profile", "guarded", "--allow", "os,pathlib,time", "--log-format", "json"]
        flags += ["--log-level", "info", "--state-dir", str(folder / "s")]
        flags += ["--audit-log", str(folder / "audit"), *more]
        with http_server(*flags, token=token) as server:
            yield Operated(server, folder)


@pytest.fixture
def operated() -> Iterator[Operated]:
    with operating() as found:
        yield found


def value(text: str, series: str) -> float:
    """The value of a series in what `/metrics` says."""
    (found,) = [line for line in text.splitlines() if line.startswith(f"{series} ")]
    return float(found.rpartition(" ")[2])


async def test_operators_see_health_and_metrics(operated: Operated) -> None:
    token = operated.server.token
    assert operated.get("/healthz").text == "ok\n"
    await operated.ready()
    assert operated.get("/metrics").status_code == 401
    assert operated.get("/metrics", STRANGER).status_code == 401
    async with http_agent(operated.server) as notebook:
        assert (await notebook.run("40 + 2")).text == "42"
        await notebook.run("1 / 0")
        await notebook.run("import subprocess")
        text = operated.get("/metrics", token).text
        assert value(text, 'kernel_mcp_cells_total{outcome="ok"}') == 1
        assert value(text, 'kernel_mcp_cells_total{outcome="error"}') == 2
        assert value(text, 'kernel_mcp_kernel_start_seconds_count{kind="cold"}') == 1
        assert value(text, 'kernel_mcp_tool_call_seconds_count{tool="execute"}') == 3
        assert value(text, 'kernel_mcp_refusals_total{reason="policy"}') == 1
        assert value(text, 'kernel_mcp_refusals_total{reason="unauthenticated"}') == 2
        assert value(text, 'kernel_mcp_sessions{state="idle"}') == 1
        assert value(text, "kernel_mcp_server_memory_bytes") > 1 << 20
        assert value(text, "kernel_mcp_kernels_memory_bytes") > 1 << 20
        assert value(text, "kernel_mcp_received_bytes_total") > 0
        assert "local" not in text
        await notebook.run("import os; os._exit(3)")
        text = operated.get("/metrics", token).text
        assert value(text, 'kernel_mcp_kills_total{cause="lost"}') == 1


async def test_the_trail_and_the_log_know_whose_work_it_was(operated: Operated) -> None:
    await operated.ready()
    for _ in range(3):
        assert operated.get("/mcp", STRANGER).status_code == 401
    async with http_agent(operated.server) as notebook:
        await notebook.run("1")
    operated.end()
    trail = operated.trail
    start = trail[0]
    assert (start["event"], start["callers"]) == ("server_start", "one token, made at the start")
    assert f"http://{start['http']}" == operated.server.url
    refused = [line for line in trail if line["event"] == "refused"]
    assert [line["reason"] for line in refused] == ["unauthenticated"] * 3
    assert {line["peer"] for line in refused} == {"127.0.0.1"}
    assert {line["who"] for line in trail if line["event"] == "cell"} == {"local"}
    assert {"time", "level", "logger", "message"} <= set(operated.log[0])
    assert any("stopping on SIGTERM" in line["message"] for line in operated.log)
    assert "kmcp_" not in json.dumps([operated.log, trail])


@pytest.mark.ways
async def test_the_operator_sees_the_sessions_of_a_running_server(operated: Operated) -> None:
    await operated.ready()
    (folder,) = operated.state.glob("s-*")
    async with http_agent(operated.server) as notebook:
        await notebook.run("x = 1")
        tried = await notebook.run(f"open({str(folder / 'operator.key')!r}).read()")
        assert "FileNotFoundError" in tried.text
        shown = subprocess.run(
            [sys.executable, "-m", "kernel_mcp", "sessions", "list", "--state-dir", operated.state],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    assert re.search(r"^s-[\w-]{12}  -  local  idle, \d+ MiB, 2 cells, \d+ s old$", shown, re.M)
    pid, address = operated.server.process.pid, operated.server.url.removeprefix("http://")
    assert re.search(rf"^server {pid} on {address} in .*: 1 session now, ", shown, re.M)


@pytest.mark.ways
async def test_a_server_that_drains_lives_and_is_not_ready(operated: Operated) -> None:
    await operated.ready()
    answers: list[Said] = []
    async with wire(operated.server) as client, anyio.create_task_group() as tasks:

        async def hold() -> None:
            answers.append(await client.call("execute", code=HELD, wait=100))

        tasks.start_soon(hold)
        await until(lambda: bool(begun(operated.state)))
        known = operated.server.processes
        operated.server.signal()
        await until(lambda: operated.get("/readyz").text == "draining\n")
        assert operated.get("/readyz").status_code == 503
        assert operated.get("/healthz").status_code == 200
        let_go(operated.state)
    assert "the last word" in answers[0].text
    await anyio.to_thread.run_sync(lambda: operated.server.stopped(known=known))


async def test_a_token_for_metrics_runs_nothing_and_others_read_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = tmp_path / "tokens"

    def add(*words: str) -> str:
        assert main(["token", "add", *words, "--tokens", str(tokens)]) == 0
        return capsys.readouterr().out.strip()

    ada = add("ada")
    with operating("--tokens", str(tokens), token=ada) as operated:
        await operated.ready()
        place = ("--state-dir", str(operated.state))
        assert main(["token", "add", "ada", "--tokens", str(tokens), *place]) == 0
        said = capsys.readouterr().err
        assert (
            f"For a client:\n  claude mcp add --transport http notebook {operated.server.mcp}"
            in said
        )
        prometheus = add("prometheus", "--scope", "kernel:metrics")
        assert operated.get("/metrics", prometheus).status_code == 200
        assert operated.get("/mcp", prometheus).status_code == 403
        assert operated.get("/metrics", ada).status_code == 403
        operated.end()
        told = [line for line in operated.trail if line["event"] in ("refused", "tokens")]
    assert operated.server.log.count(ada) == 0
    seen = [line["who"] for line in told if line["event"] == "refused"]
    assert seen == ["prometheus", "ada"]
    assert "3 rows" in str(told)
