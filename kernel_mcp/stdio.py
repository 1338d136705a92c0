"""MCP over stdin and stdout, on the event loop instead of on threads.

A thread that blocks in a read cannot be cancelled, which is why a server that reads that way
hangs when it is told to stop; here both ends are non-blocking pipes.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
from anyio import AsyncFile, open_file
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
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise anyio.ClosedResourceError from error


class _Listener(asyncio.streams.FlowControlMixin):
    """Notices that nobody reads the output any more."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        super().__init__()
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()


@asynccontextmanager
async def stdio_streams() -> AsyncIterator[tuple[Any, Any]]:
    """The SDK's read and write streams of this process.

    Meanwhile descriptor 0 is the null device and 1 is stderr, so that nothing else in the process
    or its children can read from or write into the protocol.
    """
    wire_in = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    wire_out = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    async with (
        _reading(wire_in) as (lines, hang_up),
        _writing(wire_out, on_lost=hang_up) as writer,
        stdio_server(cast(AsyncFile[str], lines), cast(AsyncFile[str], writer)) as streams,
    ):
        yield streams


@asynccontextmanager
async def _reading(fd: int) -> AsyncIterator[tuple[_Lines | AsyncFile[str], Callable[[], None]]]:
    """The requests, and what ends them before their end."""
    if not _pollable(fd):
        async with await open_file(fd, encoding="utf-8", errors="replace") as file:
            yield file, lambda: None  # a file comes to its end by itself
        return
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        yield _Lines(reader), transport.close
    finally:
        transport.close()


@asynccontextmanager
async def _writing(
    fd: int, *, on_lost: Callable[[], None]
) -> AsyncIterator[_Writer | AsyncFile[str]]:
    if not _pollable(fd):
        async with await open_file(fd, "w", encoding="utf-8") as file:
            yield file
        return
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: _Listener(on_lost), os.fdopen(fd, "wb", buffering=0)
    )
    try:
        yield _Writer(asyncio.StreamWriter(transport, protocol, None, loop))
    finally:
        transport.close()


def _pollable(fd: int) -> bool:
    """Whether the event loop can wait for it; files and the null device never block instead."""
    with select.epoll() as poll:
        try:
            poll.register(fd)
        except PermissionError:
            return False
    return True
