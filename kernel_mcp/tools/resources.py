"""The MCP server over `SessionCalls`, with files, outputs of cells and notebooks as resources."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import anyio
from mcp.server import MCPServer
from mcp.server.caching import CacheableMethod, CacheHint
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.server.mcpserver.prompts import Prompt
from mcp_types import (
    CallToolResult,
    InputRequiredResult,
    Resource,
    ResourceTemplate,
)
from mcp_types import Tool as Definition

from kernel_mcp.barriers import explained, log_failure
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import InputError, SessionNotFound
from kernel_mcp.output.bundles import is_binary
from kernel_mcp.output.render import mime_types, text_by_stream
from kernel_mcp.output.text import escaped
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.history import History
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.notebook_export import NOTEBOOK_MIME, RESOURCE_BYTES, notebook
from kernel_mcp.sessions.notifications import ResponseContext
from kernel_mcp.telemetry.origin import Origin
from kernel_mcp.telemetry.spans import OriginContext
from kernel_mcp.tools.calls import OF_VIEW, Call
from kernel_mcp.tools.elicitation import Elicitation
from kernel_mcp.tools.stopping import StoppableCalls

MAX_TEXT_CHARS = 8_000_000
"""Longest output sent as one resource; `read_file` reads longer ones in pages."""

LISTS: tuple[CacheableMethod, ...] = (
    "tools/list",
    "resources/list",
    "resources/templates/list",
)
"""Methods whose results stay the same until the server ends."""
LISTED_MS = 3600 * 1000
"""Milliseconds for which clients may keep these results."""
PROMPTS = ("prompts/list", "prompts/get")

_URI = re.compile(
    r"kernel://(?P<session>[^/]+)/"
    r"(?:files/(?P<path>.+)|cells/(?P<cell>\d{1,9})(?:/outputs/(?P<output>[\w.]+)|(?P<record>\.json))?"
    r"|(?P<notebook>notebook))"
)

TEMPLATES = {
    "kernel://{session}/files/{+path}": ("file", "A file of the session's workspace"),
    "kernel://{session}/cells/{n}": ("cell", "The whole text output of a cell"),
    "kernel://{session}/cells/{n}.json": ("outcome", "How a cell ended, with stdout and stderr"),
    "kernel://{session}/cells/{n}/outputs/{k}": ("output", "One display of a cell, as it was made"),
    "kernel://{session}/notebook": ("notebook", "All cells with their outputs, as .ipynb"),
}


@dataclass(frozen=True, slots=True)
class Page:
    """A resource that belongs to no session, such as the view of a tool."""

    mime: str
    content: Callable[[], Awaitable[str]]
    name: str
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """The content at an address: `text` in pieces, which are read from files one by one, or `data`.

    `text` is None for bytes. With `pages` it may be of any length.
    """

    mime: str
    text: Iterable[str] | None = None
    data: bytes = b""
    pages: bool = False

    @classmethod
    def of(cls, content: str | bytes, mime: str) -> Document:
        """Return a document of content that is in memory."""
        return cls(mime, [content]) if isinstance(content, str) else cls(mime, data=content)


class Documents:
    """Finds documents by their addresses; without `files` only those of cells."""

    def __init__(self, manager: SessionManager, *, files: bool) -> None:
        self._files = files
        self._more = "; read_file reads on in pages" if files else ""
        self._manager = manager
        self._one_notebook = anyio.CapacityLimiter(1)

    async def find(self, caller: Caller, uri: str) -> Document:
        """Return the document at `uri`. Raises KernelMcpError, InputError where there is none."""
        match = _URI.fullmatch(uri)
        if match is None or not (self._files or match["cell"]):
            there = ", ".join(templates(files=self._files))
            raise InputError(f"{uri!r} is not a resource of this server. There are: {there}.")
        if match["path"]:
            session, path = await self._manager.resolve(caller, match["session"]), match["path"]
            read = session.workspace.read_resource
            found = await anyio.to_thread.run_sync(read, unquote(path))
            with OriginContext(Origin(caller.request, "", caller.principal, peer=caller.peer)):
                session.events.read(unquote(path))
            return Document.of(*found)
        handle, cells = await self._manager.cells_of(caller, match["session"])
        if match["notebook"]:
            write = partial(
                notebook,
                cells,
                RESOURCE_BYTES,
                undone=cells.undone,
                metadata=cells.notebook,
                session=handle,
            )
            book = await anyio.to_thread.run_sync(write, limiter=self._one_notebook)
            return Document(NOTEBOOK_MIME, [book.decode()])
        cell = cell_of(cells, int(match["cell"]))
        if match["record"]:
            record = await anyio.to_thread.run_sync(cell_record, handle, cell)
            return Document("application/json", [json.dumps(record, indent=1)])
        if match["output"]:
            return Document.of(*await anyio.to_thread.run_sync(_output, cell, match["output"]))
        return Document("text/plain", cell.log.text(), pages=True)

    async def read(self, caller: Caller, uri: str) -> tuple[str | bytes, str]:
        """Return the content at `uri` and its MIME type. Raises as `find`.

        A text of any length is cut after `MAX_TEXT_CHARS`.
        """
        document = await self.find(caller, uri)
        if document.text is None:
            return document.data, document.mime
        if document.pages:
            return await anyio.to_thread.run_sync(_joined, document.text, self._more), document.mime
        return "".join(document.text), document.mime


def templates(*, files: bool) -> dict[str, tuple[str, str]]:
    """Return URI templates with name and description; without `files` only those of cells."""
    return {uri: words for uri, words in TEMPLATES.items() if files or "/cells/" in uri}


def is_own(uri: str) -> bool:
    """Return True if the address is that of a JSON document that the server itself writes."""
    match = _URI.fullmatch(uri)
    return match is not None and bool(match["record"] or match["notebook"])


def file_of(uri: str) -> tuple[str, str] | None:
    """Return the session and the path in the address of a file; None for other addresses."""
    match = _URI.fullmatch(uri)
    return (match["session"], unquote(match["path"])) if match and match["path"] else None


def session_of(uri: str) -> str:
    """Return the handle or name of the session in an address; empty for a malformed one."""
    match = _URI.fullmatch(uri)
    return match["session"] if match else ""


class ResourceServer(MCPServer[Any]):
    """An MCP server whose tools and resources are those of `calls`.

    Each resource has its own MIME type.
    """

    def __init__(
        self,
        *args: Any,
        calls: StoppableCalls,
        elicitation: Elicitation,
        caller: Callable[[Context[Any, Any]], Caller],
        files: bool = True,
        pages: Mapping[str, Page] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        """`caller` returns the caller of a request. Without `files` cells are the only resources.

        `pages` are further resources by their addresses.
        """
        self._pages = pages
        hints = dict.fromkeys(LISTS, CacheHint(ttl_ms=LISTED_MS))
        super().__init__(*args, cache_hints=hints, **kwargs)
        handlers = self._lowlevel_server._request_handlers
        self._of_prompts = {name: handlers.pop(name) for name in PROMPTS}
        self._calls = calls
        self._elicitation = elicitation
        self._caller = caller
        self._templates = templates(files=files)

    async def list_tools(self) -> list[Definition]:
        """Return the definitions of all tools."""
        return [*await self._calls.definitions(), *await super().list_tools()]

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool, and return its answer."""
        assert context is not None  # the SDK has one for each request
        caller, of_view = self._caller(context), OF_VIEW in (context.request_context.meta or {})
        if of_view:
            caller = replace(caller, response=ResponseContext())
        call = Call(caller, progress_of(context), context.request_id, of_view)
        return await self._elicitation.call(name, arguments, call, context)

    def end_calls(self) -> int:
        """Answer all running calls with an error, as the server stops; return their number."""
        return self._calls.end()

    async def aclose(self) -> None:
        """Cancel the calls that outlive their requests, and wait for their end."""
        await self._calls.aclose()

    def add_prompt(self, prompt: Prompt) -> None:
        """Add a prompt, and say to clients that there are some."""
        self._lowlevel_server._request_handlers.update(self._of_prompts)
        super().add_prompt(prompt)

    async def list_resources(self) -> list[Resource]:
        """Return the resources that belong to no session."""
        return [
            Resource(uri=uri, name=page.name, description=page.description, mime_type=page.mime)
            for uri, page in self._pages.items()
        ]

    async def list_resource_templates(self) -> list[ResourceTemplate]:
        """Return the URI templates of the resources of sessions."""
        return [
            ResourceTemplate(uri_template=template, name=name, description=description)
            for template, (name, description) in self._templates.items()
        ]

    async def read_resource(
        self, uri: Any, context: Context[Any, Any] | None = None
    ) -> Iterable[ReadResourceContents]:
        """Read a resource. Raises ResourceError."""
        if (page := self._pages.get(str(uri))) is not None:
            return [ReadResourceContents(content=await page.content(), mime_type=page.mime)]
        try:
            assert context is not None  # as above
            content, mime = await self._calls.read(str(uri), self._caller(context))
        except (SessionNotFound, InputError) as error:
            raise ResourceNotFoundError(escaped(str(error))) from error
        except (ResourceError, ResourceNotFoundError):
            raise
        except Exception as error:
            log_failure(error, "reading a resource")
            raise ResourceError(escaped(str(explained(error, "reading a resource")))) from error
        return [ReadResourceContents(content=content, mime_type=mime)]


def progress_of(context: Context[Any, Any]) -> ProgressCallback | None:
    """Return a callback that sends progress messages; None unless the client asked for them.

    Their counter rises by 1 with each.
    """
    if "progress_token" not in (context.request_context.meta or {}):
        return None
    count = 0

    async def report(text: str) -> None:
        nonlocal count
        count += 1
        await context.report_progress(count, message=text)

    return report


def cell_of(cells: History, number: int) -> Cell:
    """Return a cell by its number, `History.before` for 0. Raises InputError without one."""
    if number == 0 and cells.before.log.characters:
        return cells.before
    if not 1 <= number <= len(cells):
        raise InputError(f"This session has no cell {number}: {_there(cells)}.")
    return cells[number - 1]


def _there(cells: History) -> str:
    count = len(cells)
    if count < 2:
        return "it has only cell 1" if count else "it has run none so far"
    return f"it has cells 1 to {count}"


def cell_record(session: str, cell: Cell) -> dict[str, Any]:
    """Return the outcome of a cell with its streams, which are read from files."""
    streams, omitted = text_by_stream(cell.log)
    outputs = mime_types(cell.log.since())
    meta = cell.meta(session, omitted=omitted, outputs=outputs)
    return {**meta, "client": cell.origin.program, **streams}


def _joined(text: Iterable[str], more: str) -> str:
    parts: list[str] = []
    left = MAX_TEXT_CHARS
    for part in text:
        parts.append(part[:left])
        left -= len(part)
        if left <= 0:
            parts.append(f"\n[… cut after {MAX_TEXT_CHARS:,} characters{more} …]\n")
            break
    return "".join(parts)


def _output(cell: Cell, key: str) -> tuple[str | bytes, str]:
    part = cell.log.output(key)
    if part is None:
        raise InputError(f"Cell {cell.number} has no output {key!r}.")
    try:
        return part.data() if is_binary(part.mime) else part.read(), part.mime
    except ValueError as error:
        raise InputError(f"Output {key!r} of cell {cell.number} was not kept: {error}.") from error
