"""The streams of the MCP SDK over the lines of one client."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCMessage

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.envelopes import Refusal, line_of, message_of, oversized, undone
from kernel_mcp.wire import Ends, Line, Wire

logger = logging.getLogger(__name__)

Requests: TypeAlias = MemoryObjectReceiveStream[SessionMessage | Exception]
Answers: TypeAlias = MemoryObjectSendStream[SessionMessage]


@asynccontextmanager
async def stdio_streams(
    wire: Wire,
    written: Callable[[JSONRPCMessage], None] = lambda _message: None,
    on_end: Callable[[], None] = lambda: None,
) -> AsyncIterator[tuple[Requests, Answers]]:
    """The SDK's read and write streams of a client.

    `written` is called with each message on the pipe, `on_end` at the end of input.
    """
    async with anyio.create_task_group() as tasks:
        to_server, requests = anyio.create_memory_object_stream[SessionMessage | Exception]()
        answers, to_client = anyio.create_memory_object_stream[SessionMessage]()
        tasks.start_soon(_take, wire, to_server, on_end)
        tasks.start_soon(_give, to_client, wire, written)
        yield requests, answers


async def _take(
    wire: Wire,
    to_server: MemoryObjectSendStream[SessionMessage | Exception],
    on_end: Callable[[], None],
) -> None:
    async with to_server:
        with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async for line in wire.lines():
                message = _message(line)
                del line
                if not isinstance(message, Refusal):
                    await to_server.send(SessionMessage(message))
                    continue
                logger.warning("a line of the client was refused: %s", message.reason)
                for answer in message.answers:
                    await wire.writer.write(answer)
        on_end()


def _message(line: Line) -> JSONRPCMessage | Refusal:
    if isinstance(line, Ends):
        return oversized(line.head, line.tail, line.most_bytes)
    with Barrier("reading a request") as barrier:
        return message_of(line)
    assert barrier.failure is not None
    return undone(line, reason_of(barrier.failure))


async def _give(
    to_client: MemoryObjectReceiveStream[SessionMessage],
    wire: Wire,
    written: Callable[[JSONRPCMessage], None],
) -> None:
    async with to_client:
        with contextlib.suppress(anyio.ClosedResourceError):
            async for said in to_client:
                line, message = line_of(said.message)
                if wire.greeting is not None and wire.greeting.takes(line):
                    continue
                await wire.writer.write(line)
                with Barrier("taking note of an answer's delivery"):
                    written(message)
