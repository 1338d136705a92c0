"""A program that speaks MCP on its stdin and stdout, as a transport of the SDK's client.

The SDK's own transport copies what it has of a line with each 64 KiB of it: a result of 10 MB took
6 s, for which no other session was served. This one takes time in proportion to the length.
"""

from __future__ import annotations

import asyncio
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
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, process.stdout, into)
        tasks.start_soon(_write, out, process.stdin, into)
        tasks.start_soon(stderr.read, process.stderr)
        try:
            yield received, sent
        finally:
            with anyio.CancelScope(shield=True):
                received.close()
                sent.close()
                await _end(process)
            tasks.cancel_scope.cancel()


async def _read(
    stdout: asyncio.StreamReader, into: MemoryObjectSendStream[SessionMessage | Exception]
) -> None:
    """Pass on each line as a message, and close `into` at the end, or with a line that is too long.

    Read on when nobody takes messages any more, so that the program can end.
    """
    parts: list[bytes] = []
    held = 0
    async with into:
        while data := await stdout.read(READ_BYTES):
            first, *others = data.split(b"\n")
            parts.append(first)
            held += len(first)
            for each in others:
                with suppress(anyio.BrokenResourceError):
                    await into.send(_message(b"".join(parts)))
                parts, held = [each], len(each)
            if held > LINE_BYTES:
                return


def _message(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


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


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the stdin of a program, then ask its process group to end, then kill that."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with anyio.move_on_after(END_S):
            await process.wait()
            break
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    await process.wait()
