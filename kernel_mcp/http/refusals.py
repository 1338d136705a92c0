"""Answers of the server itself, in place of those of what is behind the gate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Send


class Refused(Exception):  # an answer
    """An answer in place of that of the application."""

    def __init__(
        self,
        status: int,
        reason: str,
        text: str,
        headers: Mapping[str, str] | None = None,
        who: str = "",
    ) -> None:
        """`who` is the principal, where it is known of no other request."""
        super().__init__(text)
        self.status = status
        self.reason = reason
        self.headers = dict(headers or {})
        self.who = who


async def respond(send: Send, status: int, text: str, headers: Mapping[str, str]) -> None:
    """An answer with a JSON object that says what happened."""
    await respond_json(send, status, {"error": text}, headers)


async def respond_json(
    send: Send, status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> None:
    """An answer that is a JSON object."""
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
