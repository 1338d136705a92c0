"""Which requests JupyterLab's server answers."""

from __future__ import annotations

import asyncio

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from kernel_mcp.lab.request_filter import guard, needed, own

KERNEL = "/api/kernels/3d5b2bde-9fae-52b4-98c8-7cc58d46d5cc"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/lab"),
        ("GET", "/lab/tree/work.ipynb"),
        ("GET", "/static/lab/main.js"),
        ("GET", "/lab/extensions/@jupyter/collaboration-extension/static/6.js"),
        ("GET", "/lab/api/settings/@jupyterlab/notebook-extension:panel"),
        ("GET", "/api/contents"),
        ("GET", "/api/contents/work.ipynb/checkpoints"),
        ("GET", f"{KERNEL}/channels"),
        ("GET", "/api/collaboration/room/json:notebook:1"),
        ("PUT", "/api/collaboration/session/work.ipynb"),
        ("PUT", "/lab/api/workspaces/default"),
        ("POST", "/api/sessions"),
        ("POST", f"{KERNEL}/interrupt"),
        ("PATCH", "/api/sessions/1"),
        ("DELETE", KERNEL),
    ],
)
def test_what_the_page_asks_is_answered(method: str, path: str) -> None:
    assert needed(method, path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/kernelspecs/python3/page.html"),
        ("GET", "/files/page.html"),
        ("GET", "/view/page.html"),
        ("GET", "/nbconvert/html/work.ipynb"),
        ("POST", "/nbconvert/html"),
        ("POST", "/lab/api/build"),
        ("DELETE", "/lab/api/build"),
        ("POST", "/lab/api/plugins"),
        ("POST", "/lab/api/extensions"),
        ("PUT", "/api/config/notebook"),
        ("POST", "/api/contents/work.ipynb/trust"),
        ("POST", "/api/terminals"),
        ("POST", f"{KERNEL}/restart"),
        ("POST", "/api/shutdown"),
        ("GET", "/metrics"),
        ("GET", "/lsp/ws/pyright"),
        ("TRACE", "/lab"),
    ],
)
def test_what_it_does_not_ask_is_refused(method: str, path: str) -> None:
    assert not needed(method, path)


def test_who_may_ask() -> None:
    assert own("127.0.0.1:8888", None)
    assert own("localhost:8888", "http://localhost:8888")
    assert own("[::1]:8888", "http://[::1]:8888")
    assert not own("evil.example:8888", None)
    assert not own("127.0.0.1.evil.example", None)
    for origin in ("http://evil.example", "http://127.0.0.1:3000", "null", ""):
        assert not own("127.0.0.1:8888", origin)


def test_handlers_that_would_answer_are_not_reached() -> None:
    class Open(RequestHandler):
        def get(self) -> None:
            self.write("answered")

    async def statuses() -> list[int]:
        application = Application([("/.*", Open)])
        application.add_handlers(".*$", [("/lab", Open)])
        guard(application)
        (socket,) = bind_sockets(0, "127.0.0.1")
        server = HTTPServer(application)
        server.add_sockets([socket])
        address = f"http://127.0.0.1:{socket.getsockname()[1]}"
        foreign = {"Origin": "http://127.0.0.1:1"}
        try:
            found = []
            for path, headers in (("/lab", {}), ("/lab", foreign), ("/kernelspecs/a/b", {})):
                request = HTTPRequest(address + path, headers=headers)
                found.append((await AsyncHTTPClient().fetch(request, raise_error=False)).code)
            return found
        finally:
            server.stop()

    assert asyncio.run(statuses()) == [200, 403, 404]
