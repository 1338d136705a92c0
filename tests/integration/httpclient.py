"""Clients of a server on HTTP: the SDK's, and one that sees status, headers and bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

from tests.integration.agent import Agent
from tests.integration.httpserver import HttpServer

MODERN = "2026-07-28"
HANDSHAKE = "2025-11-25"
ABOUT = {"name": "test", "version": "1"}
META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": ABOUT,
}
ACCEPT = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
PATIENCE_S = 60.0
NAMED = {"tools/call": "name", "resources/read": "uri", "prompts/get": "name"}
"""The parameter of a method that its header repeats."""


def bearer(token: str) -> dict[str, str]:
    """The header of a token, if there is one."""
    return {"authorization": f"Bearer {token}"} if token else {}


@asynccontextmanager
async def http_agent(
    server: HttpServer, era: str = "auto", token: str | None = None
) -> AsyncIterator[Agent]:
    """The SDK's client of a server that runs."""
    headers = bearer(server.token if token is None else token)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=PATIENCE_S) as http,
        Client(streamable_http_client(server.mcp, http_client=http), mode=era) as client,
    ):
        yield Agent(client)


@dataclass(frozen=True)
class Said:
    """An answer as it came."""

    status: int
    headers: httpx2.Headers
    body: bytes

    @property
    def message(self) -> dict[str, Any]:
        """The JSON-RPC message that answers, the last one of a stream."""
        text = self.body.decode()
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            data = [line[5:] for line in text.splitlines() if line.startswith("data:")]
            text = [each for each in data if each.strip()][-1]
        found = json.loads(text)
        assert isinstance(found, dict)
        return found

    @property
    def result(self) -> dict[str, Any]:
        found = self.message["result"]
        assert isinstance(found, dict)
        return found

    @property
    def text(self) -> str:
        """The text of a tool's answer."""
        blocks = self.result["content"]
        return "\n".join(block["text"] for block in blocks if block["type"] == "text")

    @property
    def failed(self) -> bool:
        return bool(self.result.get("isError"))

    @property
    def data(self) -> dict[str, Any]:
        found = self.result["structuredContent"]
        assert isinstance(found, dict)
        return found


@dataclass
class Wire:
    """Posts messages of either era; `session` is that of the handshake era, when there is one."""

    http: httpx2.AsyncClient
    url: str
    session: str = ""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def greet(self) -> Said:
        """Shake hands: from here on it speaks the handshake era."""
        hello = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": ABOUT}
        body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello}
        said = await self.post(body, ACCEPT)
        self.session = said.headers.get("mcp-session-id", "")
        if self.session:
            await self.notify("notifications/initialized")
        return said

    async def notify(self, method: str, **params: Any) -> Said:
        """Send a notification of the handshake era."""
        body = {"jsonrpc": "2.0", "method": method, "params": params}
        return await self.post(body, self.headers(method, params))

    async def ask(self, method: str, /, **params: Any) -> Said:
        """Send a request and wait for its answer."""
        body, headers = self.request(method, **params)
        return await self.post(body, headers)

    async def call(self, tool: str, /, **arguments: Any) -> Said:
        """Call a tool."""
        return await self.ask("tools/call", name=tool, arguments=arguments)

    def request(self, method: str, /, **params: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """A request and its headers."""
        headers = self.headers(method, params)
        if not self.session:
            params = {**params, "_meta": META}
        number = next(self.numbers)
        body = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        return body, headers

    def headers(self, method: str = "", params: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Those of a message; of no method, those of the session."""
        if self.session:
            return {**ACCEPT, "mcp-session-id": self.session, "mcp-protocol-version": HANDSHAKE}
        headers = {**ACCEPT, "mcp-protocol-version": MODERN, "mcp-method": method}
        if method in NAMED:
            headers["mcp-name"] = str((params or {})[NAMED[method]])
        return headers

    async def post(self, body: object, headers: Mapping[str, str]) -> Said:
        """Send a body as it is."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        found = await self.http.post(self.url, content=content, headers=dict(headers))
        return Said(found.status_code, found.headers, found.content)

    async def leave(self) -> None:
        """End the session of the handshake era."""
        if self.session:
            await self.http.delete(self.url, headers=self.headers())
            self.session = ""


@asynccontextmanager
async def wire(
    server: HttpServer, token: str | None = None, *, handshake: bool = False
) -> AsyncIterator[Wire]:
    """A client of a server that runs, with connections of its own."""
    headers = bearer(server.token if token is None else token)
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(headers=headers, timeout=PATIENCE_S, limits=limits) as http:
        made = Wire(http, server.mcp)
        if handshake:
            await made.greet()
        yield made
        await made.leave()


HELD = """
import pathlib, time
pathlib.Path('begun').touch()
print('begun', flush=True)
while not pathlib.Path('go').exists():
    time.sleep(0.01)
'the last word'
"""
"""A cell that says in its workspace that it runs, and ends when it is told to there."""


async def until(true: Callable[[], bool]) -> None:
    """Wait for what nobody announces."""
    with anyio.fail_after(PATIENCE_S):
        while not true():
            await anyio.sleep(0.01)


def begun(folder: Path) -> list[Path]:
    """The workspaces below a folder in which a cell is held."""
    return [mark.parent for mark in folder.rglob("begun")]


def let_go(folder: Path) -> None:
    """Let the cells end that are held there."""
    for workspace in begun(folder):
        (workspace / "go").touch()
