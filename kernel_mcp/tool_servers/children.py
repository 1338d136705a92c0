"""The MCP servers behind the gateway, each with a client of its own.

One task enters and leaves the context of a client. The calls run in other tasks and only send
requests, so no cancelled call reaches the scopes of the context.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as types
from mcp.client import Client
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from kernel_mcp.barriers import reason_of
from kernel_mcp.config.tool_servers import ToolServer
from kernel_mcp.output.text import Masks
from kernel_mcp.tool_servers.frames import BLOB_BYTES, HEADER_BYTES, Frame
from kernel_mcp.tool_servers.policy import Rate
from kernel_mcp.tool_servers.programs import StderrEnd, program
from kernel_mcp.units import KIB, MIB

START_S = 60.0
"""Seconds for a server to start and to list its tools: `npx` and `uvx` download first."""
LIST_S = 60.0
"""Seconds for which a list of tools is used."""
MOST_TOOLS = 1000
DESCRIPTION_CHARS = 4000
SCHEMA_BYTES = 64 * KIB
STRUCTURED_BYTES = MIB
"""Structured results from this size on are sent as a blob."""
REFRESH_S = 2.0
"""Seconds for a server to list its tools again; then those that are known are used on."""
TEXT_BYTES = HEADER_BYTES - MIB
"""Upper bound of the texts of a result, which lie in the header of a frame."""
_CLOSED = types.CONNECTION_CLOSED, "Connection closed"
"""Code and message of the SDK's client where a connection has ended; servers use the code, too."""

logger = logging.getLogger(__name__)


class CallError(Exception):
    """A call that has no result. `kind` is tool, refused, unavailable or timeout."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


class Child:
    """One MCP server: started at the first use, and again at the next use after its end."""

    def __init__(self, server: ToolServer, tell: Callable[[str], None]) -> None:
        """`tell` takes what the program wrote to its stderr before it ended, for the operator."""
        self.server = server
        self._tell = tell
        self._masks = Masks(server.secrets)
        self.rate = Rate(server.rate, server.per_s)
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[ClientSession] | None = None
        self._stop = asyncio.Event()
        self._stderr = StderrEnd()
        self._tools: list[dict[str, Any]] = []
        self._listed = -LIST_S

    async def tools(self) -> list[dict[str, Any]]:
        """Return its tools as JSON, with bounded descriptions and schemas. Raises CallError."""
        if self._ready is not None and time.monotonic() - self._listed < LIST_S:
            return self._tools
        session = await self._session()
        known = self._tools if self._listed >= 0 else []
        try:
            with self._failures(), anyio.fail_after(REFRESH_S if known else START_S):
                self._tools = await _listed(session)
        except CallError as error:
            if error.kind != "timeout" or not known:
                raise
        self._listed = time.monotonic()
        return self._tools

    async def call(self, tool: str, arguments: dict[str, Any], progress: ProgressFnT) -> Frame:
        """Call a tool and return the frame of its result. Raises CallError."""
        session = await self._session()
        params = types.CallToolRequestParams(name=tool, arguments=arguments)
        request = types.CallToolRequest(params=params)
        try:  # what cannot be sent would end the connection, and so the calls of others
            request.model_dump_json(by_alias=True).encode()
        except (ValueError, RecursionError) as error:
            text = f"the arguments cannot be sent: {error}"
            raise CallError("tool", text[:DESCRIPTION_CHARS]) from None
        with self._failures():
            result = await session.send_request(  # `call_tool` would validate hostile schemas
                request, types.CallToolResult, progress_callback=progress
            )
        if result.is_error:
            text = "\n".join(_texts(result))[:DESCRIPTION_CHARS]
            raise CallError("tool", text or "the tool failed, and says no more")
        return _frame(result.content, result.structured_content)

    async def read(self, uri: str) -> Frame:
        """Read a resource and return the frame of its content. Raises CallError."""
        session = await self._session()
        with self._failures():
            return _frame((await session.read_resource(uri)).contents, None)

    async def aclose(self) -> None:
        """End the server."""
        self._stop.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _session(self) -> ClientSession:
        """Return a session with the server, which is started unless it runs. Raises CallError."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._stop, self._listed, self._stderr = asyncio.Event(), -LIST_S, StderrEnd()
            self._task = asyncio.create_task(self._run(self._ready, self._stop))
        ready = self._ready
        await asyncio.wait([ready], timeout=START_S)
        if not ready.done():
            self._end()
            raise self._unavailable(f"it did not start within {START_S:g} s")
        if (failure := ready.exception()) is not None:
            raise self._unavailable(f"it cannot be started: {failure}")
        return ready.result()

    async def _run(self, ready: asyncio.Future[ClientSession], stop: asyncio.Event) -> None:
        """Keep the client's context open until the end; catch all that it raises."""
        try:
            async with Client(self._transport(), cache=None) as client:
                ready.set_result(client.session)
                await stop.wait()
        except Exception as error:  # noqa: BLE001  # of a foreign server, for its callers
            if not ready.done():
                ready.set_exception(OSError(_innermost(error)))
                ready.exception()
        finally:
            if not ready.done():
                ready.cancel()
            if self._ready is ready:
                self._ready = None

    def _transport(self) -> Any:
        return program(self.server, self._stderr) if self.server.command else self._address()

    @asynccontextmanager
    async def _address(self) -> AsyncIterator[Any]:
        async with (
            create_mcp_http_client(headers=dict(self.server.headers)) as http,
            streamable_http_client(
                self.server.url, http_client=http, max_sse_event_size=BLOB_BYTES
            ) as streams,
        ):
            yield streams

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn what a request raises into a CallError; forget a server that has ended."""
        try:
            yield
        except MCPError as error:
            if (error.error.code, error.error.message) == _CLOSED:
                self._end()
                raise self._unavailable("it has ended") from None
            late = error.error.code == types.REQUEST_TIMEOUT
            text = self._masks.masked(str(error)[:DESCRIPTION_CHARS])
            raise CallError("timeout" if late else "tool", text) from None
        except ValidationError as error:
            text = f"the answer of {self.server.name} is not valid: {error}"
            raise CallError("tool", text[:DESCRIPTION_CHARS]) from None
        except TimeoutError:
            text = f"the tool server {self.server.name} did not answer in time"
            raise CallError("timeout", text) from None
        except Exception as error:  # noqa: BLE001  # a closed stream, or a failure of the client
            self._end()
            raise self._unavailable(_innermost(error)) from None

    def _end(self) -> None:
        """End the server; the next use starts it again."""
        self._ready = None
        self._stop.set()

    def _unavailable(self, why: str) -> CallError:
        """Return the error of a server that has ended. Only the operator reads its stderr.

        A program may write there what code must not see, such as its credentials.
        """
        why = self._masks.masked(why)
        if wrote := self._masks.masked(self._stderr.text):
            self._tell(f"{why}. It wrote: {wrote}")
            why += "; what it wrote is in the log of kernel-mcp, for its operator"
        text = f"the tool server {self.server.name} is not available: {why}"
        return CallError("unavailable", text)


async def _listed(session: ClientSession) -> list[dict[str, Any]]:
    """Return the tools of a server as JSON, in the order of its pages."""
    found: list[dict[str, Any]] = []
    cursor: str | None = None
    for _ in range(MOST_TOOLS):  # pages may be empty, and go on for ever
        page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
        found += [_bounded(each) for each in page.tools]
        cursor = page.next_cursor
        if not cursor or len(found) >= MOST_TOOLS:
            break
    return found[:MOST_TOOLS]


def _innermost(error: BaseException) -> str:
    """Return the reason of an error, the first one of a group."""
    while inner := getattr(error, "exceptions", ()):
        error = inner[0]
    return reason_of(error) if isinstance(error, Exception) else repr(error)


def _bounded(tool: types.Tool) -> dict[str, Any]:
    row = tool.model_dump(mode="json", by_alias=True, exclude_none=True)
    kept = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")
    row = {name: row[name] for name in kept if name in row}
    for name in ("title", "description"):
        row[name] = str(row.get(name, ""))[:DESCRIPTION_CHARS]
    for name in ("inputSchema", "outputSchema"):
        if name in row and len(json.dumps(row[name])) > SCHEMA_BYTES:
            row[name] = {"type": "object"}
            row["description"] += f" [its {name} has more than {SCHEMA_BYTES // KIB} KiB: left out]"
    return row


def _texts(result: types.CallToolResult) -> list[str]:
    return [each.text for each in result.content if isinstance(each, types.TextContent)]


def _frame(content: Any, structured: Any) -> Frame:
    """Return the frame of a result: binary data and long structured values are blobs.

    Raises CallError if it is too large.
    """
    blobs: list[bytes] = []
    items = [_item(each, blobs) for each in content]
    header: dict[str, Any] = {"result": {"content": items}}
    if structured is not None:
        encoded = json.dumps(structured).encode()
        if len(encoded) < STRUCTURED_BYTES:
            header["result"]["structured"] = structured
        else:
            header["structured_blob"] = len(blobs)
            blobs.append(encoded)
            texts = [each for each in items if each.get("type") == "text"]
            header["result"]["content"] = [each for each in items if each not in texts]
    texts_bytes = len(json.dumps(header))
    for size, most in ((sum(map(len, blobs)), BLOB_BYTES), (texts_bytes, TEXT_BYTES)):
        if size > most:
            raise CallError("tool", f"the result has {size:,} bytes, of at most {most:,}")
    return Frame(header, blobs)


def _item(each: Any, blobs: list[bytes]) -> Mapping[str, Any]:
    row: dict[str, Any] = each.model_dump(mode="json", by_alias=True, exclude_none=True)
    inner = row["resource"] if row.get("type") == "resource" else row
    key = "blob" if "blob" in inner else "data"
    if isinstance(inner.get(key), str):
        try:
            blobs.append(base64.b64decode(inner[key]))
        except (binascii.Error, ValueError):
            raise CallError("tool", "the result has binary data that is not base64") from None
        inner[key] = {"blob": len(blobs) - 1}
    return row
