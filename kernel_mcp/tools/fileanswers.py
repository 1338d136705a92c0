"""From a file, or a page of a cell's output, to the tool result a model reads."""

from __future__ import annotations

import base64
from datetime import datetime, timezone

from mcp_types import CallToolResult, ImageContent, TextContent

from kernel_mcp.files.contents import Page
from kernel_mcp.files.folders import Listing
from kernel_mcp.files.workspace import FileContent
from kernel_mcp.output.images import ImageError, fit
from kernel_mcp.output.render import PICTURE_BYTES
from kernel_mcp.output.text import visible
from kernel_mcp.sessions.session import Session
from kernel_mcp.tools.models import FileEntry, FileList
from kernel_mcp.tools.telling import said, say


def page_answer(page: Page) -> CallToolResult:
    """A page of text, with the offset to read on at when there is more."""
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
    text = safe
    if notes:
        text = text.removesuffix("\n")
        return CallToolResult(content=[TextContent(text=text), said("; ".join(notes))])
    return CallToolResult(content=[TextContent(text=text)])


def file_answer(found: FileContent) -> CallToolResult:
    """A file as text, as a picture, or as base64; may take seconds for a large picture."""
    if found.page is not None:
        return page_answer(found.page)
    if found.mime.startswith("image/"):
        try:
            picture = fit(found.data, PICTURE_BYTES)
        except ImageError as error:
            return say(
                f"{found.path} is {found.mime} of {found.size:,} bytes and not shown: {error}"
            )
        encoded = base64.b64encode(picture.data).decode()
        change = f", {picture.change}" if picture.change else ""
        return CallToolResult(
            content=[
                ImageContent(data=encoded, mime_type=picture.mime),
                said(f"{found.path}: {found.mime}, {found.size:,} bytes{change}"),
            ]
        )
    encoded = base64.b64encode(found.data).decode()
    return CallToolResult(
        content=[
            said(f"{found.path}: {found.mime}, {found.size:,} bytes, as base64"),
            TextContent(text=encoded),
        ]
    )


def files_answer(session: Session, listing: Listing) -> FileList:
    """A folder of the workspace."""
    return FileList(
        session=session.handle,
        path=listing.path or ".",
        entries=[
            FileEntry(
                path=entry.path, kind=entry.kind, size=entry.size, modified=_iso(entry.modified)
            )
            for entry in listing.entries
        ],
        omitted=listing.omitted,
    )


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
