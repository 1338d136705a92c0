"""MCP over stdin and stdout, on the event loop instead of on threads.

A thread that blocks in a read cannot be cancelled, which is why a server that reads that way
hangs when it is told to stop; here both ends are non-blocking pipes.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from anyio import AsyncFile
from mcp.server.stdio import stdio_server

MAX_LINE_BYTES = 256 * 1024 * 1024
"""Longest request; file uploads arrive as one line."""


class _Lines:
    """The lines of a byte stream as text; stands in for an async text file that is only read."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        line = await self._reader.readline()
        if not line:
            raise StopAsyncIteration
        return line.decode("utf-8", "replace")


class _Writer:
    """An async text file that is only written."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def write(self, text: str) -> None:
        self._writer.write(text.encode("utf-8", "surrogatepass"))

    async def flush(self) -> None:
        await self._writer.drain()


@asynccontextmanager
async def stdio_streams() -> AsyncIterator[tuple[Any, Any]]:
    """The SDK's read and write streams of this process.

    Meanwhile descriptor 0 is the null device and 1 is stderr, so that nothing else in the process
    or its children can read from or write into the protocol.
    """
    loop = asyncio.get_running_loop()
    wire_in = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    wire_out = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    in_transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(wire_in, "rb", buffering=0)
    )
    out_transport, out_protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(wire_out, "wb", buffering=0)
    )
    writer = asyncio.StreamWriter(out_transport, out_protocol, None, loop)
    try:
        async with stdio_server(
            cast(AsyncFile[str], _Lines(reader)), cast(AsyncFile[str], _Writer(writer))
        ) as streams:
            yield streams
    finally:
        in_transport.close()
        out_transport.close()
