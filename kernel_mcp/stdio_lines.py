"""Read lines from stdin and write lines to stdout, on the event loop.

A thread blocked in read(2) cannot be cancelled and would hang the shutdown; here both ends are
non-blocking pipes.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeAlias

import anyio
from anyio import AsyncFile, open_file

from kernel_mcp.records import dataclass
from kernel_mcp.units import KIB, MIB

MAX_LINE_BYTES = 160 * MIB
"""Bytes of the longest request: three times the largest file, which arrives as one line with its
escapes. Of longer lines only the ends are kept."""
END_BYTES = 4096
"""Bytes that are kept at either end of such a line."""
READ_BYTES = 256 * KIB
EARLY_BYTES = 1 * MIB
"""Bytes of requests that are read before the server is ready. Behind more of them the end of input
is noticed later."""


@dataclass(frozen=True, slots=True)
class OversizedLine:
    """The first and last bytes of a line that has more than `most_bytes`."""

    head: bytes
    tail: bytes
    most_bytes: int


Line: TypeAlias = bytes | bytearray | OversizedLine


class LineReader:
    """The lines of a byte stream, each with its end.

    A line of more than `most_bytes` is yielded as an `OversizedLine`. `read` returns the bytes
    that have arrived, none at the end of the stream.
    """

    def __init__(
        self, read: Callable[[], Awaitable[bytes]], most_bytes: int = MAX_LINE_BYTES
    ) -> None:
        self._read = read
        self._most = most_bytes
        self._kept = bytearray()
        self._searched = 0

    def __aiter__(self) -> AsyncIterator[Line]:
        return self

    async def __anext__(self) -> Line:
        while (end := self._kept.find(b"\n", self._searched)) < 0:
            self._searched = len(self._kept)
            if self._searched > self._most:
                return await self._skip()
            piece = await self._read()
            if not piece:
                if not self._kept:
                    raise StopAsyncIteration
                return self._cut(len(self._kept))
            try:
                self._kept += piece
            except MemoryError:
                return await self._skip()
        return self._cut(end + 1)

    def _cut(self, end: int) -> bytearray:
        self._searched = 0
        if end == len(self._kept):
            line, self._kept = self._kept, bytearray()
        else:
            line = self._kept[:end]
            del self._kept[:end]
        return line

    async def _skip(self) -> OversizedLine:
        """Drop a line except for its first and last bytes."""
        head, tail = bytes(self._kept[:END_BYTES]), self._kept[-END_BYTES:]
        self._kept = bytearray()
        self._searched = 0
        while piece := await self._read():
            rest, found, after = piece.partition(b"\n")
            tail = (tail + rest)[-END_BYTES:]
            if found:
                self._kept += after
                break
        return OversizedLine(head, bytes(tail), self._most)


class Writer(Protocol):
    """Writes lines to the client."""

    async def write(self, text: str) -> None:
        """Write a line; return when the pipe has room for more."""


class _PipeWriter:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._turn = anyio.Lock(fast_acquire=True)

    async def write(self, text: str) -> None:
        self._writer.write(text.encode("utf-8", "replace") + b"\n")
        try:
            async with self._turn:
                await self._writer.drain()
        except ConnectionError as error:
            raise anyio.ClosedResourceError from error


class _FileWriter:
    def __init__(self, file: AsyncFile[bytes]) -> None:
        self._file = file
        self._turn = anyio.Lock(fast_acquire=True)

    async def write(self, text: str) -> None:
        async with self._turn:
            await self._file.write(text.encode("utf-8", "replace") + b"\n")
            await self._file.flush()


class _Listener(asyncio.streams.FlowControlMixin):
    """Protocol that reports when the reader of the output is gone."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        super().__init__()
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()


class StdioLines:
    """The client's lines and the writer of answers."""

    def __init__(self, lines: LineReader, writer: Writer, lost: anyio.Event | None = None) -> None:
        """`lost` is set when the reader of the output is gone."""
        self._lines = lines
        self._lost = lost or anyio.Event()
        self.writer = writer
        self._early: deque[Line] = deque()
        """Lines that arrived before `lines` was called."""
        self._size = 0
        self._lines_called = self._ended = False
        self._reading = True
        self._news = anyio.Event()

    async def read_early(self, on_end: Callable[[], None]) -> None:
        """Read lines until `lines` takes over. Run this as a task.

        `on_end` is called if the input ends before that: at once without a pending request, else
        when the reader of the output is gone.
        """
        async for line in self._lines:
            self._early.append(line)
            self._size += END_BYTES if isinstance(line, OversizedLine) else len(line)
            self._wake()
            if self._lines_called or self._size > EARLY_BYTES:
                break
        else:
            self._ended = True
        self._reading = False
        self._wake()
        if self._ended and any(map(_may_be_request, self._early)):
            await self._lost.wait()
        if self._ended and not self._lines_called:
            on_end()

    async def lines(self) -> AsyncGenerator[Line, None]:
        """Yield all lines of the client, from the first one on."""
        self._lines_called = True
        while self._early or self._reading:
            if self._early:
                yield self._early.popleft()
            else:
                await self._news.wait()
        if not self._ended:
            async for line in self._lines:
                yield line

    def _wake(self) -> None:
        """Wake `lines`, which waits for a line or the end of input."""
        self._news.set()
        self._news = anyio.Event()


def _may_be_request(line: Line) -> bool:
    """Return True if a line may be a request, which needs an answer."""
    return isinstance(line, OversizedLine) or b'"id"' in line


@asynccontextmanager
async def stdio_lines() -> AsyncIterator[StdioLines]:
    """Yield the wire over this process's stdin and stdout.

    Meanwhile descriptor 0 is /dev/null and 1 is stderr: child processes cannot touch the protocol.
    """
    wire_in = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    wire_out = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    lost = anyio.Event()
    async with _reading(wire_in) as (lines, hang_up):

        def on_lost() -> None:
            lost.set()
            hang_up()

        async with _writing(wire_out, on_lost=on_lost) as writer:
            yield StdioLines(lines, writer, lost)


@asynccontextmanager
async def _reading(fd: int) -> AsyncIterator[tuple[LineReader, Callable[[], None]]]:
    """Yield the lines of a descriptor, and a callback that ends them early."""
    if not _pollable(fd):
        async with await open_file(fd, "rb") as file:
            yield LineReader(partial(file.read, READ_BYTES)), lambda: None  # a file ends by itself
        return
    reader = asyncio.StreamReader(limit=READ_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        yield LineReader(partial(reader.read, READ_BYTES)), transport.close
    finally:
        transport.close()


@asynccontextmanager
async def _writing(fd: int, *, on_lost: Callable[[], None]) -> AsyncIterator[Writer]:
    if not _pollable(fd):
        async with await open_file(fd, "wb") as file:
            yield _FileWriter(file)
        return
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: _Listener(on_lost), os.fdopen(fd, "wb", buffering=0)
    )
    transport.set_write_buffer_limits(0)  # what has drained is on the pipe
    try:
        yield _PipeWriter(asyncio.StreamWriter(transport, protocol, None, loop))
    finally:
        transport.close()


def _pollable(fd: int) -> bool:
    """Return True if epoll supports a descriptor, unlike files and /dev/null, which never block."""
    with select.epoll() as poll:
        try:
            poll.register(fd)
        except PermissionError:
            return False
    return True
