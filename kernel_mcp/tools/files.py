"""The tools for a session's workspace: list_files, read_file, write_file, export_notebook."""

from __future__ import annotations

import base64
import contextlib
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, TypedDict
from urllib.parse import quote

import anyio
from mcp_types import CallToolResult, ImageContent, ResourceLink, TextContent
from pydantic import Field

from kernel_mcp.environments.uv import silence
from kernel_mcp.errors import InputError, WorkspaceError
from kernel_mcp.files.contents import Page, base64_room, binary_kind, page_of
from kernel_mcp.files.workspace import FileContent
from kernel_mcp.output.images import ImageError, fit
from kernel_mcp.output.render import PICTURE_BYTES
from kernel_mcp.output.text import visible
from kernel_mcp.sessions.losses import cells_in_words
from kernel_mcp.sessions.notebook_export import NOTEBOOK_MIME, notebook
from kernel_mcp.sessions.script_export import extension_of, script
from kernel_mcp.sessions.session import Session
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import AnyContext, PathArg, SessionArg, Toolbox, Whole, progress_of
from kernel_mcp.tools.hints import READS, WRITES
from kernel_mcp.tools.models import FileEntry, FileList, Written
from kernel_mcp.tools.resources import Document, Documents, file_of
from kernel_mcp.tools.results import notice_block, notice_result
from kernel_mcp.tools.tables import FirstArg, MatchArg, fitting, matches, more, table_answer

_EXPORTED = b'"kernel-mcp"'
"""Metadata of code cells in exported notebooks."""
FORMATS = ("", "ipynb", "script", "folder", "zip")
MARKED_BYTES = 1024 * 1024
"""Bytes of a notebook that are searched for it."""


def register(box: Toolbox, services: ToolContext) -> None:
    """Add these tools to `box`."""
    tool = box.tool
    documents = Documents(services.manager, files=True)
    one_notebook = anyio.CapacityLimiter(1)

    @tool(READS, "List files", computes=True)
    async def list_files(
        ctx: AnyContext,
        session: SessionArg = "",
        path: PathArg = ".",
        match: MatchArg = "",
        offset: FirstArg = 0,
    ) -> Annotated[CallToolResult, FileList]:
        """List a folder."""
        if offset < 0:
            raise InputError(f"offset={offset} is not usable: files count from 0.")
        _, found = await box.resolve(ctx, session)
        found.request.interpreter.require("list_files")
        chosen = partial(matches, match=match)
        read = partial(found.workspace.list_files, path, chosen, offset)
        listing = await anyio.to_thread.run_sync(read)
        entries = [
            FileEntry(
                path=entry.path, kind=entry.kind, size=entry.size, modified=_iso(entry.modified)
            )
            for entry in listing.entries
        ]
        shown = fitting(entries, _row_of, services.settings.max_output)
        omitted = listing.omitted + len(entries) - len(shown)
        note = more(omitted, offset, len(shown))
        if not shown and not offset:
            note = f"No name here is like {match!r}." if match else "The folder is empty."
        if path in (".", "", "/workspace") and not match and (mounted := found.workspace.mounted):
            note = f"{note} Folders of the host: {', '.join(mounted)}.".lstrip()
            note += f" The workspace is {found.workspace.path}." * bool(found.workspace.start)
        listed = FileList(
            session=found.handle,
            path=listing.path or ".",
            entries=shown,
            omitted=omitted,
            note=note,
        )
        return table_answer(list(map(_row_of, shown)), listed, note)

    @tool(READS, "Read a file", computes=True)
    async def read_file(
        path: PathArg,
        ctx: AnyContext,
        session: SessionArg = "",
        offset: Annotated[Whole, Field(description="First line, from 0")] = 0,
        limit: Annotated[Whole, Field(description="Number of lines")] = 0,
        encoding: Annotated[
            str, Field(description="Such as cp1252; base64: bytes, counted as lines")
        ] = "",
    ) -> CallToolResult:
        """Read a file or a `kernel://` address: text by lines, or an image."""
        if offset < 0 or limit < 0:
            raise InputError("offset and limit count lines from 0 and cannot be negative.")
        most = services.settings.max_output
        part = _Part(offset=offset, limit=limit, characters=most)
        named = file_of(path)
        if path.startswith("kernel://") and named is None:
            document = await documents.find(box.caller(ctx), path)
            opened = partial(_opened, path, document, part, encoding)
            return await anyio.to_thread.run_sync(lambda: _file(opened(), offset, path))
        handle, place = named or (session, path)
        _, found = await box.resolve(ctx, handle)
        read, address = found.workspace.read_file, f"kernel://{found.handle}/files/{quote(place)}"
        result = await anyio.to_thread.run_sync(
            lambda: _named(
                _file(read(place, encoding=encoding, **part), offset, address), found, place
            )
        )
        found.events.read(place)
        return result

    @tool(WRITES, "Write a file", computes=True)
    async def write_file(
        path: PathArg,
        content: str,
        ctx: AnyContext,
        session: SessionArg = "",
        encoding: Annotated[str, Field(description="Or base64")] = "utf-8",
    ) -> Written:
        """Write a file."""
        _, found = await box.resolve(ctx, session)
        found.request.interpreter.require("write_file")
        size = await anyio.to_thread.run_sync(_write, found, path, content, encoding)
        note = f"Written. Code opens it as {path!r}."
        return Written(session=found.handle, path=path, size=size, note=note)

    @tool(WRITES, "Export a notebook", computes=True)
    async def export_notebook(
        ctx: AnyContext,
        session: SessionArg = "",
        path: PathArg = "notebook.ipynb",
        format: str = "",  # noqa: A002 - the public name
    ) -> CallToolResult:
        """Save cells as a notebook; format=script: code; folder, zip: to rerun."""
        _, found = await box.resolve(ctx, session)
        if format not in FORMATS:
            raise InputError(f"format={format[:40]!r} is none: pass {' or '.join(FORMATS[1:])}.")
        if format in ("folder", "zip"):
            from kernel_mcp.tools.exports import export_all  # few sessions are exported so

            progress = progress_of(ctx) or silence
            return await export_all(
                found, path, services.installer, progress, one_notebook, zipped=format == "zip"
            )
        if format == "script":
            return await anyio.to_thread.run_sync(_script, found, path)
        if not path.endswith(".ipynb"):
            raise InputError(
                f"{path!r} is no name for a notebook: let it end in .ipynb, or pass "
                "format='script'."
            )
        export = partial(_export, found, path)
        size = await anyio.to_thread.run_sync(export, limiter=one_notebook)
        count = len(found.cells)
        cells = f"{count} cell{'' if count == 1 else 's'}"
        gone = found.cells.undone
        which = f" {cells_in_words(sorted(gone)).capitalize()}: tagged `undone`." if gone else ""
        result = notice_result(f"Wrote {cells} with their outputs to {path!r}.{which}")
        uri = f"kernel://{found.handle}/notebook"
        link = ResourceLink(uri=uri, name=path, mime_type=NOTEBOOK_MIME, size=size)
        result.content.append(link)
        return result


class _Part(TypedDict):
    """The page of a text to read: `limit` lines from line `offset` on, at most `characters`.

    With `limit` 0 it has as many lines as fit.
    """

    offset: int
    limit: int
    characters: int


def _opened(path: str, document: Document, part: _Part, encoding: str) -> FileContent:
    """Return a document as a file; only the page that is asked for."""
    if document.text is None:
        data, size = document.data, len(document.data)
        if encoding == "base64":
            data = data[part["offset"] :][: base64_room(part["limit"], part["characters"])]
            return FileContent(path, document.mime, size, data=data, encoded=True)
        if not document.mime.startswith("image/"):
            return FileContent(path, document.mime, size, kind=binary_kind(data) or "")
        return FileContent(path, document.mime, size, data=data)
    return FileContent(path, document.mime, 0, page=page_of(document.text, **part))


def _check_replaced(session: Session, path: str) -> None:
    """Raise InputError if an export would replace a notebook of a mounted project."""
    workspace = session.workspace
    if not workspace.start or workspace.name_of(path).startswith("/"):
        return
    try:
        found = workspace.open_file(path)
    except WorkspaceError:
        return  # none is there, or writing it is refused
    with contextlib.closing(found):
        if _EXPORTED not in found.read(0, MARKED_BYTES):
            raise InputError(
                f"Nothing was done: {path!r} is a notebook in {workspace.start} that was not "
                "exported from a session. Pass another path."
            )


def _export(session: Session, path: str) -> int:
    _check_replaced(session, path)
    cells = session.cells
    book = notebook(cells, undone=cells.undone, metadata=cells.notebook, session=session.handle)
    return _write(session, path, book)


def _script(session: Session, path: str) -> CallToolResult:
    """Write the code of the cells that ended well, and return the answer."""
    cells = session.cells
    ending = extension_of(cells.notebook)
    if not path.lower().endswith(ending.lower()):
        raise InputError(f"{path!r} is no name for this script: let it end in {ending}.")
    code, left = script(cells, cells.notebook, undone=cells.undone)
    size = _write(session, path, code)
    count = len(cells) - len(left)
    others = f" Left out, as they did not end well: {cells_in_words(left)}." if left else ""
    result = notice_result(
        f"Wrote the code of {count} cell{'' if count == 1 else 's'} to {path!r}.{others}"
    )
    uri = f"kernel://{session.handle}/files/{quote(path)}"
    result.content.append(ResourceLink(uri=uri, name=path, mime_type="text/plain", size=size))
    return result


def _write(session: Session, path: str, content: str | bytes, encoding: str = "utf-8") -> int:
    """Write a file and its audit entry; return its size in bytes."""
    size = session.workspace.write_file(path, content, encoding=encoding)
    session.events.wrote(path, size, content, encoding)
    return size


def _page(page: Page) -> CallToolResult:
    text = page.text or "(empty)"
    notes = []
    if page.cut:
        notes.append(f"{page.cut:,} characters of line {page.first} were left out")
    if page.next is not None:
        last = page.first + page.lines - 1
        notes.append(
            f"lines {page.first} to {last} of {page.total:,}; read on with offset={page.next}"
        )
    safe = visible(text)
    if safe != text:
        notes.append("characters that hide text are written as escapes here, not in the file")
    if not notes:
        return CallToolResult(content=[TextContent(text=safe)])
    return CallToolResult(
        content=[TextContent(text=safe.removesuffix("\n")), notice_block("; ".join(notes))]
    )


def _named(result: CallToolResult, session: Session, path: str) -> CallToolResult:
    """Add the path of a file that was found in another folder. Reads folders."""
    if place := session.workspace.only_elsewhere(path):
        where = session.workspace.where([place])
        result.content.append(notice_block(f"this is {place}, {where}; code opens it by this path"))
    return result


def _row_of(entry: FileEntry) -> str:
    kind = "" if entry.kind in ("file", "folder") else f"  ({entry.kind})"
    unit = "byte" if entry.size == 1 else "bytes"
    size = f"  {entry.size:,} {unit}" if entry.kind == "file" else ""
    return f"{entry.path}{'/' if entry.kind == 'folder' else ''}{kind}{size}  {entry.modified}"


def _file(found: FileContent, offset: int, address: str) -> CallToolResult:
    """Return a file as text, image, base64 or a link. Takes seconds for a large image."""
    if found.page is not None:
        return _page(found.page)
    about = f"{found.path}: {found.mime}, {found.size:,} bytes"
    if found.encoded:
        after = offset + len(found.data)
        part = f", bytes {offset:,} to {after - 1:,}" if offset or after < found.size else ""
        rest = f"; read on with offset={after}" if after < found.size else ""
        encoded = base64.b64encode(found.data).decode()
        return CallToolResult(
            content=[notice_block(f"{about}, as base64{part}{rest}"), TextContent(text=encoded)]
        )
    if found.mime.startswith("image/"):
        try:
            picture = fit(found.data, PICTURE_BYTES)
        except ImageError as error:
            return notice_result(
                f"{found.path} is {found.mime} of {found.size:,} bytes and not shown: {error}"
            )
        encoded = base64.b64encode(picture.data).decode()
        change = f", {picture.change}" if picture.change else ""
        image = ImageContent(data=encoded, mime_type=picture.mime)
        return CallToolResult(content=[image, notice_block(f"{about}{change}")])
    kind = f", {found.kind}" if found.kind else ""
    words = (
        f"{about}{kind}: no text to show. Read it with code, with a package for this format, or "
        "as bytes with encoding='base64'"
    )
    link = ResourceLink(uri=address, name=found.path, mime_type=found.mime, size=found.size)
    return CallToolResult(content=[notice_block(words), link])


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
