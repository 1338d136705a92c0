"""Files of sessions, outputs of cells, and notebooks over HTTP, of any size."""

from __future__ import annotations

import errno
import os
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kernel_mcp.barriers import explained, log_failure
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import (
    InputError,
    KernelMcpError,
    SessionGone,
    SessionNotFound,
    WorkspaceError,
)
from kernel_mcp.files.folders import FolderEntry, Listing
from kernel_mcp.files.streams import Changed, OpenFile, tag_of
from kernel_mcp.http.cells import Cells
from kernel_mcp.http.conditions import attachment, date, part_of, permitted, quoted, unchanged
from kernel_mcp.http.transfers import (
    ERRORS,
    FRESH,
    HEADERS,
    IDLE_S,
    LINGER_S,
    PIECE_BYTES,
    Endpoint,
    ErrorResponse,
    Json,
    RequestFailed,
    RouteContext,
    StreamedResponse,
    Transfers,
    Work,
    batches,
    of_text,
)
from kernel_mcp.output.text import Masks
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session

_STATUS = {
    errno.ENOENT: 404,
    errno.EDQUOT: 507,
    errno.ENOSPC: 507,
    errno.EFBIG: 413,
    errno.EACCES: 403,
    errno.EPERM: 403,
    errno.EROFS: 403,
    errno.ELOOP: 403,
    errno.EXDEV: 403,
    errno.ENXIO: 403,
    errno.ENOTDIR: 409,
    errno.EISDIR: 409,
    errno.ENOTEMPTY: 409,
    errno.EMFILE: 503,
    errno.ENFILE: 503,
    errno.ENOMEM: 503,
}
"""HTTP status for errors of the file system; 400 for all others."""

_FILE = re.compile(rb"/sessions/[^/]+/files/?(.*)", re.DOTALL)
NO_SESSION = (
    "There is no session of yours at this address: /sessions/NAME/files/PATH has the name or the "
    "handle of an open one, which `list_sessions` shows."
)
_KEPT = {"cache-control": "private, no-cache"}
"""Headers of responses with an ETag: clients validate their copy each time."""


def links_of(settings: Settings, url: str) -> Callable[[str], str] | None:
    """Return a function from a session's handle to its address below `url`.

    Returns None if no address is known that clients reach: the server has no public URL and is not
    bound to loopback.
    """
    host = settings.http[0] if settings.http is not None else ""
    if not settings.public_url and host not in ("127.0.0.1", "localhost", "::1"):
        return None
    return lambda handle: f"{url}/sessions/{handle}"


def routes(
    manager: SessionManager,
    caller_of: Callable[[Request], Caller],
    *,
    masks: Masks | None = None,
    transfers: Transfers | None = None,
    files: bool = True,
    idle_s: float = IDLE_S,
) -> list[Route]:
    """Return the routes below `/sessions`.

    `masks` are applied to texts. Without `files` there are only the outputs of cells. A transfer
    without progress for `idle_s` seconds is ended.
    """
    given = RouteContext(manager, caller_of, masks or Masks(), transfers or Transfers(), idle_s)
    cells = Cells(given, notebooks=files)
    found = [
        Route(
            "/sessions/{handle}/cells/{rest:path}", _answered(cells.cell, idle_s), methods=["GET"]
        ),
    ]
    if files:
        one = _Files(given)
        methods = {"GET": one.read, "HEAD": one.read, "PUT": one.write, "DELETE": one.remove}

        async def by_method(request: Request) -> Response:
            return await methods[request.method](request)

        endpoint, names = _answered(by_method, idle_s), list(methods)
        found += [
            Route(
                "/sessions/{handle}/notebook", _answered(cells.notebook, idle_s), methods=["GET"]
            ),
            Route("/sessions/{handle}/files", endpoint, methods=names),
            Route("/sessions/{handle}/files/{path:path}", endpoint, methods=names),
        ]
    for each in found:  # file names may contain line breaks
        # parts: starlette's, `[^/]+` for a handle and `.*` for a path
        each.path_regex = re.compile(each.path_regex.pattern, re.DOTALL)
    return found


def _answered(endpoint: Endpoint, idle_s: float) -> Endpoint:
    """Return an endpoint that answers the errors of `endpoint` with a JSON object."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestFailed as error:
            failed = error
        except SessionGone as error:
            failed = RequestFailed(404, str(error))
        except SessionNotFound:
            failed = RequestFailed(404, NO_SESSION)
        except KernelMcpError as error:
            failed = RequestFailed(_status_of(error), str(error))
        except Exception as error:  # noqa: BLE001  # logged, and told to the client
            log_failure(error, "answering a request for a file")
            failed = RequestFailed(500, str(explained(error, "answering a request for a file")))
        coming = request.method == "PUT" and not getattr(request.state, "whole", False)
        return ErrorResponse(failed, min(LINGER_S, idle_s)) if coming else _failure(failed)

    return answer


def _failure(failed: RequestFailed) -> Json:
    return Json(failed.status, {"error": str(failed)}, failed.headers)


def _status_of(error: KernelMcpError) -> int:
    if isinstance(error, Changed):
        return 412
    if isinstance(error, WorkspaceError):
        return _STATUS.get(error.code, 400)
    return 404 if isinstance(error, (SessionNotFound, InputError)) else 503


class _Files:
    """Endpoints for the files of workspaces."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def _found(self, request: Request, stack: ExitStack) -> tuple[Work, Session, str]:
        caller, work = self._context.begin(request, stack)
        session = await self._context.manager.resolve(caller, request.path_params["handle"])
        raw = _FILE.fullmatch(request.scope["raw_path"])
        if raw is None:
            raise RequestFailed(
                404, "There is nothing here: a slash of the address itself is escaped."
            )
        return work, session, os.fsdecode(unquote_to_bytes(raw[1]))

    async def read(self, request: Request) -> Response:
        """Return a file, or the entries of a folder as JSON."""
        with ExitStack() as stack:
            work, session, path = await self._found(request, stack)
            try:
                opened = await work.run(session.workspace.open_file, path)
            except WorkspaceError as error:
                if error.code != errno.EISDIR:
                    raise
                return _listed(await work.run(session.workspace.list_files, path))
            stack.callback(opened.close)
            session.events.read(path)
            tag = tag_of(opened.info)
            masked = bool(self._context.masks) and opened.text
            modified = opened.info.st_mtime
            headers = {**_KEPT, "etag": quoted(tag), "last-modified": date(modified)}
            if unchanged(request, tag, modified):
                return Response(status_code=304, headers={**HEADERS, **headers})
            headers |= {
                "content-type": opened.mime,
                "content-disposition": attachment(opened.name),
                "accept-ranges": "none" if masked else "bytes",
            }
            stream = partial(StreamedResponse, work=work, idle_s=self._context.idle_s)
            if masked:
                more = of_text(self._context.masks.pieces(_texts(opened)))
                return stream(200, headers, more=more, done=stack.pop_all())
            size = opened.info.st_size
            part = part_of(request, tag, size)
            first, count = part or (0, size)
            if part is not None:
                headers["content-range"] = f"bytes {first}-{first + count - 1}/{size}"
            return stream(
                200 if part is None else 206,
                headers,
                more=_bytes_of(opened, first, count),
                length=count,
                done=stack.pop_all(),
            )

    async def write(self, request: Request) -> Response:
        """Write a whole file atomically; nothing is changed if the body breaks off."""
        if "content-range" in request.headers:
            raise RequestFailed(
                400, "A file is put there as a whole: send it without Content-Range."
            )
        with ExitStack() as stack:
            work, session, path = await self._found(request, stack)
            workspace, allowed = session.workspace, partial(permitted, request)
            length = request.headers.get("content-length", "")
            size = int(length) if length.isdecimal() else None
            upload = await work.run(workspace.begin_upload, path, size, allowed)
            try:
                async for data in batches(request, self._context.idle_s):
                    await work.run(upload.write, data)
                if size not in (None, upload.size):
                    raise RequestFailed(
                        400, "The body is not as long as announced: nothing was changed."
                    )

                def finish() -> tuple[bool, str]:
                    new = workspace.finish_upload(upload, allowed)
                    session.events.note("file", path=path, size=upload.size, sha256=upload.sha256)
                    return new, upload.tag

                new, tag = await work.run(finish)
            finally:
                await work.run(upload.close)
        headers = {"etag": quoted(tag)}
        if new:
            return Json(201, {"size": upload.size, "sha256": upload.sha256}, headers)
        return Response(status_code=204, headers={**HEADERS, **FRESH, **headers})

    async def remove(self, request: Request) -> Response:
        """Remove a file or an empty folder."""
        with ExitStack() as stack:
            work, session, path = await self._found(request, stack)

            def remove() -> None:
                session.workspace.remove_entry(path, partial(permitted, request))
                session.events.note("file_removed", path=path)

            await work.run(remove)
        return Response(status_code=204, headers={**HEADERS, **FRESH})


def _bytes_of(opened: OpenFile, offset: int, count: int) -> Callable[[], bytes]:
    end = offset + count

    def more() -> bytes:
        nonlocal offset
        data = opened.read(offset, min(PIECE_BYTES, end - offset))
        offset += len(data)
        return data

    return more


def _texts(opened: OpenFile) -> Iterator[str]:
    """Yield a file as text; bytes that are not UTF-8 become surrogates."""
    decoder = getincrementaldecoder("utf-8")(ERRORS)
    more = _bytes_of(opened, 0, opened.info.st_size)
    while data := more():
        yield decoder.decode(data)
    yield decoder.decode(b"", final=True)


def _listed(listing: Listing) -> Json:
    entries = list(map(_entry, listing.entries))
    return Json(200, {"path": listing.path or ".", "entries": entries, "omitted": listing.omitted})


def _entry(entry: FolderEntry) -> dict[str, Any]:
    modified = date(entry.modified)
    return {"path": entry.path, "kind": entry.kind, "size": entry.size, "modified": modified}
