"""Who makes a call that came by HTTP, and where its answer goes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from kernel_mcp.http.connections import state_of
from kernel_mcp.identity import Principal
from kernel_mcp.sessions.losses import UNREAD, Reply, RequestId
from kernel_mcp.sessions.manager import Caller

DEFAULT = "default"
"""Where the default session of an authenticated principal is looked up."""
SESSION_HEADER = "mcp-session-id"


def mcp_session(request: Request) -> str:
    """The id of the MCP session that a request is part of; empty in the 2026 era."""
    found = request.headers.get(SESSION_HEADER, "")
    return found or str(request.query_params.get("session_id", ""))


def caller_of(
    request: Request, answers: RequestId | None = None, *, authenticated: bool = True
) -> Caller:
    """The caller of a request; `answers` is the id of the call that its answer is expected for.

    An authenticated principal has one default session. Others have one for each MCP session, and
    none in the 2026 era, in which nothing ties one request to the next.
    """
    state = state_of(request.scope)
    who: Principal = state["principal"]
    session = mcp_session(request)
    delivery = state.get("delivery")
    receipt = UNREAD if delivery is None or answers is None else delivery.expect(answers)
    return Caller(
        principal=who.name,
        default=DEFAULT if authenticated else session,
        who=who,
        known=authenticated,
        client=session or _kind(request),
        reply=Reply(receipt),
        request=state.get("request", ""),
    )


def _kind(request: Request) -> str:
    """What tells clients without a session apart: where they are, and what they call themselves."""
    host = request.client.host if request.client is not None else ""
    return f"{host} {request.headers.get('user-agent', '')[:80]}"


class HttpCallers:
    """The callers of an HTTP server, for its tools and resources."""

    def __init__(self, *, authenticated: bool) -> None:
        self._authenticated = authenticated

    def of(self, context: Any) -> Caller:
        """Who makes the call with this context of the SDK."""
        request = context.request_context.request
        return caller_of(request, context.request_id, authenticated=self._authenticated)

    def of_request(self, request: Request) -> Caller:
        """Who makes a request that is no call."""
        return caller_of(request, authenticated=self._authenticated)
