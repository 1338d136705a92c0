"""Bodies of calls, read completely before they are parsed, within limits of size and time.

`TrafficMeter` also counts and watches the bytes of responses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Protocol

import anyio
from starlette.types import Message, Receive, Send

from kernel_mcp.barriers import Barrier
from kernel_mcp.http.refusals import RequestRefused
from kernel_mcp.units import KIB, MIB, format_bytes

MOST_BODY = 4 * MIB
"""Most bytes of one MCP message: parsing blocks all other requests, for 20 ms a MiB."""
MOST_VALUES = 10_000
"""Most items of lists and objects in one MCP message: parsing a million takes seconds."""
BODY_S = 60.0
"""Seconds for the whole body of a call."""
MOST_SKIPPED = 16 * MIB
SKIP_S = 5.0
"""Limits, in bytes and in seconds, on what is still read of the body of a refused request."""
WRITE_S = 60.0
"""Seconds for a client to accept the next piece of a response."""


class MemoryOwner(Protocol):
    """Owner of bytes in memory; `buffered` is their number."""

    buffered: int


class BufferedBytes:
    """Bytes of one request in memory, counted against the limit of its principal.

    The limit is `most`; 0 for none.
    """

    def __init__(self, usage: MemoryOwner, most: int) -> None:
        self._usage = usage
        self._most = most
        self._bytes = 0

    def add(self, count: int) -> None:
        """Count `count` more bytes.

        Raises RequestRefused (429) if the principal's limit is exceeded.
        """
        if self._most and self._usage.buffered + count > self._most:
            raise RequestRefused(
                429,
                "body",
                "The requests of this principal that are being read hold "
                f"{format_bytes(self._most)} together, its quota `body`: wait until some of them "
                "have been answered.",
                {"retry-after": "1", "connection": "close"},
            )
        self._usage.buffered += count
        self._bytes += count

    def release(self) -> None:
        """Subtract the bytes of the request from its principal's count: it is finished."""
        self._usage.buffered -= self._bytes
        self._bytes = 0


NUMBERED = b'data: {"jsonrpc":"2.0","id":'
"""Beginning of an event that is a JSON-RPC response, or a request to the client."""
MOST_FIELDS = 200
"""Bytes searched for it at the start of an event: other SSE fields may precede the data."""


class TrafficMeter:
    """Counts the bytes of a request and its response; cuts off a response that is not read.

    `at_end` is called when the last byte of the response was handed to the transport.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.received = 0
        self.sent = 0
        self.begun = False
        """True if the response has begun."""
        self.whole = False
        """True if the request body has arrived completely."""
        self.at_end: Callable[[], None] | None = None
        self._ended = False

    async def receive(self) -> Message:
        """Return the next ASGI message of the client."""
        message = await self._receive()
        self.received += len(message.get("body", b""))
        self.whole = self.whole or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the response. Raises OSError if the client does not read it in time."""
        if message["type"] == "http.response.body":
            if self._ended:
                return
            body = message.get("body", b"")
            self.sent += len(body)
            if self.at_end is not None and _is_answer(body):
                # send the end of the body with it: a client that closes with unread data resets
                message = {**message, "more_body": False}
            self._ended = not message.get("more_body", False)
            with anyio.move_on_after(WRITE_S) as waiting:
                await self._send(message)
            if waiting.cancelled_caught:
                raise ConnectionAbortedError("the client does not read its answer")
            if self._ended and self.at_end is not None:
                with Barrier("taking note of an answer's delivery"):
                    self.at_end()
            return
        self.begun = True
        await self._send(message)


def _is_answer(event: bytes) -> bool:
    """Return True for a JSON-RPC response: only the end of the stream follows it.

    A request, such as a question to a person, is numbered too, and its number is whole.
    """
    _, begins, rest = event[:MOST_FIELDS].partition(NUMBERED)
    return bool(begins) and not rest.lstrip(b"0123456789").startswith(b',"method"')


async def read_body(receive: Receive, declared: str, most: int, buffered: BufferedBytes) -> bytes:
    """Return the body of a call, of at most `most` bytes.

    `declared` is its Content-Length, or empty. Raises RequestRefused: 413 if it is too long, 408 if
    it is cut off or slow, and 429 from `buffered`.
    """
    if declared.isdecimal() and int(declared) > most:
        raise RequestRefused(413, "body", _too_long(most))
    parts: list[bytes] = []
    total = 0
    with anyio.move_on_after(BODY_S) as reading:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestRefused(408, "body", "The request ended before its body did.")
            part = message.get("body", b"")
            total += len(part)
            if total > most:
                raise RequestRefused(413, "body", _too_long(most))
            buffered.add(len(part))
            if part:
                parts.append(part)
            if not message.get("more_body", False):
                break
    if reading.cancelled_caught:
        raise RequestRefused(408, "body", f"The body did not arrive within {BODY_S:.0f} s.")
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def skip_body(headers: Iterable[tuple[bytes, bytes]], meter: TrafficMeter) -> None:
    """Read and discard the rest of a body, within limits.

    A client that still sends when the connection is closed would not receive the response.
    """
    if any(name == b"expect" for name, _ in headers):  # the client waits for 100 and sends nothing
        return
    most = meter.received + MOST_SKIPPED
    with anyio.move_on_after(SKIP_S):
        while not meter.whole and meter.received < most:
            await meter.receive()


def values_of(body: bytes) -> int:
    """Return an upper bound on the number of values in a JSON message, without parsing it.

    Characters inside strings are left out only if the bound would exceed `MOST_VALUES` with them.
    """
    found = _separators(body)
    if found <= MOST_VALUES:
        return found
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # only quotes that begin or end a string
    if (quotes := plain.count(b'"')) > 4 * MOST_VALUES:
        return quotes // 2
    return sum(map(_separators, plain.split(b'"')[::2]))


def _separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def installs(body: bytes) -> bool:
    """Return True if a JSON message calls the tool `install`; False if it is not valid JSON."""
    if b'"install"' not in body:
        return False
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(message, dict) or message.get("method") != "tools/call":
        return False
    params = message.get("params")
    return isinstance(params, dict) and params.get("name") == "install"


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields `body`, which was read before, then the messages after it."""
    given = False

    async def again() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _too_long(most: int) -> str:
    return (
        f"A message may have {most // KIB:,} KiB. Put files there with PUT "
        "/sessions/HANDLE/files/PATH, which takes any length, and read them from the code."
    )


TOO_MANY = (
    f"A message may have {MOST_VALUES:,} values. Put large data there with PUT "
    "/sessions/HANDLE/files/PATH, and read them from the code."
)
