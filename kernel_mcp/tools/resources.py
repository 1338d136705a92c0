"""The MCP server: its tools by name, and as resources files, outputs of cells and notebooks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn
from urllib.parse import unquote

import anyio
from mcp.server import MCPServer
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.server.mcpserver.tools import Tool, ToolManager
from mcp.server.request_state import InvalidRequestState, RequestStateSecurity
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolResult,
    InputRequiredResult,
    Resource,
    ResourceTemplate,
)

from kernel_mcp.barriers import explained, log_failure
from kernel_mcp.errors import InputError, ServerStops, SessionNotFound
from kernel_mcp.output.bundles import is_binary
from kernel_mcp.output.render import apart, mime_types
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import Masks, guarded, guarded_lines
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.history import History
from kernel_mcp.sessions.manager import Caller, SessionManager
from kernel_mcp.sessions.notebook import NOTEBOOK_MIME, RESOURCE_BYTES, notebook
from kernel_mcp.tools.arguments import no_such_tool
from kernel_mcp.tools.results import masked, masked_document, refusal, with_remarks

MAX_TEXT_CHARS = 8_000_000
"""Longest output sent as one resource; `read_file` reads longer ones in pages."""

STOPS = (
    "The server is stopping, so this call was given up before its end. Call again when the server "
    "is back; what it keeps of the session is there then (see info)."
)

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
class Document:
    """What an address names: `text` in pieces that are read from files one by one, or `data`.

    A text in `pages` may be of any length.
    """

    mime: str
    text: Iterable[str] | None = None
    data: bytes = b""
    pages: bool = False

    @classmethod
    def of(cls, content: str | bytes, mime: str) -> Document:
        """A document that is in memory."""
        return cls(mime, [content]) if isinstance(content, str) else cls(mime, data=content)


class Documents:
    """Finds what addresses name; without `files` only what belongs to cells."""

    def __init__(self, manager: SessionManager, *, files: bool) -> None:
        self.templates = {
            uri: words for uri, words in TEMPLATES.items() if files or "/cells/" in uri
        }
        self._files = files
        self._manager = manager
        self._one_notebook = anyio.CapacityLimiter(1)

    async def find(self, caller: Caller, uri: str) -> Document:
        """The document at `uri`. Raises KernelMcpError; InputError where `uri` names none."""
        match = _URI.fullmatch(uri)
        if match is None or not (self._files or match["cell"]):
            there = ", ".join(self.templates)
            raise InputError(f"{uri!r} is not a resource of this server. There are: {there}.")
        if match["path"]:
            workspace = (await self._manager.resolve(caller, match["session"])).workspace
            found = await anyio.to_thread.run_sync(workspace.read_resource, unquote(match["path"]))
            return Document.of(*found)
        handle, cells = await self._manager.cells_of(caller, match["session"])
        if match["notebook"]:
            write = partial(notebook, cells, RESOURCE_BYTES, undone=cells.undone)
            book = await anyio.to_thread.run_sync(write, limiter=self._one_notebook)
            return Document(NOTEBOOK_MIME, [book.decode()])
        cell = cell_of(cells, int(match["cell"]))
        if match["record"]:
            record = await anyio.to_thread.run_sync(cell_record, handle, cell)
            return Document("application/json", [json.dumps(record, indent=1)])
        if match["output"]:
            return Document.of(*await anyio.to_thread.run_sync(_output, cell, match["output"]))
        return Document("text/plain", cell.log.text(), pages=True)


def file_of(uri: str) -> tuple[str, str] | None:
    """The session and the path that the address of a file names; None for other addresses."""
    match = _URI.fullmatch(uri)
    return (match["session"], unquote(match["path"])) if match and match["path"] else None


class NoRequestState:
    """Seals nothing: no tool leaves a state with its client. The SDK's own codec takes 1 MB."""

    def seal(self, payload: bytes) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError("a tool that leaves a state with the client needs another codec")

    def unseal(self, token: str) -> NoReturn:
        """Raise InvalidRequestState."""
        raise InvalidRequestState("this server gave no state away")


class ResourceServer(MCPServer[Any]):
    """An MCP server whose resources are those of sessions: each has a MIME type of its own."""

    def __init__(
        self,
        *args: Any,
        manager: SessionManager,
        caller: Callable[[Context[Any, Any]], Caller],
        tools: Callable[[], Sequence[Tool]],
        files: bool = True,
        remarks: Callable[[], Sequence[str]] = tuple,
        masks: Masks | None = None,
        pages: Mapping[str, tuple[str, Callable[[], str]]] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        """`caller` says who makes a call, `tools` makes the tools when a client first asks for any.
        Without `files` cells are the only resources.

        Every answer of a tool has `remarks`. No answer and no text has what `masks` hide. `pages`
        are views of tools by their address: MIME type and content.
        """
        self._pages = pages
        self.masks = masks or Masks()
        self._remarks = remarks
        state = RequestStateSecurity(codec=NoRequestState())
        super().__init__(*args, request_state_security=state, **kwargs)
        self.middleware.append(self._furnish)
        self._make_tools: Callable[[], Sequence[Tool]] | None = tools
        self._names: tuple[str, ...] = ()
        self._documents = Documents(manager, files=files)
        self._caller = caller
        self._turns = manager.turns
        self._running: set[anyio.CancelScope] = set()
        self._more = "; read_file reads on in pages" if files else ""

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """The answer of a tool."""
        answer: CallToolResult | InputRequiredResult | None = None
        if name in self._names:
            with anyio.CancelScope() as scope:
                self._running.add(scope)
                try:
                    answer = await super().call_tool(name, arguments, context)
                finally:
                    self._running.discard(scope)
        if answer is None:
            there = name in self._names
            answer = refusal(ServerStops(STOPS) if there else no_such_tool(name, self._names))
        if isinstance(answer, CallToolResult):
            answer = with_remarks(answer, self._remarks())
            if self.masks:
                answer = masked(answer, self.masks)
        return answer

    async def _furnish(self, ctx: ServerRequestContext[Any], call_next: CallNext) -> HandlerResult:
        """Have the tools from the first request on that is about them."""
        if self._make_tools is not None and ctx.method.startswith("tools/"):
            made, self._make_tools = list(self._make_tools()), None
            self._tool_manager = ToolManager(tools=[*made, *self._tool_manager.list_tools()])
            self._names = tuple(tool.name for tool in made)
        return await call_next(ctx)

    def end_calls(self) -> int:
        """Have every call that runs be answered: the server stops. How many there were."""
        for scope in self._running:
            scope.cancel()
        return len(self._running)

    async def get_prompt(self, name: str, *_: Any, **__: Any) -> NoReturn:
        """There are no prompts. Raises MCPError."""
        raise MCPError(INVALID_PARAMS, guarded(clean(f"This server has no prompt {name!r}.")))

    async def list_resources(self) -> list[Resource]:
        """What is there without a session: views of tools."""
        return [
            Resource(uri=uri, name=uri.rpartition("/")[2], mime_type=mime)
            for uri, (mime, _) in self._pages.items()
        ]

    async def list_resource_templates(self) -> list[ResourceTemplate]:
        """What can be read."""
        return [
            ResourceTemplate(uri_template=template, name=name, description=description)
            for template, (name, description) in self._documents.templates.items()
        ]

    async def read_resource(
        self, uri: Any, context: Context[Any, Any] | None = None
    ) -> Iterable[ReadResourceContents]:
        """Read a resource. Raises ResourceError."""
        if str(uri) in self._pages:
            mime, page = self._pages[str(uri)]
            return [ReadResourceContents(content=page(), mime_type=mime)]
        try:
            assert context is not None  # the SDK has one for each request
            caller = self._caller(context)
            async with self._turns(caller):
                content, mime = await self._read(caller, str(uri))
            if isinstance(content, str) and mime != NOTEBOOK_MIME:
                content = guarded_lines(content)
            if isinstance(content, str):
                match = _URI.fullmatch(str(uri))
                own = match is not None and (match["record"] or match["notebook"])
                hide = masked_document if own else Masks.masked
                content = hide(self.masks, content)
        except (SessionNotFound, InputError) as error:
            raise ResourceNotFoundError(guarded(str(error))) from error
        except (ResourceError, ResourceNotFoundError):
            raise
        except Exception as error:
            log_failure(error, "reading a resource")
            raise ResourceError(guarded(str(explained(error, "reading a resource")))) from error
        return [ReadResourceContents(content=content, mime_type=mime)]

    async def _read(self, caller: Caller, uri: str) -> tuple[str | bytes, str]:
        document = await self._documents.find(caller, uri)
        if document.text is None:
            return document.data, document.mime
        if document.pages:
            return await anyio.to_thread.run_sync(_joined, document.text, self._more), document.mime
        return "".join(document.text), document.mime


def cell_of(cells: History, number: int) -> Cell:
    """A cell by number. Raises InputError."""
    if not 1 <= number <= len(cells):
        raise InputError(f"This session has no cell {number}: {_there(cells)}.")
    return cells[number - 1]


def _there(cells: History) -> str:
    count = len(cells)
    if count < 2:
        return "it has only cell 1" if count else "it has run none so far"
    return f"it has cells 1 to {count}"


def cell_record(session: str, cell: Cell) -> dict[str, Any]:
    """The outcome of a cell with its streams, which are read from files."""
    streams, omitted = apart(cell.log)
    outputs = mime_types(cell.log.since())
    return {**cell.meta(session, omitted=omitted, outputs=outputs), **streams}


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
