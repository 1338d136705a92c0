"""Error responses that the gate sends in place of the application."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Send


class RequestRefused(Exception):
    """A request is refused with an HTTP status; the message is for the client.

    reason  a short label for meters and the audit trail; see `gate.GateObserver.refused`
    code    the error code of RFC 6750 that the body names; empty for refusals of other kinds
    """

    def __init__(
        self,
        status: int,
        reason: str,
        text: str,
        headers: Mapping[str, str] | None = None,
        principal: str = "",
        code: str = "",
    ) -> None:
        """`principal` names the principal if the request's state does not have it yet."""
        super().__init__(text)
        self.status = status
        self.reason = reason
        self.headers = dict(headers or {})
        self.principal = principal
        self.code = code

    @property
    def body(self) -> dict[str, str]:
        """The JSON object of the response."""
        if self.code:
            return {"error": self.code, "error_description": str(self)}
        return {"error": str(self)}


async def respond(send: Send, status: int, text: str, headers: Mapping[str, str]) -> None:
    """Send a response with the JSON object `{"error": text}`."""
    await respond_json(send, status, {"error": text}, headers)


async def respond_json(
    send: Send, status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> None:
    """Send a response with a JSON object; it is not to be cached."""
    body = json.dumps(value).encode()
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        **(headers or {}),
    }
    start = [(name.encode(), value.encode("latin-1", "replace")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body, "more_body": False})
