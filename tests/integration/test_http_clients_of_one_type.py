"""Clients of HTTP that accept one media type or name none, or write a slash behind the address."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2
import pytest

from tests.integration.httpclient import Said, Wire, bearer, http_agent
from tests.integration.httpserver import HttpServer, http_server

pytestmark = pytest.mark.anyio

JSON, EVENTS = "application/json", "text/event-stream"
CODE = "for n in range(3): print(n)\nn * 14"


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@dataclass
class Choosy(Wire):
    """Sends this `Accept`, or none."""

    accept: str | None = None

    async def post(self, body: object, headers: object) -> Said:
        assert isinstance(headers, dict)
        given = {name: value for name, value in headers.items() if name != "accept"}
        if self.accept is not None:
            given["accept"] = self.accept
        request = self.http.build_request("POST", self.url, json=body, headers=given)
        if self.accept is None:
            del request.headers["accept"]
        found = await self.http.send(request)
        return Said(found.status_code, found.headers, found.content)


@asynccontextmanager
async def choosy(server: HttpServer, era: str, accept: str | None) -> AsyncIterator[Choosy]:
    async with httpx2.AsyncClient(headers=bearer(server.token), timeout=60) as http:
        made = Choosy(http, server.mcp, accept=accept)
        if era == "handshake":
            assert (await made.greet()).status == 200
            assert made.session
        yield made
        await made.leave()


async def new_session(client: Wire) -> str:
    return str((await client.call("create_session")).data["session"])


@pytest.mark.parametrize("era", ["handshake", "modern"])
@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (JSON, JSON),
        ("application/*;q=0.5", JSON),
        (EVENTS, EVENTS),
        (None, JSON),
        ("text/html", JSON),
    ],
)
async def test_a_call_is_answered_in_the_type_that_its_client_accepts(
    server: HttpServer, era: str, accept: str | None, kind: str
) -> None:
    async with choosy(server, era, accept) as client:
        arguments = {"code": CODE, "session": await new_session(client)}
        body, headers = client.request("tools/call", name="execute", arguments=arguments)
        body["params"]["_meta"] = {**body["params"].get("_meta", {}), "progressToken": 1}
        answer = await client.post(body, headers)
        assert answer.status == 200
        assert answer.headers["content-type"].startswith(kind)
        assert answer.text.splitlines() == ["0", "1", "2", "28"]
        if kind == JSON:
            assert json.loads(answer.body)["result"]


@pytest.mark.parametrize("era", ["handshake", "modern"])
async def test_an_error_is_an_answer_too(server: HttpServer, era: str) -> None:
    async with choosy(server, era, JSON) as client:
        answer = await client.ask("no/method")
        assert answer.headers["content-type"].startswith(JSON)
        assert "error" in answer.message


async def test_a_stream_is_no_json(server: HttpServer) -> None:
    async with choosy(server, "modern", JSON) as client:
        assert (await client.ask("subscriptions/listen")).status == 406


@pytest.mark.parametrize("era", ["auto", "legacy"])
async def test_a_client_may_write_a_slash_behind_the_address(server: HttpServer, era: str) -> None:
    class WithSlash:
        mcp = f"{server.mcp}/"
        token = server.token

    async with http_agent(WithSlash, era) as client:  # type: ignore[arg-type]
        assert (await client.run("6 * 7")).text.startswith("42")


async def test_no_address_is_a_redirect(server: HttpServer) -> None:
    async with httpx2.AsyncClient(headers=bearer(server.token)) as http:
        for path in ("/sessions/none/notebook/", "/nothing/", "/messages"):
            assert (await http.get(server.url + path)).status_code == 404
