"""Bodies of calls: read whole before anything looks at them, within bounds of size and time.

And what is sent back, as far as the gate has to know of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Protocol

import anyio
from starlette.types import Message, Receive, Send

from kernel_mcp.barriers import Barrier
from kernel_mcp.config.values import KIB, MIB, format_bytes
from kernel_mcp.http.refusals import Refused

MOST_BODY = 4 * MIB
"""Bytes of one MCP message: what is parsed at once keeps all others waiting, 20 ms a MiB."""
MOST_VALUES = 10_000
"""Items of lists and objects in one MCP message: a million take seconds to read, not 80 ms."""
BODY_S = 60.0
"""Seconds for the whole body of a call."""
MOST_SKIPPED = 16 * MIB
SKIP_S = 5.0
"""Bytes and seconds of a body that are still taken when its request has been refused."""
WRITE_S = 60.0
"""Seconds until a reader has taken the next piece of an answer."""


class Holder(Protocol):
    """Who bytes are held for; `held` is how many."""

    held: int


class Held:
    """The bytes of one request in memory, as part of what its principal may have there."""

    def __init__(self, usage: Holder, most: int) -> None:
        self._usage = usage
        self._most = most
        self._bytes = 0

    def take(self, count: int) -> None:
        """Hold so many more. Raises Refused."""
        if self._most and self._usage.held + count > self._most:
            raise Refused(
                429,
                "body",
                "The requests of this principal that are being read hold "
                f"{format_bytes(self._most)} together, its quota `body`: wait until some of them "
                "have been answered.",
                {"retry-after": "1", "connection": "close"},
            )
        self._usage.held += count
        self._bytes += count

    def release(self) -> None:
        """Hold none."""
        self._usage.held -= self._bytes
        self._bytes = 0


_ANSWER = b'data: {"jsonrpc":"2.0","id":'
"""How an event begins that is an answer: nothing follows it but the end of the stream."""
MOST_FIELDS = 200
"""Bytes of other fields before the data of an event."""


class Meter:
    """Counts the bytes of a request and its answer; an answer that nobody reads is cut off."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.received = 0
        self.sent = 0
        self.begun = False
        """Whether the answer has."""
        self.whole = False
        """Whether no more of the body comes."""
        self.at_end: Callable[[], None] | None = None
        self._ended = False

    async def receive(self) -> Message:
        """The next message of the client."""
        message = await self._receive()
        self.received += len(message.get("body", b""))
        self.whole = self.whole or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Pass on a message of the answer. Raises OSError when its reader does not take it."""
        if message["type"] == "http.response.body":
            if self._ended:
                return
            body = message.get("body", b"")
            self.sent += len(body)
            if self.at_end is not None and _ANSWER in body[:MOST_FIELDS]:
                # in one piece with its end: who has read it leaves nothing unread, which is a reset
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


async def read_body(receive: Receive, declared: str, most: int, held: Held) -> bytes:
    """The body of a call. Raises Refused."""
    if declared.isdecimal() and int(declared) > most:
        raise Refused(413, "body", _too_long(most))
    parts: list[bytes] = []
    total = 0
    with anyio.move_on_after(BODY_S) as reading:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(408, "body", "The request ended before its body did.")
            part = message.get("body", b"")
            total += len(part)
            if total > most:
                raise Refused(413, "body", _too_long(most))
            held.take(len(part))
            if part:
                parts.append(part)
            if not message.get("more_body", False):
                break
    if reading.cancelled_caught:
        raise Refused(408, "body", f"The body did not arrive within {BODY_S:.0f} s.")
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def skip_body(headers: Iterable[tuple[bytes, bytes]], meter: Meter) -> None:
    """Take what is left of a body: who still sends when a connection is closed hears no answer."""
    if any(name == b"expect" for name, _ in headers):  # who asks first sends nothing
        return
    most = meter.received + MOST_SKIPPED
    with anyio.move_on_after(SKIP_S):
        while not meter.whole and meter.received < most:
            await meter.receive()


def values_of(body: bytes) -> int:
    """How many values a message has at most, without reading it as JSON.

    Exact only where there are more than `MOST_VALUES`: texts, which may hold anything, do not
    count.
    """
    found = _separators(body)
    if found <= MOST_VALUES:
        return found
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # only quotes that begin or end a text
    if (quotes := plain.count(b'"')) > 4 * MOST_VALUES:
        return quotes // 2
    return sum(map(_separators, plain.split(b'"')[::2]))


def _separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def installs(body: bytes) -> bool:
    """Whether a message calls the tool `install`."""
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
    """Hands a body out that was read before, then what comes after it."""
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
