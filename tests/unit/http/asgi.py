"""One request to an ASGI application, as a server would make it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from starlette.types import ASGIApp, Message

PEER = "192.0.2.7"


@dataclass
class Answer:
    """The response."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: ASGIApp,
    method: str = "POST",
    path: str = "/mcp",
    *,
    headers: dict[str, str] | None = None,
    body: Sequence[bytes] = (b"{}",),
    state: dict[str, Any] | None = None,
    stays: bool = True,
) -> Answer:
    """Send a request whose body comes in pieces; its client goes after them unless it `stays`."""
    given = {"host": "127.0.0.1:8000", **(headers or {})}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        "client": (PEER, 1234),
        "state": {} if state is None else state,
    }
    pieces = list(body)
    answer = Answer()

    async def receive() -> Message:
        if pieces:
            piece = pieces.pop(0)
            more = bool(pieces) or not stays
            return {"type": "http.request", "body": piece, "more_body": more}
        if stays:
            await anyio.sleep_forever()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode(): v.decode("latin-1") for k, v in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    await app(scope, receive, send)
    return answer
