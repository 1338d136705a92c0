"""Questions of code over HTTP: of each principal, in both eras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


SECRET = "from getpass import getpass\nx = getpass('Token: ')\nprint(len(x))"


async def page(
    url: str, password: str, answer: str | None = None, **headers: str
) -> tuple[int, str]:
    """The status and the text of a page as a browser asks for it, or sends its form."""
    async with httpx2.AsyncClient(timeout=PATIENCE_S, headers=headers) as browser:
        login = ("anybody", password) if password else None
        if answer is None:
            found = await browser.get(url, auth=login)
        else:
            found = await browser.post(url, data={"answer": answer}, auth=login)
        challenge = found.headers.get("www-authenticate", "")
        assert challenge.startswith("Basic ") == (found.status_code == 401), challenge
        return found.status_code, found.text


@pytest.mark.parametrize("tool", ["execute", "run_script"])
@pytest.mark.parametrize("era", ERAS)
async def test_a_secret_is_typed_behind_the_login(tmp_path: Path, era: str, tool: str) -> None:
    file = tmp_path / "tokens"
    one, other = add(file, "one", "--door", "ask"), add(file, "other", "--door", "ask")
    seen: list[str] = []

    async def elicit(
        context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        assert isinstance(params, types.ElicitRequestURLParams)
        url = params.url
        seen.append(url)
        for wrong, status in (("", 401), ("kmcp_wrong", 401), (other, 404)):
            assert (await page(url, wrong, "stolen"))[0] == status
        assert (await page(url, one, "x", origin="https://evil.example"))[0] == 403
        assert (await page(url + "x", one))[0] == 404
        status, text = await page(url, one)
        assert status == 200
        assert "asks: Token:" in text
        assert "Sent" in (await page(url, one, "hunter2"))[1]
        assert (await page(url, one, "again"))[0] == 404
        return types.ElicitResult(action="accept")

    with http_server("--tokens", str(file), *LEAN, token=one) as server:
        async with (
            httpx2.AsyncClient(headers=bearer(one), timeout=PATIENCE_S) as http,
            Client(
                streamable_http_client(server.mcp, http_client=http),
                mode=era,
                elicitation_callback=elicit,
            ) as client,
        ):
            argument: dict[str, Any] = {"code" if tool == "execute" else "script": SECRET}
            answer = await Agent(client).call(tool, **argument)
            assert answer.text.startswith("7\n"), answer.text
        assert seen[0].startswith(f"{server.url}/answers/")
        async with httpx2.AsyncClient(auth=("anybody", one)) as browser:
            refused = await browser.get(server.mcp)  # no other path takes a browser's login
            assert refused.headers["www-authenticate"].startswith("Bearer ")
