"""A program that speaks MCP on its stdin and stdout, as a transport of the SDK's client.

The SDK's own transport copies what it has of a line with each 64 KiB of it: a result of 10 MB took
6 s, for which no other session was served. This one takes time in proportion to the length.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage

from kernel_mcp.config.tool_servers import ToolServer
from kernel_mcp.linux.process import tie_to_server
from kernel_mcp.units import KIB, MIB

LINE_BYTES = 160 * MIB
"""Longest message of a program: structured results are in it twice, with escapes."""
READ_BYTES = 256 * KIB
STDERR_BYTES = 2 * KIB
LAST_S = 1.0
"""Seconds after the end of a program in which its last lines are read."""
END_S = 2.0
"""Seconds for a program to end once its stdin is closed, and again once it is asked to."""
_UNLIMITED = 'ulimit -S -v unlimited; exec "$@"'
"""The gateway's limit of memory is not that of its programs."""
_PASSED_ON = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")


class StderrEnd:
    """The end of what a program writes to its stderr, for errors."""

    def __init__(self) -> None:
        self._bytes = b""

    @property
    def text(self) -> str:
        """The last bytes as text."""
        return self._bytes.decode("utf-8", "replace").strip()

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read until the end of the stream."""
        while data := await stream.read(READ_BYTES):
            self._bytes = (self._bytes + data)[-STDERR_BYTES:]


@asynccontextmanager
async def program(server: ToolServer, stderr: StderrEnd) -> AsyncIterator[TransportStreams]:
    """Start the program of a server, and end it with the block. Raises OSError."""
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    words = ["/bin/sh", "-c", _UNLIMITED, "sh", *tie_to_server(), server.command, *server.args]
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=READ_BYTES,
        env={**passed, **server.env},
        cwd=server.cwd or None,
        start_new_session=True,
    )
    into, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    sent, out = anyio.create_memory_object_stream[SessionMessage](0)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    ended = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch, process.pid, ended)
        tasks.start_soon(_read_until, ended, process.stdout, into)
        tasks.start_soon(_write, out, process.stdin, into)
        tasks.start_soon(stderr.read, process.stderr)
        try:
            yield received, sent
        finally:
            with anyio.CancelScope(shield=True):
                received.close()
                sent.close()
                await _end(process, ended)
            # its pipes end now, unless others hold them
            tasks.cancel_scope.deadline = anyio.current_time() + END_S


async def _watch(pid: int, ended: anyio.Event) -> None:
    """Set `ended` at the end of a program, even if others hold its stdout open."""
    with suppress(ProcessLookupError):  # it has been reaped
        fd = os.pidfd_open(pid)
        try:
            with anyio.CancelScope(shield=True):  # `_end` sees to its end
                await anyio.wait_readable(fd)
        finally:
            os.close(fd)
    ended.set()


async def _read_until(
    ended: anyio.Event,
    stdout: asyncio.StreamReader,
    into: MemoryObjectSendStream[SessionMessage | Exception],
) -> None:
    """Pass on lines until the end of stdout, or `LAST_S` after that of the program."""
    async with into, anyio.create_task_group() as tasks:

        async def read() -> None:
            await _read(stdout, into)
            tasks.cancel_scope.cancel()

        tasks.start_soon(read)
        await ended.wait()
        await anyio.sleep(LAST_S)
        tasks.cancel_scope.cancel()


async def _read(
    stdout: asyncio.StreamReader, into: MemoryObjectSendStream[SessionMessage | Exception]
) -> None:
    """Pass on each line as a message, until the end or a line that cannot be answered.

    Read on when nobody takes messages any more, so that the program can end.
    """
    parts: list[bytes] = []
    held = 0
    while data := await stdout.read(READ_BYTES):
        first, *others = data.split(b"\n")
        parts.append(first)
        held += len(first)
        for each in others:
            message = _message(b"".join(parts))
            if message is None:
                return
            with suppress(anyio.BrokenResourceError):
                await into.send(message)
            parts, held = [each], len(each)
        if held > LINE_BYTES:
            return


def _message(line: bytes) -> SessionMessage | Exception | None:
    """Return the message in a line, and an exception for a line that is none, such as of a log.

    An answer that is not valid becomes an error, so that its call ends. Return None for one whose
    call is not known.
    """
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as reason:
        error = reason
    if b'"jsonrpc"' not in line:
        return error
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    number = row.get("id") if isinstance(row, dict) else None
    if "method" in row or not isinstance(number, (int, str)):
        return error
    data = types.ErrorData(code=types.INTERNAL_ERROR, message="its answer is not valid")
    return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=number, error=data))


async def _write(
    out: MemoryObjectReceiveStream[SessionMessage],
    stdin: asyncio.StreamWriter,
    into: MemoryObjectSendStream[SessionMessage | Exception],
) -> None:
    """Write each message as a line. Close `into` if the program takes none, as it has ended."""
    async with out:
        async for each in out:
            text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                stdin.write(text.encode() + b"\n")
                await stdin.drain()
            except OSError:
                into.close()
                return


async def _end(process: asyncio.subprocess.Process, ended: anyio.Event) -> None:
    """Close the stdin of a program, then ask it to end, then kill it and its process group."""
    assert process.stdin is not None
    process.stdin.close()
    with anyio.move_on_after(END_S) as late:
        await ended.wait()
    if late.cancelled_caught:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with anyio.move_on_after(END_S):
            await ended.wait()
    with suppress(ProcessLookupError):  # also what it has started, as that holds its stdout
        os.killpg(process.pid, signal.SIGKILL)
    await ended.wait()
    with anyio.move_on_after(
        END_S
    ):  # in some versions of Python others that hold its pipes delay it
        await process.wait()
