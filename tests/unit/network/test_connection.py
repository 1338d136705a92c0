"""When a connection of a session ends by itself."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kernel_mcp.network.connection import ENDED_IDLE_S, Listener, ProxiedConnection, SessionTraffic
from kernel_mcp.network.rules import Rules
from tests.unit.network.near import Near, Told

pytestmark = pytest.mark.anyio


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for each in (one, other):
        each.setblocking(False)
    return one, other


@pytest.mark.parametrize("by", ["close", "half"])
async def test_an_answer_is_not_waited_for_long_by_who_has_closed(by: str) -> None:
    loop, told = asyncio.get_running_loop(), Told()
    client, inside = connected()
    host, outside = connected()
    listener = Listener(1, inside, Rules.parse(["a.test"]), None, SessionTraffic("", loop))
    connection = ProxiedConnection(listener, inside, Near(lambda: outside), told)
    with client, host:
        await loop.sock_sendall(client, b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n")
        assert (await loop.sock_recv(host, 1000)).startswith(b"GET / ")
        connection.check_timeout(loop.time() + ENDED_IDLE_S + 1)  # it still listens
        if by == "close":
            client.close()
        else:
            client.shutdown(socket.SHUT_WR)
        while not connection._client.ended:
            await asyncio.sleep(0)
        connection.check_timeout(loop.time() + ENDED_IDLE_S - 1)
        await asyncio.sleep(0)
        assert told.all == []
        connection.check_timeout(loop.time() + ENDED_IDLE_S + 1)
        await asyncio.wait_for(connection.task, 60)
        assert await loop.sock_recv(host, 1000) == b""
    ((place, verdict, words),) = told.all
    assert (place, verdict) == (("a.test", 80), "failed")
    assert "closed" in words
