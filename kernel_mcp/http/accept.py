"""Media types of MCP responses, for clients that accept only one of the two or name none.

The specification requires clients to accept JSON and event streams, and the SDK refuses others.
"""

from __future__ import annotations

from starlette.types import Message, Scope, Send

from kernel_mcp.http.bodies import NUMBERED
from kernel_mcp.http.refusals import respond
from kernel_mcp.tools.calls import CONVERTED

_JSON, _EVENTS = b"application/json", b"text/event-stream"
_BOTH = (b"accept", _JSON + b", " + _EVENTS)
_ANY = frozenset({_JSON, b"application/*", b"*/*"}), frozenset({_EVENTS, b"text/*", b"*/*"})


def acceptable(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """Return the request as one that accepts both types, and a `send` of the accepted one.

    A client that accepts neither, or sends no `Accept`, gets JSON. A request for a stream itself
    is unchanged: there is no JSON for it.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    given = [value for name, value in headers if name == b"accept"]
    kinds = {each.split(b";")[0].strip().lower() for value in given for each in value.split(b",")}
    json, events = (not kinds.isdisjoint(each) for each in _ANY)
    if json and events:
        return scope, send
    stream = scope["method"] != "POST" or (b"mcp-method", b"subscriptions/listen") in headers
    if stream and given:
        return scope, send
    others = [each for each in headers if each[0] != b"accept"]
    scope = {**scope, "headers": [*others, _BOTH, (CONVERTED.encode(), b"1")]}
    if stream:
        return scope, send
    return scope, _Converted(send, _EVENTS if events else _JSON).send


class _Converted:
    """A response of one type: the last event of a stream as JSON, or JSON as the only event."""

    def __init__(self, send: Send, kind: bytes) -> None:
        self._send = send
        self._kind = kind
        self._start: Message | None = None
        """The start of a response that is converted, until its end."""
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Pass on a message of a response, converted at its end if its type is another."""
        if message["type"] == "http.response.start":
            kind = next((v for k, v in message["headers"] if k.lower() == b"content-type"), b"")
            other = _EVENTS if self._kind == _JSON else _JSON
            if message["status"] != 200 or kind.split(b";")[0] != other:  # refusals are JSON
                await self._send(message)
            else:
                self._start = message
            return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        if not (body := self._converted()):
            await respond(self._send, 503, _UNANSWERED, {})
            return
        length = str(len(body)).encode()
        kept = [
            each
            for each in self._start["headers"]
            if each[0].lower() not in (b"content-type", b"content-length")
        ]
        headers = [*kept, (b"content-type", self._kind), (b"content-length", length)]
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _converted(self) -> bytes:
        if self._kind == _EVENTS:
            return b"event: message\r\ndata: " + bytes(self._body) + b"\r\n\r\n"
        _, _, found = bytes(self._body).rpartition(NUMBERED)
        return (NUMBERED + found.partition(b"\n")[0].rstrip())[len(b"data: ") :] if found else b""


_UNANSWERED = "This call was not answered before its MCP session ended."
