"""Outputs of cells, and notebooks of all cells, over HTTP."""

from __future__ import annotations

import mimetypes
import re
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kernel_mcp.http.conditions import attachment
from kernel_mcp.http.transfers import FRESH, RouteContext, StreamedResponse, of_text
from kernel_mcp.sessions.notebook_export import NOTEBOOK_MIME, notebook_pieces
from kernel_mcp.tools.resources import Documents
from kernel_mcp.tools.results import masked_document

_MIME = re.compile(r"[\w.+-]+/[\w.+-]+")


class Cells:
    """Endpoints for outputs of cells and for notebooks of all cells."""

    def __init__(self, context: RouteContext, *, notebooks: bool) -> None:
        self._documents = Documents(context.manager, files=notebooks)
        self._context = context

    async def cell(self, request: Request) -> Response:
        """Return the whole text of a cell, its outcome as JSON, or one of its outputs."""
        handle, rest = request.path_params["handle"], request.path_params["rest"]
        with ExitStack() as stack:
            caller, work = self._context.begin(request, stack)
            document = await self._documents.find(caller, f"kernel://{handle}/cells/{rest}")
            mime = document.mime if _MIME.fullmatch(document.mime) else "application/octet-stream"
            name = _name_of(rest, mime)
            if document.text is None:
                more = iter([document.data, b""]).__next__
                length: int | None = len(document.data)
            else:
                mime += "; charset=utf-8" if mime.startswith("text/") else ""
                texts = document.text
                if rest.endswith(".json"):
                    texts = [masked_document(self._context.masks, "".join(texts))]
                elif self._context.masks:
                    texts = self._context.masks.pieces(texts)
                more, length = of_text(texts), None
            return StreamedResponse(
                200,
                {**FRESH, "content-type": mime, "content-disposition": attachment(name)},
                more=more,
                work=work,
                done=stack.pop_all(),
                length=length,
                idle_s=self._context.idle_s,
            )

    async def notebook(self, request: Request) -> Response:
        """Return all cells as a notebook, streamed, so of any length."""
        with ExitStack() as stack:
            caller, work = self._context.begin(request, stack)
            handle, cells = await self._context.manager.cells_of(
                caller, request.path_params["handle"]
            )
            shown: Any = self._shown if self._context.masks else bytes
            written = notebook_pieces(
                cells, undone=cells.undone, metadata=cells.notebook, session=handle, shown=shown
            )
            pieces = filter(None, written)
            return StreamedResponse(
                200,
                {
                    **FRESH,
                    "content-type": NOTEBOOK_MIME,
                    "content-disposition": attachment(f"{handle}.ipynb"),
                },
                more=lambda: next(pieces, b""),
                work=work,
                done=stack.pop_all(),
                idle_s=self._context.idle_s,
            )

    def _shown(self, cell: bytes) -> bytes:
        return masked_document(self._context.masks, cell.decode()).encode()


def _name_of(rest: str, mime: str) -> str:
    """Return the file name under which a client saves a document of a cell."""
    name = "cell-" + rest.replace("/outputs/", "-output-")
    return name if name.endswith(".json") else name + (mimetypes.guess_extension(mime) or "")
