"""Callers of requests over HTTP: principal, MCP session, and delivery of the response."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request

from kernel_mcp.http.connections import peer_of, state_of
from kernel_mcp.identity import Principal
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import NO_RECEIPT, RequestId, ResponseContext
from kernel_mcp.tools.calls import program_of

DEFAULT = "default"
"""Key of the default session of an authenticated principal."""
SESSION_HEADER = "mcp-session-id"


def mcp_session(request: Request) -> str:
    """Return the id of the MCP session of a request; empty without one.

    Protocol revisions from 2026 on, the modern era, have no sessions.
    """
    found = request.headers.get(SESSION_HEADER, "")
    return found or str(request.query_params.get("session_id", ""))


def caller_of(
    request: Request, answers: RequestId | None = None, *, authenticated: bool = True
) -> Caller:
    """Return the caller of a request; `answers` is the id of its JSON-RPC call, if it is one.

    An authenticated principal has one default session. Other callers have one for each MCP session.
    Without MCP sessions (modern era) they have none, as their requests are not related.
    """
    state = state_of(request.scope)
    who: Principal = state["principal"]
    session = mcp_session(request)
    delivery = state.get("delivery")
    receipt = NO_RECEIPT if delivery is None or answers is None else delivery.expect(answers)
    return Caller(
        principal=who.name,
        default=DEFAULT if authenticated else session,
        who=who,
        known=authenticated,
        client=session or _kind(request),
        response=ResponseContext(receipt),
        request=state.get("request", ""),
        peer=peer_of(request.scope),
    )


def _kind(request: Request) -> str:
    """Return a key for a client without an MCP session: its address and User-Agent."""
    host = request.client.host if request.client is not None else ""
    return f"{host} {request.headers.get('user-agent', '')[:80]}"


class HttpCallers:
    """Finds the callers of requests, for the tools and resources of an HTTP server."""

    def __init__(self, *, authenticated: bool) -> None:
        self._authenticated = authenticated

    def of(self, context: Any) -> Caller:
        """Return the caller of a tool or resource call with this context of the SDK."""
        request = context.request_context.request
        caller = caller_of(request, context.request_id, authenticated=self._authenticated)
        return replace(caller, program=program_of(context))

    def of_request(self, request: Request) -> Caller:
        """Return the caller of a request that is not an MCP call."""
        return caller_of(request, authenticated=self._authenticated)
