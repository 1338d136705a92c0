"""Streams of the MCP SDK over stdin and stdout of one client."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCMessage

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.envelopes import MalformedLine, line_of, message_of, oversized, unprocessed
from kernel_mcp.stdio_lines import Line, OversizedLine, StdioLines

logger = logging.getLogger(__name__)


class Requests(ObjectReceiveStream[SessionMessage | Exception]):
    """Stream of the client's messages, read on demand. Refused lines are answered here."""

    def __init__(self, wire: StdioLines, on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called once, at the end of input."""
        self._lines = wire.lines()
        self._writer = wire.writer
        self._on_end = on_end
        self._ended = False

    async def receive(self) -> SessionMessage:
        """Return the next message. Raises EndOfStream."""
        while (line := await self._next()) is not None:
            message = _message(line)
            del line
            if not isinstance(message, MalformedLine):
                return SessionMessage(message)
            logger.warning("a line of the client was refused: %s", message.reason)
            try:
                for answer in message.answers:
                    await self._writer.write(answer)
            except anyio.ClosedResourceError:
                break
        if not self._ended:
            self._ended = True
            self._on_end()
        raise anyio.EndOfStream

    async def aclose(self) -> None:
        """Stop reading."""
        await self._lines.aclose()

    async def _next(self) -> Line | None:
        return None if self._ended else await anext(self._lines, None)


class Answers(ObjectSendStream[SessionMessage]):
    """Sink of the SDK's messages, in order: when `send` returns, the message is on the pipe."""

    def __init__(
        self, wire: StdioLines, written: Callable[[JSONRPCMessage], None] = lambda _message: None
    ) -> None:
        """`written` is called with each message once it is on the pipe."""
        self._wire = wire
        self._written = written
        self._turn = anyio.Lock(fast_acquire=True)
        self._closed = False

    async def send(self, item: SessionMessage) -> None:
        """Write a message after those before it. Raises ClosedResourceError."""
        async with self._turn:
            if self._closed:
                raise anyio.ClosedResourceError
            line, message = line_of(item.message)
            await self._wire.writer.write(line)
            with Barrier("taking note of an answer's delivery"):
                self._written(message)

    async def aclose(self) -> None:
        """Refuse further messages."""
        self._closed = True


def _message(line: Line) -> JSONRPCMessage | MalformedLine:
    if isinstance(line, OversizedLine):
        return oversized(line.head, line.tail, line.most_bytes)
    with Barrier("reading a request") as barrier:
        return message_of(line)
    assert barrier.failure is not None
    return unprocessed(line, reason_of(barrier.failure))
