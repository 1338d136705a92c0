"""HTTP front of a fleet: behind the gate that every HTTP server has, but without kernels.

Files of sessions are available through tools and resources only. The file routes of a server do
not exist here.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.abc
from starlette.types import ASGIApp, Receive, Scope, Send

from kernel_mcp import __version__
from kernel_mcp.barriers import Barrier
from kernel_mcp.config.settings import Settings
from kernel_mcp.fleet.cluster import secret_of
from kernel_mcp.fleet.link import Link
from kernel_mcp.fleet.rates import SharedRates
from kernel_mcp.fleet.signed import key_of
from kernel_mcp.http.callers import HttpCallers
from kernel_mcp.http.gate import Rates
from kernel_mcp.http.serving import application
from kernel_mcp.http.sessions import McpSessions, SseTransport
from kernel_mcp.kernel_context import open_events
from kernel_mcp.linux.proc import resident_bytes
from kernel_mcp.protocol import mcp_over
from kernel_mcp.sessions.events import Events
from kernel_mcp.sessions.notifications import DeliveryTracker
from kernel_mcp.telemetry import Levels, Meters
from kernel_mcp.tools.resources import ResourceServer
from kernel_mcp.web import cancellation_middleware

if TYPE_CHECKING:
    from kernel_mcp.fleet.metrics import FrontMetrics

SHARE_S = 0.25
"""Interval in seconds at which fronts share rate-limit counters."""


class FleetHttpApp:
    """The ASGI application of a front: all calls go to the fleet, and there are no tenant pools."""

    def __init__(self, settings: Settings, link: Link, callers: HttpCallers) -> None:
        """Open the events. Raises ConfigError."""
        self.events = open_events(settings, {"fleet": settings.fleet})
        self._settings = settings
        self._metrics = _metrics_of(self.events)
        self._link = link
        self._calls = link.calls()
        self.readiness = self._calls.readiness
        self._callers = callers
        self._over = anyio.Event()
        self._mcp: ResourceServer | None = None
        self._sessions: McpSessions | None = None
        self._app: ASGIApp | None = None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Serve until `end` is called. Raises KernelMcpError if it cannot start."""
        settings = self._settings
        try:
            async with AsyncExitStack() as stack:
                tasks = await stack.enter_async_context(anyio.create_task_group())
                await tasks.start(self._link.run)
                await tasks.start(self._calls.run)
                mcp = mcp_over(
                    self._calls,
                    self._callers,
                    self._calls.instructions,
                    files=self._calls.files,
                    key=partial(key_of, secret_of(settings.fleet), "tasks"),
                    alone=False,
                )
                lowlevel = mcp._lowlevel_server
                sessions = McpSessions(lowlevel, idle_s=settings.idle_timeout_s, ended=_forget)
                mcp.middleware.append(cancellation_middleware(sessions.deliveries))
                old = SseTransport(lowlevel, ended=_forget) if settings.sse else None
                await stack.enter_async_context(sessions.run())
                self._mcp, self._sessions = mcp, sessions
                self._app = application((), sessions, old)
                task_status.started()
                await self._over.wait()
                tasks.cancel_scope.cancel()
        finally:
            self.events.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        assert self._app is not None
        await self._app(scope, receive, send)

    def end(self) -> None:
        """Shut down gracefully."""
        self._over.set()

    def end_calls(self) -> int:
        """Answer all running calls now, as the server stops. Returns their number."""
        return self._mcp.end_calls() if self._mcp is not None else 0

    def deliveries(self, session: str) -> DeliveryTracker | None:
        """Return the delivery tracker of an MCP session; None if there is no such session."""
        return self._sessions.deliveries(session) if self._sessions is not None else None

    async def share(self, rates: Rates) -> None:
        """Share rate-limit counters with the other fronts of the fleet, until cancelled."""
        shared = SharedRates(self._link.registry)
        while True:
            await anyio.sleep(SHARE_S)
            if not self.readiness.ready:
                continue
            with Barrier("sharing the rates of principals among fronts"):
                await shared.share(rates)

    async def dismiss(self, principals: Collection[str]) -> None:
        """Do nothing: on the nodes, cells of a principal without a token end by themselves."""

    async def levels(self, calls: int) -> Levels:
        """Return the number of calls in progress, and get the metrics of the nodes."""
        if self._metrics is not None:
            self._metrics.nodes = await self._calls.metrics()
            self._metrics.members = self._calls.members
        return Levels(calls=calls, server_bytes=resident_bytes())


def _metrics_of(events: Events) -> FrontMetrics | None:
    """Count the events by the metrics of a front, and return them; None without the extra."""
    if type(events.meters) is Meters:
        return None
    from kernel_mcp.fleet.metrics import FrontMetrics

    events.meters = found = FrontMetrics(__version__)
    return found


def _forget(_principal: str, _session: str) -> None:
    """Do nothing when an MCP session ends: its default session stays, by its handle."""
