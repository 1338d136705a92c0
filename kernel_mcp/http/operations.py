"""Operational endpoints: liveness, readiness and metrics; and request ids in the log."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kernel_mcp import __version__
from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.store import default_cache
from kernel_mcp.extensions import install_line
from kernel_mcp.http.connections import peer_of, state_of
from kernel_mcp.http.gate import METRICS_PATH
from kernel_mcp.launch.rundir import default_base
from kernel_mcp.telemetry import Levels, Meters, Readiness
from kernel_mcp.telemetry.origin import Origin
from kernel_mcp.telemetry.spans import OriginContext

UNINSTALLED = (
    f"Metrics take prometheus-client, which is not installed: {install_line('http')}, then start "
    "the server again."
)
_FRESH = {"cache-control": "no-store"}


def meters_of_http(settings: Settings) -> Meters:
    """Return the meters that `/metrics` shows. Without prometheus-client they count nothing."""
    try:
        from kernel_mcp.telemetry.metrics import Metrics
    except ModuleNotFoundError:
        return Meters()
    if settings.fleet and not settings.fleet_store:  # a front has no sessions
        return Metrics(__version__)
    limits = {
        "sessions_limit": settings.max_sessions,
        "session_memory_limit_bytes": settings.limits.memory_bytes,
        "session_disk_limit_bytes": settings.limits.disk_bytes,
        "machine_memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }
    folders = {
        "state": settings.state_dir or default_base(),
        "cache": settings.cache_dir or default_cache(),
    }
    return Metrics(__version__, limits, folders)


def routes(
    readiness: Readiness,
    draining: Callable[[], bool],
    meters: Meters,
    levels: Callable[[], Awaitable[Levels]],
) -> list[Route]:
    """Return the routes `/healthz`, `/readyz` and `/metrics`; the gate protects the last."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n", headers=_FRESH)

    async def readyz(_: Request) -> Response:
        reason = "draining" if draining() else "" if readiness.ready else readiness.reason
        return PlainTextResponse(f"{reason or 'ok'}\n", 503 if reason else 200, headers=_FRESH)

    async def metrics(request: Request) -> Response:
        found = meters.text(await levels(), request.headers.get("accept", ""))
        if found is None:
            return JSONResponse({"error": UNINSTALLED}, 501, _FRESH)
        text, kind = found
        return Response(text, headers={**_FRESH, "content-type": kind})

    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route(METRICS_PATH, metrics),
    ]


_REQUEST = b"x-request-id"
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestIds:
    """ASGI middleware that gives each request an id, which lines of the log name.

    The id is that of the `X-Request-Id` header, if it is valid, or a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on one request, with its id in the state and the log context."""
        given = next((value for name, value in scope["headers"] if name == _REQUEST), b"")
        request = given.decode() if _ID.fullmatch(given) else secrets.token_hex(4)
        state = state_of(scope)
        state["request"] = request
        who = state.get("principal")
        name = who.name if who is not None else ""
        with OriginContext(Origin(request, "", name, peer=peer_of(scope))):
            await self._app(scope, receive, send)
