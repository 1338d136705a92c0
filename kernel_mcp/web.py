"""Composition root of an HTTP server: one tenant pool for each set of grants.

A grant, `doors` in a tokens file, is a mount, the network, a device, a variable, a secret, or an
external kernel. A pool has its own sessions, kernels, template and network access, which see only
the grants of its principals. Pools share nothing of a kernel, so no grant has to be hidden.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Protocol

import anyio
import anyio.abc
from mcp.server.context import CallNext, HandlerResult, ServerMiddleware, ServerRequestContext
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from kernel_mcp.config.grants import grant_names, restricted_to
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.http import files as file_routes
from kernel_mcp.http.addresses import Addresses
from kernel_mcp.http.admission import Admission
from kernel_mcp.http.answers import HttpPages
from kernel_mcp.http.callers import HttpCallers
from kernel_mcp.http.connections import state_of
from kernel_mcp.http.gate import MCP, METRICS_PATH, OPEN_PATHS, Gate, Rates
from kernel_mcp.http.gate_audit import AuditObserver
from kernel_mcp.http.operations import RequestIds, routes
from kernel_mcp.http.refusals import respond
from kernel_mcp.http.serving import announce, application, bound, serving, url_of
from kernel_mcp.http.sessions import McpSessions, SseTransport
from kernel_mcp.identity import OneToken, Principal
from kernel_mcp.identity.issuer import metadata, metadata_url
from kernel_mcp.identity.verifiers import Verifiers, verifier_of
from kernel_mcp.kernel_context import shared_context
from kernel_mcp.linux.shutdown import Shutdown
from kernel_mcp.output.text import Masks
from kernel_mcp.protocol import build_mcp
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.server import AppContext, app_context, stay_within_bounds, warm_up
from kernel_mcp.sessions.events import Events
from kernel_mcp.sessions.idle_hibernator import IdleHibernator
from kernel_mcp.sessions.notifications import DeliveryTracker
from kernel_mcp.start import proven
from kernel_mcp.telemetry import Levels, Readiness
from kernel_mcp.tools.resources import ResourceServer

logger = logging.getLogger(__name__)

MOST_POOLS = 8
"""Most tenant pools. Each has its own template, of some 60 MB."""
MOST_KEYS = 1000
"""Size of the cache from a principal's grants to its pool, which every call looks up."""


class HttpApp(Protocol):
    """The ASGI application behind the gate: the tenant pools of this server, or a fleet's front."""

    @property
    def events(self) -> Events:
        """The server's events, with the meters that `/metrics` shows."""

    @property
    def readiness(self) -> Readiness:
        """Readiness to start kernels, with the reason if there is none; see `/readyz`."""

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Serve until `end` is called. Raises KernelMcpError if it cannot start."""

    def end(self) -> None:
        """Shut down gracefully."""

    def end_calls(self) -> int:
        """Answer all running calls now, as the server stops. Returns their number."""

    def deliveries(self, session: str) -> DeliveryTracker | None:
        """Return the delivery tracker of an MCP session; None if there is no such session."""

    async def levels(self, calls: int) -> Levels:
        """Return the current gauges; `calls` is the number of calls in progress."""

    async def dismiss(self, principals: Collection[str]) -> None:
        """Stop and save the sessions of principals whose last token was revoked."""

    async def share(self, rates: Rates) -> None:
        """Share rate-limit counters with the other servers of this deployment, until cancelled."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""


def warn_of_unknown_grants(settings: Settings, named: Mapping[str, str]) -> None:
    """Log each named grant that the server does not have.

    `named` maps grants to the row of the tokens file that names them.
    """
    known = grant_names(settings)
    for grant, row in sorted(named.items()):
        if grant not in {"*", *known}:
            logger.warning(
                "%s of the tokens file names the door %s, which this server does not have: %s",
                row,
                grant,
                "it has " + ", ".join(sorted(known)) if known else "it has none",
            )


@dataclass(frozen=True, slots=True)
class TenantPool:
    """The server of one set of grants: its context, MCP server, MCP sessions and ASGI app."""

    context: AppContext
    mcp: ResourceServer
    sessions: McpSessions
    app: ASGIApp


class TenantPools:
    """The pools of a server; each is built at the first call of a principal with its grants."""

    def __init__(
        self, settings: Settings, sandbox: Sandbox, *, url: str, callers: HttpCallers
    ) -> None:
        """`url` is the address at which clients reach the server. Raises ConfigError."""
        self._settings = settings
        self._sandbox = sandbox
        self._callers = callers
        self._links = file_routes.links_of(settings, url)
        self._url = url
        self.shared = shared_context(settings, sandbox)
        self.events = self.shared.events
        self.pools: list[TenantPool] = []
        self._by_grants: dict[frozenset[str], TenantPool] = {}
        self._key = lru_cache(MOST_KEYS)(partial(grant_names, settings))
        self._pool_of_principal: dict[str, TenantPool] = {}
        self._building = anyio.Lock()
        self._stopping = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Run the pools until `end` is called. Raises KernelMcpError if the first cannot be built.

        If cancelled, it ends at once, without saving the changes in sessions.
        """
        try:
            async with anyio.create_task_group() as beside:
                beside.start_soon(stay_within_bounds, self._settings, lambda: self.shared.sessions)
                async with anyio.create_task_group() as self._tasks:
                    await self._pool_for(() if self._settings.several else ("*",))
                    task_status.started()
                    await self._stopping.wait()
                beside.cancel_scope.cancel()
        finally:
            self.events.close()

    def end(self) -> None:
        """Shut down all pools gracefully: changes in their sessions are saved."""
        self._stopping.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request in the pool of its principal; 503 if that cannot be built."""
        try:
            pool = await self._pool_of(state_of(scope)["principal"])
        except KernelMcpError as error:
            await respond(send, 503, str(error), {"retry-after": "60"})
            return
        answer = pool.sessions if scope["path"] == MCP else pool.app
        await answer(scope, receive, send)

    async def _pool_of(self, who: Principal) -> TenantPool:
        pool = self._by_grants.get(self._key(who.grants)) or await self._pool_for(who.grants)
        before = self._pool_of_principal.get(who.name)
        if before is not pool:
            self._pool_of_principal[who.name] = pool
            pool.context.manager.welcome(who.name)
            if before is not None:
                logger.warning("the grants of a principal have changed: its sessions are ended")
                before.context.manager.dismiss(who.name)
        return pool

    async def _pool_for(self, grants: tuple[str, ...]) -> TenantPool:
        async with self._building:
            key = self._key(grants)
            if (found := self._by_grants.get(key)) is not None:
                return found
            if len(self.pools) >= MOST_POOLS:
                raise KernelMcpError(
                    f"Principals of this server have {MOST_POOLS} different sets of grants "
                    "already, and there is no room for one more. The operator can make them fewer "
                    "and start the server again."
                )
            assert self._tasks is not None
            pool: TenantPool = await self._tasks.start(
                self._run_pool, restricted_to(self._settings, grants)
            )
            self._by_grants[key] = pool
            self.pools.append(pool)
            return pool

    async def _run_pool(
        self, settings: Settings, *, task_status: anyio.abc.TaskStatus[TenantPool]
    ) -> None:
        async with AsyncExitStack() as stack:
            context = await stack.enter_async_context(
                app_context(settings, self._sandbox, self.shared)
            )
            # an issuer's tokens are the client's: a person has none to log in with
            own_tokens = settings.tokens is not None and not settings.issuer
            pages = HttpPages(self._url) if self._links is not None and own_tokens else None
            make = None if pages is None else lambda: pages
            mcp = build_mcp(context, self._callers, self._links, make)
            lowlevel = mcp._lowlevel_server
            ended = context.manager.directory.forget_default
            sessions = McpSessions(lowlevel, idle_s=settings.idle_timeout_s, ended=ended)
            mcp.middleware.append(cancellation_middleware(sessions.deliveries))
            old = SseTransport(lowlevel, ended=ended) if settings.sse else None
            moved = file_routes.routes(
                context.manager,
                self._callers.of_request,
                masks=Masks(settings.masked_values),
                files="files" in settings.tools,
            )
            moved += [pages.route] if pages is not None else []
            await stack.enter_async_context(sessions.run())
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(
                IdleHibernator(context.manager, settings.idle_timeout_s, time.monotonic).run
            )
            tasks.start_soon(warm_up, context)
            task_status.started(
                TenantPool(context, mcp, sessions, application(moved, sessions, old))
            )
            await self._stopping.wait()
            tasks.cancel_scope.cancel()

    def deliveries(self, session: str) -> DeliveryTracker | None:
        """See `HttpApp`."""
        found = (pool.sessions.deliveries(session) for pool in self.pools)
        return next((each for each in found if each is not None), None)

    async def dismiss(self, principals: Collection[str]) -> None:
        """See `HttpApp`."""
        for name in principals:
            if (pool := self._pool_of_principal.pop(name, None)) is not None:
                logger.warning("the last token of a principal was revoked: its sessions are ended")
                await pool.context.manager.expel(name)

    async def share(self, rates: Rates) -> None:
        """See `HttpApp`. There is nothing to share, as this is the only server."""

    def end_calls(self) -> int:
        """See `HttpApp`."""
        return sum([pool.mcp.end_calls() for pool in self.pools])

    @property
    def readiness(self) -> Readiness:
        """Readiness of the first pool."""
        return self.pools[0].context.kernels.readiness

    async def levels(self, calls: int) -> Levels:
        """Return the sums over all pools; `calls` is the number of calls in progress."""
        found = [await pool.context.levels(calls) for pool in self.pools]
        return Levels(
            sessions=sum((Counter(each.sessions) for each in found), Counter()),
            templates=sum((Counter(each.templates) for each in found), Counter()),
            spares=sum(each.spares for each in found),
            calls=calls,
            server_bytes=max(each.server_bytes for each in found),
            kernels_bytes=sum(each.kernels_bytes for each in found),
        )


async def run_http(settings: Settings, sandbox: Future[Sandbox], shutdown: Shutdown) -> None:
    """Serve clients over HTTP until the server is to stop, then finish the running calls."""

    async def pools(settings: Settings, url: str, callers: HttpCallers) -> HttpApp:
        return TenantPools(settings, await proven(sandbox), url=url, callers=callers)

    await serve_http(settings, pools, shutdown)


async def serve_http(
    settings: Settings,
    make: Callable[[Settings, str, HttpCallers], Awaitable[HttpApp]],
    shutdown: Shutdown,
) -> None:
    """See `run_http`. `make` builds the application behind the gate.

    It is called with the settings, including the actual port, the URL, and the finder of callers.
    """
    stop = anyio.Event()
    shutdown.on_begin(stop.set)
    async with anyio.create_task_group() as tasks:
        assert settings.http is not None
        listening = bound(settings.http)
        url = url_of(settings, listening)
        settings = replace(settings, http=(settings.http[0], listening.getsockname()[1]))
        verifier = verifier_of(settings, url)
        callers = HttpCallers(authenticated=verifier is not None)
        app = await make(settings, url, callers)
        async with anyio.create_task_group() as inner:
            with anyio.CancelScope() as building:
                tasks.start_soon(_give_up, stop, building)
                await inner.start(app.run)
            if not stop.is_set():
                await _serve(settings, listening, app, verifier, stop)
            app.end()
        tasks.cancel_scope.cancel()


async def _give_up(stop: anyio.Event, scope: anyio.CancelScope) -> None:
    await stop.wait()
    scope.cancel()


async def _serve(
    settings: Settings,
    listening: socket.socket,
    app: HttpApp,
    verifier: Verifiers | OneToken | None,
    stop: anyio.Event,
) -> None:
    """Serve until `stop` is set and the running calls have been answered."""
    assert settings.http is not None
    url = url_of(settings, listening)
    observer = AuditObserver(app.events)
    operations = Starlette(
        routes=routes(
            app.readiness,
            lambda: gate.draining,
            app.events.meters,
            lambda: app.levels(gate.calls),
        )
    )

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["path"] in (*OPEN_PATHS, METRICS_PATH)
        await (operations if asked else app)(scope, receive, send)

    document = metadata(url, settings.issuer) if settings.issuer else None
    gate = Gate(
        RequestIds(dispatch),
        addresses=Addresses.of(settings.http[0], settings.public_url),
        admission=Admission(verifier, document, metadata_url(url)),
        quotas=settings.quotas,
        clock=time.monotonic,
        deliveries_of=app.deliveries,
        observer=observer,
    )
    async with (
        anyio.create_task_group() as tasks,
        serving(gate, settings, listening, app.end_calls) as drain,
    ):
        tasks.start_soon(observer.run)
        tasks.start_soon(app.share, gate)
        if isinstance(verifier, Verifiers):
            verifier.on_tokens_change(observer.tokens)
            warn_of_unknown_grants(settings, verifier.grants())
            tasks.start_soon(verifier.prepare)
            tasks.start_soon(verifier.watch, app.dismiss)
        announce(url, settings, verifier.token if isinstance(verifier, OneToken) else "")
        await stop.wait()
        await drain()
        tasks.cancel_scope.cancel()


def cancellation_middleware(
    deliveries_of: Callable[[str], DeliveryTracker | None],
) -> ServerMiddleware[Any]:
    """Return middleware that handles cancellation by clients of the handshake era.

    See `DeliveryTracker.cancelled`.
    """

    async def pass_on(ctx: ServerRequestContext[Any], call_next: CallNext) -> HandlerResult:
        if ctx.method == "notifications/cancelled" and ctx.request is not None:
            request = (ctx.params or {}).get("requestId")
            deliveries = deliveries_of(ctx.request.headers.get("mcp-session-id", ""))
            if deliveries is not None and isinstance(request, (str, int)):
                deliveries.cancelled(request)
        return await call_next(ctx)

    return pass_on
