"""The MCP server: its tools by name, and as resources files, outputs of cells and notebooks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

import anyio
from mcp.server import MCPServer
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.server.mcpserver.tools import Tool
from mcp_types import CallToolResult, InputRequiredResult, ResourceTemplate

from kernel_mcp.barriers import explained, log_failure
from kernel_mcp.errors import InputError, SessionNotFound
from kernel_mcp.output.bundles import is_binary
from kernel_mcp.output.text import guarded, guarded_lines
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.manager import Caller, SessionManager
from kernel_mcp.sessions.notebook import NOTEBOOK_MIME, RESOURCE_BYTES, notebook
from kernel_mcp.sessions.session import Session
from kernel_mcp.tools.arguments import no_such_tool
from kernel_mcp.tools.results import refusal

MAX_TEXT_CHARS = 8_000_000
"""Longest output sent as one resource; `read_file` reads longer ones in pages."""

_URI = re.compile(
    r"kernel://(?P<session>[^/]+)/"
    r"(?:files/(?P<path>.+)|cells/(?P<cell>\d{1,9})(?:/outputs/(?P<output>[\w.]+))?|(?P<notebook>notebook))"
)

TEMPLATES = {
    "kernel://{session}/files/{+path}": ("file", "A file of the session's workspace"),
    "kernel://{session}/cells/{n}": ("cell", "The whole text output of a cell"),
    "kernel://{session}/cells/{n}/outputs/{k}": ("output", "One display of a cell, as it was made"),
    "kernel://{session}/notebook": ("notebook", "All cells with their outputs, as .ipynb"),
}


class ResourceServer(MCPServer[Any]):
    """An MCP server whose resources are those of sessions: each has a MIME type of its own."""

    def __init__(
        self,
        *args: Any,
        manager: SessionManager,
        tools: Sequence[Tool],
        files: bool = True,
        **kwargs: Any,
    ) -> None:
        """Without `files` cells are the only resources."""
        super().__init__(*args, tools=list(tools), **kwargs)
        self._names = tuple(tool.name for tool in tools)
        self._templates = {
            uri: words for uri, words in TEMPLATES.items() if files or "/cells/" in uri
        }
        self._files = files
        self._manager = manager
        self._one_notebook = anyio.CapacityLimiter(1)

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """The answer of a tool."""
        if name not in self._names:
            return refusal(no_such_tool(name, self._names))
        return await super().call_tool(name, arguments, context)

    async def list_resource_templates(self) -> list[ResourceTemplate]:
        """What can be read."""
        return [
            ResourceTemplate(uri_template=template, name=name, description=description)
            for template, (name, description) in self._templates.items()
        ]

    async def read_resource(
        self, uri: Any, context: Context[Any, Any] | None = None
    ) -> Iterable[ReadResourceContents]:
        """Read a resource. Raises ResourceError."""
        try:
            content, mime = await self._read(Caller(), str(uri))
            if isinstance(content, str) and mime != NOTEBOOK_MIME:
                content = guarded_lines(content)
        except (SessionNotFound, InputError) as error:
            raise ResourceNotFoundError(guarded(str(error))) from error
        except (ResourceError, ResourceNotFoundError):
            raise
        except Exception as error:
            log_failure(error, "reading a resource")
            raise ResourceError(guarded(str(explained(error, "reading a resource")))) from error
        return [ReadResourceContents(content=content, mime_type=mime)]

    async def _read(self, caller: Caller, uri: str) -> tuple[str | bytes, str]:
        """Content and MIME type of a URI. Raises KernelMcpError, ResourceNotFoundError."""
        match = _URI.fullmatch(uri)
        if match is None or not (self._files or match["cell"]):
            there = ", ".join(self._templates)
            raise ResourceNotFoundError(
                f"{uri!r} is not a resource of this server. There are: {there}."
            )
        session = await self._manager.resolve(caller, match["session"])
        if match["path"]:
            path = unquote(match["path"])
            return await anyio.to_thread.run_sync(session.workspace.read_resource, path)
        if match["notebook"]:
            write = partial(notebook, session.cells, RESOURCE_BYTES)
            text = await anyio.to_thread.run_sync(write, limiter=self._one_notebook)
            return text.decode(), NOTEBOOK_MIME
        cell = cell_of(session, int(match["cell"]))
        if match["output"]:
            return await anyio.to_thread.run_sync(_output, cell, match["output"])
        more = "; read_file reads on in pages" if self._files else ""
        return await anyio.to_thread.run_sync(_text, cell, more), "text/plain"


def cell_uri_number(uri: str, session: Session) -> int | None:
    """The number of the cell whose text `uri` names, or None when it names something else."""
    match = _URI.fullmatch(uri)
    known = (session.handle, session.name)
    if match is None or match["session"] not in known or not match["cell"] or match["output"]:
        return None
    return int(match["cell"])


def cell_of(session: Session, number: int) -> Cell:
    """A cell by number. Raises InputError."""
    if not 1 <= number <= len(session.cells):
        raise InputError(
            f"This session has no cell {number}: it has run {len(session.cells)} so far."
        )
    return session.cells[number - 1]


def _text(cell: Cell, more: str) -> str:
    parts: list[str] = []
    left = MAX_TEXT_CHARS
    for part in cell.log.text():
        parts.append(part[:left])
        left -= len(part)
        if left <= 0:
            parts.append(f"\n[… cut after {MAX_TEXT_CHARS:,} characters{more} …]\n")
            break
    return "".join(parts)


def _output(cell: Cell, key: str) -> tuple[str | bytes, str]:
    part = cell.log.output(key)
    if part is None:
        raise ResourceNotFoundError(f"Cell {cell.number} has no output {key!r}.")
    try:
        return part.data() if is_binary(part.mime) else part.read(), part.mime
    except ValueError as error:
        raise ResourceNotFoundError(
            f"Output {key!r} of cell {cell.number} was not kept: {error}."
        ) from error
