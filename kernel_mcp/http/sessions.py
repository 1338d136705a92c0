"""MCP sessions of the handshake era and of HTTP+SSE: their limits, and cleanup at their end.

The handshake era are the protocol revisions in which a client begins a session by `initialize`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.server.auth.middleware.bearer_auth import (
    AuthenticatedUser,
    AuthorizationContext,
    authorization_context,
)
from mcp.server.lowlevel.server import Server
from mcp.server.sse import SseServerTransport
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.message import SessionMessage
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kernel_mcp.barriers import Barrier
from kernel_mcp.http.accept import acceptable
from kernel_mcp.http.bodies import MOST_BODY
from kernel_mcp.http.callers import SESSION_HEADER
from kernel_mcp.http.connections import state_of
from kernel_mcp.http.delivery import SseDelivery
from kernel_mcp.http.refusals import respond
from kernel_mcp.sessions.notifications import DeliveryTracker

logger = logging.getLogger(__name__)

MOST_SESSIONS = 2000
"""Most MCP sessions of all principals; each needs some 40 KiB (measured)."""
MOST_OF_ONE = 500
"""Most MCP sessions of one principal."""
LEAST_IDLE_S = 30 * 60.0
MOST_IDLE_S = 24 * 3600.0
"""Bounds of the idle timeout of MCP sessions, which otherwise is that of kernel sessions."""

_LAST_EVENT = b"last-event-id"
_UNKNOWN = (
    "There is no such MCP session: the server was started anew, or has ended it. Send `initialize` "
    "again; sessions of kernels stay and are found by their handles and names."
)


class McpSessions(StreamableHTTPSessionManager):
    """The SDK's MCP sessions, each with a delivery tracker, and limited for each principal.

    `ended` is called with principal and id of each session that ends.
    """

    def __init__(
        self, app: Server[Any], *, idle_s: float, ended: Callable[[str, str], None]
    ) -> None:
        super().__init__(
            app,
            session_idle_timeout=min(max(idle_s, LEAST_IDLE_S), MOST_IDLE_S)
            if math.isfinite(idle_s)
            else MOST_IDLE_S,
            max_request_body_size=MOST_BODY,
            max_sessions=MOST_SESSIONS,
        )
        self._ended = ended
        self._deliveries: dict[str, DeliveryTracker] = {}

    def deliveries(self, session: str) -> DeliveryTracker | None:
        """Return the delivery tracker of an MCP session; None if there is no such session."""
        if session not in self._server_instances:
            return None
        return self._deliveries.setdefault(session, DeliveryTracker())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as an ASGI application; 404 if its MCP session is another user's."""
        name = SESSION_HEADER.encode()
        session = next((v.decode("latin-1") for k, v in scope["headers"] if k == name), None)
        if session is not None and not self._is_of(session, scope.get("user")):
            await respond(send, 404, _UNKNOWN, {})
            return
        if scope["method"] == "GET":  # events have no ids: begin a new stream
            kept = [each for each in scope["headers"] if each[0] != _LAST_EVENT]
            scope = {**scope, "headers": kept}
        scope, send = acceptable(scope, send)
        await self.handle_request(scope, receive, send)

    def _is_of(self, session: str, user: object) -> bool:
        """Return True if the MCP session exists and belongs to `user`."""
        who = authorization_context(user) if isinstance(user, AuthenticatedUser) else None
        return session in self._server_instances and self._session_owners.get(session) == who

    def _admit_session(
        self, requestor: AuthorizationContext | None
    ) -> StreamableHTTPServerTransport | None:
        own = sum(owner == requestor for owner in self._session_owners.values())
        if own >= MOST_OF_ONE:
            logger.warning("a principal has %d MCP sessions and gets no more", own)
            return None
        return super()._admit_session(requestor)

    async def _discard_session(
        self, session_id: str, transport: StreamableHTTPServerTransport
    ) -> None:
        owner = self._session_owners.get(session_id)
        await super()._discard_session(session_id, transport)
        self._deliveries.pop(session_id, None)
        with Barrier("ending an MCP session"):
            self._ended(owner["client_id"] if owner is not None else "", session_id)


class SseTransport:
    """HTTP+SSE: responses are events of one GET; requests are sent by POST to `messages`."""

    path = "/sse"
    messages = "/messages/"

    def __init__(self, app: Server[Any], *, ended: Callable[[str, str], None]) -> None:
        self._app = app
        self._ended = ended
        self._sse = SseServerTransport(self.messages, max_request_body_size=MOST_BODY)
        self._deliveries: dict[str, DeliveryTracker] = {}
        self._owners: list[str] = []
        """The principal of each connected client."""

    async def connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one client until it disconnects."""
        if scope["method"] != "GET":
            await Response(status_code=405, headers={"Allow": "GET"})(scope, receive, send)
            return
        who = state_of(scope)["principal"].name
        if self._owners.count(who) >= MOST_OF_ONE or len(self._owners) >= MOST_SESSIONS:
            await respond(send, 503, "Too many clients of HTTP+SSE are connected.", {})
            return
        deliveries, known = DeliveryTracker(), set(self._sse._read_stream_writers)
        async with AsyncExitStack() as stack:
            self._owners.append(who)
            stack.callback(self._owners.remove, who)
            read, write = await stack.enter_async_context(
                self._sse.connect_sse(scope, receive, send)
            )
            (session,) = [each.hex for each in self._sse._read_stream_writers if each not in known]
            self._deliveries[session] = deliveries
            stack.callback(self._gone, session, scope)
            answers, given = anyio.create_memory_object_stream[SessionMessage]()
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(_pass_on, given, write, deliveries)
            await self._app.run(read, answers, self._app.create_initialization_options())
            tasks.cancel_scope.cancel()

    def _gone(self, session: str, scope: Scope) -> None:
        del self._deliveries[session]
        self._ended(state_of(scope)["principal"].name, session)

    async def post(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept a message of a connected client."""
        query = scope["query_string"].decode("latin-1")
        session = query.partition("session_id=")[2].partition("&")[0]
        deliveries = self._deliveries.get(session)
        if deliveries is not None:
            state_of(scope)["delivery"] = SseDelivery(deliveries)
        await self._sse.handle_post_message(scope, receive, send)


async def _pass_on(
    given: MemoryObjectReceiveStream[SessionMessage], write: Any, deliveries: DeliveryTracker
) -> None:
    """Send answers, and note which were delivered; after a disconnect none is."""
    async with given, write:
        async for said in given:
            try:
                await write.send(said)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                deliveries.lost(getattr(said.message, "id", None))
            else:
                deliveries.written(said.message)
