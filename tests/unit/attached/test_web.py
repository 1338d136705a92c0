"""Messages of a Jupyter server's web socket, as its documentation has them."""

from __future__ import annotations

import json
import timeit
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import anyio
import pytest
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application, RequestHandler
from tornado.websocket import WebSocketHandler

from kernel_mcp.attached.web import (
    MAX_LIST_BYTES,
    MOST_PINGS,
    PROTOCOL,
    Running,
    Unsigned,
    WebChannels,
    joined,
    kernels_of,
    packed,
    unpacked,
)
from kernel_mcp.config.attachments import Attachment
from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import ChannelListener, Floods
from kernel_mcp.kernels.message_codec import WireError

pytestmark = pytest.mark.anyio

PARTS = [b"iopub", b'{"msg_type": "status"}', b"{}", b"{}", b'{"execution_state": "idle"}', b"\0x"]


def test_parts_come_back() -> None:
    assert unpacked(packed(PARTS)) == PARTS


def test_the_form_is_that_of_the_protocol() -> None:
    number = lambda value: value.to_bytes(8, "little")  # noqa: E731
    places = [8 * 7, 61, 63, 65, 67, 69]
    message = b"".join(map(number, [6, *places])) + b"shell" + b"{}" * 4
    assert packed([b"shell", *[b"{}"] * 4]) == message


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"x",
        packed(PARTS)[:-1],
        packed(PARTS)[:20],
        packed([b"shell", b"{}"]),
        (2**63).to_bytes(8, "little") + b"x" * 100,
        (6).to_bytes(8, "little") + b"\xff" * 100,
        packed([b"shell", *[b"{}"] * 100]),
    ],
)
def test_what_is_none_is_refused(message: bytes) -> None:
    with pytest.raises(WireError):
        unpacked(message)


def test_requests_of_others_are_known_as_such() -> None:
    ours, theirs = Unsigned(), Unsigned()
    _, request = ours.request("execute_request", {})
    _, foreign = theirs.request("execute_request", {})
    answer = [b'{"msg_type": "status"}', request[0], b"{}", b"{}"]
    assert not ours.decode(answer).foreign
    heard = ours.decode([answer[0], foreign[0], *answer[2:]])
    assert (heard.foreign, heard.asked) == (True, "execute_request")


@asynccontextmanager
async def serving(
    lists: Any, socket: Callable[[WebSocketHandler], None] | int = 404
) -> AsyncIterator[Attachment]:
    """A server that answers `lists`, and a web socket as `socket` says."""

    class Lists(RequestHandler):
        def get(self) -> None:
            self.write(lists if isinstance(lists, bytes) else json.dumps(lists).encode())

    class Refused(RequestHandler):
        def get(self) -> None:
            self.set_status(socket if isinstance(socket, int) else 500)

    class Socket(WebSocketHandler):
        def select_subprotocol(self, subprotocols: list[str]) -> str:
            return subprotocols[0]

        def open(self, *_: str) -> None:
            if callable(socket):
                socket(self)

        def on_message(self, message: str | bytes) -> None:
            """Nothing is answered."""

    channels = Refused if isinstance(socket, int) else Socket
    listener, port = bind_unused_port()
    paths: list[Any] = [(r"/api/kernels/.*/channels", channels), (r"/api/.*", Lists)]
    server = HTTPServer(Application(paths))
    server.add_sockets([listener])
    try:
        yield Attachment(f"http://127.0.0.1:{port}", "secret")
    finally:
        server.stop()


def session(kernel: object, path: object) -> dict[str, Any]:
    return {"kernel": {"id": kernel}, "path": path}


async def test_kernels_without_a_name_of_use_are_left_out() -> None:
    lists = [session("a", "x.ipynb"), session("b", "p" * 2000), session("c", "\ud800")]
    lists += [session("d" * 2000, "y"), session(["e"], "y"), session("\ud800", "y"), session("", 1)]
    async with serving(lists) as server:
        found = await kernels_of(server)
    assert found == [Running("a", "x.ipynb"), Running("b"), Running("c")]


async def test_a_list_beyond_all_bounds_is_not_read() -> None:
    async with serving(b"[" + b" " * MAX_LIST_BYTES + b"]") as server:
        with pytest.raises(LaunchError):
            await kernels_of(server)


@pytest.mark.parametrize("code", [200, 204, 302, 401, 404, 500])
async def test_what_is_no_web_socket_is_told(code: int) -> None:
    async with serving([], code) as server:
        with pytest.raises(LaunchError, match="Jupyter server http") as refused:
            await joined(server, "a")
    assert "secret" not in str(refused.value)


async def test_a_server_that_only_pings_is_left() -> None:
    def ping(handler: WebSocketHandler) -> None:
        for _ in range(MOST_PINGS + 1):
            handler.ping(b"")

    broken = anyio.Event()
    async with serving([], ping) as server:
        end = await joined(server, "a")
        assert end.selected_subprotocol == PROTOCOL
        listener = ChannelListener(lambda *_: None, lambda _: None, lambda _: broken.set())
        channels = WebChannels(end, server, "a", Floods(), listener)
        with anyio.fail_after(30):
            await broken.wait()
        channels.close()


class Flooding:
    """A web socket that has the same message again at once, for ever."""

    protocol = None
    closed = False

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.given = 0

    async def read_message(self) -> bytes:
        self.given += 1
        return self.message

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("chars", [10, 1_000_000])
async def test_a_flood_leaves_most_of_the_time_to_others(chars: int) -> None:
    content = json.dumps({"name": "stdout", "text": "x" * chars}).encode()
    message = packed([b"iopub", b'{"msg_type": "stream"}', b"{}", b"{}", content])

    def read() -> None:
        _, *frames = unpacked(message)
        Unsigned().decode(frames)

    each_s = min(timeit.repeat(read, number=1, repeat=20))  # others may have had the processor
    flooding, nowhere = Flooding(message), Attachment("http://127.0.0.1:1", "")
    listener = ChannelListener(lambda *_: None, lambda _: None, lambda _: None)
    channels = WebChannels(flooding, nowhere, "a", Floods(), listener)  # type: ignore[arg-type]
    began = perf_counter()
    for _ in range(50):
        await anyio.sleep(0.01)
    assert flooding.given * each_s < (perf_counter() - began) / 2
    channels.close()
    assert flooding.closed
