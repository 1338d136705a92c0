"""Clients of HTTP+SSE are bounded for each principal."""

from __future__ import annotations

import anyio
import pytest
from mcp.server.lowlevel.server import Server

from kernel_mcp.http import sessions as module
from kernel_mcp.http.sessions import SseTransport
from kernel_mcp.identity import Principal
from tests.unit.http.asgi import Answer, ask

pytestmark = pytest.mark.anyio


async def test_clients_of_one_principal_take_no_place_of_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_OF_ONE", 1)
    transport = SseTransport(Server("x"), ended=lambda *_: None)

    transport._owners.append("ada")

    async def connect(name: str) -> Answer:
        state = {"principal": Principal(name)}
        return await ask(transport.connect, "GET", "/sse", state=state, stays=False)

    with anyio.fail_after(30):
        assert (await connect("ada")).status == 503
        assert (await connect("ben")).status == 200
    assert transport._owners == ["ada"]
