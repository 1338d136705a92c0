"""Questions of code over HTTP: of each principal, in both eras."""

from __future__ import annotations

from pathlib import Path

import httpx2
import mcp_types as types
import pytest
from mcp.client import Client
from mcp.client.session import ClientRequestContext
from mcp.client.streamable_http import streamable_http_client

from tests.integration.agent import ERAS, Agent
from tests.integration.httpclient import ABOUT, ACCEPT, HANDSHAKE, PATIENCE_S, Wire, bearer
from tests.integration.httpserver import LEAN, http_server
from tests.integration.principals import add

pytestmark = [pytest.mark.anyio]


@pytest.mark.parametrize("era", ERAS)
async def test_only_principals_with_the_door_are_asked(tmp_path: Path, era: str) -> None:
    async def elicit(
        context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={"answer": params.message[-2:]})

    file = tmp_path / "tokens"
    one, other = add(file, "one", "--door", "ask"), add(file, "other")
    with http_server("--tokens", str(file), *LEAN, token=one) as server:
        for token, expected in ((one, "['1?', '2?']"), (other, "nobody to ask")):
            async with (
                httpx2.AsyncClient(headers=bearer(token), timeout=PATIENCE_S) as http,
                Client(
                    streamable_http_client(server.mcp, http_client=http),
                    mode=era,
                    elicitation_callback=elicit,
                ) as client,
            ):
                answer = await Agent(client).run("[input('1?'), input('2?')]")
                assert expected in answer.text, answer.text


async def test_a_client_that_takes_no_stream_is_not_asked_within_its_call(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    token = add(file, "one", "--door", "ask")
    asking = {
        "protocolVersion": HANDSHAKE,
        "capabilities": {"elicitation": {}},
        "clientInfo": ABOUT,
    }
    hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": asking}
    with http_server("--tokens", str(file), *LEAN, token=token) as server:
        async with httpx2.AsyncClient(headers=bearer(token), timeout=PATIENCE_S) as http:
            wire = Wire(http, server.mcp)
            wire.session = (await wire.post(hello, ACCEPT)).headers["mcp-session-id"]
            body, headers = wire.request(
                "tools/call", name="execute", arguments={"code": "input('?')"}
            )
            said = await wire.post(body, {**headers, "accept": "application/json"})
            assert "nobody to ask" in said.text
