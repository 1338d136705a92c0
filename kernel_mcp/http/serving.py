"""HTTP server: its socket, its main loop, and graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError
from kernel_mcp.http.connections import CHECK_S, SILENT_S, Connections, HttpProtocol
from kernel_mcp.http.gate import MCP, NOTHING, Gate

logger = logging.getLogger(__name__)

LAST_ANSWERS_S = 3.0
"""Part of the drain, in seconds, for the responses of calls that are given up."""
LAST_BYTES_S = 2.0
"""Seconds for the last bytes of responses to reach clients that read them."""
MOST_CONNECTIONS = 4096
BACKLOG = 1024


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def application(routes: Sequence[BaseRoute], mcp: Any, old: Any = None) -> Starlette:
    """Return the application behind the gate: MCP at `/mcp`, other routes, and `old` at `/sse`.

    `old` is None without the HTTP+SSE transport.
    """
    found: list[BaseRoute] = [Route(MCP, _AnyMethod(mcp))]
    if old is not None:
        found += [
            Route(old.path, _AnyMethod(old.connect)),
            Route(old.messages, _AnyMethod(old.post)),
        ]

    async def explain(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = error.detail
        if error.status_code == 404:
            text = NOTHING
        return JSONResponse({"error": text}, error.status_code, error.headers)

    served = Starlette(routes=[*found, *routes], exception_handlers={HTTPException: explain})
    served.router.redirect_slashes = False  # behind TLS it would redirect to plain http
    return served


class _AnyMethod:
    """Wrapper by which a route passes every HTTP method to an ASGI application."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


def bound(address: tuple[str, int]) -> socket.socket:
    """Return a non-blocking socket that listens at `address`. Raises ConfigError."""
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, number, _, where = found[0]
        with ExitStack() as undo:
            opened = undo.enter_context(socket.socket(family, kind, number))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(where)
            opened.listen(BACKLOG)
            opened.setblocking(False)
            undo.pop_all()
    except OSError as error:
        raise ConfigError(
            f"--http {host}:{port}: nothing can listen there ({error.strerror}); choose another "
            "port, or 0 for any that is free"
        ) from error
    return opened


def url_of(settings: Settings, listening: socket.socket) -> str:
    """Return the URL at which clients reach the server, without a path."""
    if settings.public_url:
        return settings.public_url.rstrip("/")
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def most_connections() -> int:
    """Return the limit on connections: a quarter of the descriptors; kernels need the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft < 0 else max(16, min(MOST_CONNECTIONS, soft // 4))


@asynccontextmanager
async def serving(
    gate: Gate, settings: Settings, listening: socket.socket, end_calls: Callable[[], int]
) -> AsyncIterator[Callable[[], Any]]:
    """Serve inside this block; yield `drain`, which shuts down gracefully.

    `drain` refuses new calls and waits for running ones. Before `drain_s` is over it makes
    `end_calls` answer the rest. It does not wait for streams and listeners.
    """
    connections = Connections(most_connections(), anyio.current_time)

    async def with_connections(scope: Any, receive: Any, send: Any) -> None:
        await gate(scope, receive, send)

    config = uvicorn.Config(
        with_connections,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.proxies),
        forwarded_allow_ips=list(settings.proxies) or None,
        timeout_keep_alive=int(SILENT_S),
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = _Server(config)
    config.load()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_sweep, connections, gate)
        tasks.start_soon(_serve, server, listening, connections)

        async def drain() -> None:
            gate.draining = True
            last_s = min(LAST_ANSWERS_S, settings.drain_s / 2)
            with anyio.move_on_after(settings.drain_s - last_s):
                await gate.drained()
            if gate.calls:
                given_up = end_calls() + gate.cancel_transfers()
                logger.warning("giving up %d calls that outlast --drain", given_up)
                with anyio.move_on_after(last_s):
                    await gate.drained()

        try:
            yield drain
        finally:
            server.should_exit = server.force_exit = True
            tasks.cancel_scope.cancel()


async def _serve(server: _Server, listening: socket.socket, connections: Connections) -> None:
    server.lifespan = server.config.lifespan_class(server.config)
    server.lifespan.state["connections"] = connections
    await server.startup(sockets=[listening])
    try:
        await server.main_loop()
    finally:
        with anyio.CancelScope(shield=True):
            for each in server.servers:
                each.close()
            connections.end()
            with anyio.move_on_after(LAST_BYTES_S):
                await connections.wait_closed()
            connections.cut()
            if answering := list(server.server_state.tasks):  # they receive a disconnect
                _, deaf = await asyncio.wait(answering, timeout=LAST_BYTES_S)
                for task in deaf:
                    task.cancel()


async def _sweep(connections: Connections, gate: Gate) -> None:
    while True:
        await anyio.sleep(CHECK_S)
        connections.sweep()
        await gate.recheck()


def announce(url: str, settings: Settings, token: str) -> None:
    """Print the server's URL and the command for a client to stderr, with `token` if not empty."""
    given = token or "TOKEN"
    header = "" if settings.no_auth else f' --header "Authorization: Bearer {given}"'
    lines = [f"kernel-mcp: serving {url}{MCP}"]
    if settings.issuer and not settings.tokens:
        header = ""
    lines.append(f"  claude mcp add --transport http notebook {url}{MCP}{header}")
    if settings.sse:
        lines.append(f"  the old HTTP+SSE transport is at {url}/sse")
    print("\n".join(lines), file=sys.stderr, flush=True)
