"""The old HTTP+SSE transport passes the same gate, and its clients are the same callers."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx2
import pytest
from mcp.client import Client
from mcp.client.sse import sse_client

from tests.integration.agent import Agent
from tests.integration.httpclient import HELD, PATIENCE_S, bearer, begun, http_agent, until
from tests.integration.httpserver import HttpServer, http_server
from tests.integration.principals import two_principals

pytestmark = pytest.mark.anyio

ENDPOINT = re.compile(r"data: (/messages/\?session_id=\w+)")


@asynccontextmanager
async def sse_agent(server: HttpServer, token: str) -> AsyncIterator[Agent]:
    async with Client(
        sse_client(f"{server.url}/sse", headers=bearer(token), sse_read_timeout=PATIENCE_S),
        mode="legacy",
    ) as client:
        yield Agent(client)


@pytest.mark.ways
async def test_a_principal_has_the_same_session_over_both_transports(tmp_path: Path) -> None:
    with two_principals(tmp_path, "--sse") as (server, one, other):
        async with sse_agent(server, one) as agent:
            await agent.run("x = 41")
            assert (await agent.run("x + 1")).text == "42"
            assert "NameError" not in (await agent.run("print(x)")).text
            async with sse_agent(server, other) as stranger:
                assert "NameError" in (await stranger.run("x")).text
        async with http_agent(server, token=one) as agent:
            assert (await agent.run("x")).text.startswith("41")


@pytest.mark.ways
async def test_an_answer_over_sse_is_told_once(tmp_path: Path) -> None:
    with http_server("--sse") as server:
        async with sse_agent(server, server.token) as agent:
            await agent.run("import os; x = 1")
            gone = await agent.run("os.kill(os.getpid(), 9)")
            assert "killed" in gone.text
            assert "x" in gone.text
            assert "lost" not in (await agent.run("1")).text


async def test_a_call_whose_client_disconnects_is_stopped(tmp_path: Path) -> None:
    with http_server("--sse", "--workspace", str(tmp_path)) as server:

        async def hold() -> None:
            async with sse_agent(server, server.token) as agent:
                await agent.run(HELD)

        async with anyio.create_task_group() as leaving:
            leaving.start_soon(hold)
            await until(lambda: bool(begun(tmp_path)))
            leaving.cancel_scope.cancel()
        async with http_agent(server) as agent:
            told = await agent.run("1")
        assert "cell 1, whose call was cancelled, has ended: interrupted" in told.text


async def test_without_a_token_nothing_is_connected_and_nothing_posted(tmp_path: Path) -> None:
    with two_principals(tmp_path, "--sse") as (server, one, other):
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as http:
            assert (await http.get(f"{server.url}/sse")).status_code == 401
            async with http.stream("GET", f"{server.url}/sse", headers=bearer(one)) as stream:
                text = ""
                async for part in stream.aiter_text():
                    text += part
                    if found := ENDPOINT.search(text):
                        break
                assert found is not None
                place, body = f"{server.url}{found[1]}", {"jsonrpc": "2.0", "id": 1}
                assert (await http.post(place, json=body)).status_code == 401
                foreign = await http.post(place, json=body, headers=bearer(other))
                unknown = await http.post(
                    f"{server.url}/messages/?session_id={'0' * 32}",
                    json=body,
                    headers=bearer(other),
                )
                assert foreign.status_code == unknown.status_code == 404
                assert foreign.text == unknown.text


@pytest.mark.ways
async def test_a_client_that_is_connected_holds_no_end_of_the_server() -> None:
    with http_server("--sse") as server:
        async with sse_agent(server, server.token) as agent:
            await agent.run("1")
            known = server.processes
            server.signal(signal.SIGTERM)
            await anyio.to_thread.run_sync(lambda: server.stopped(known=known))
