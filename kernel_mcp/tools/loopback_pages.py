"""Pages for answers on this machine's loopback, for clients on stdio."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import anyio
import h11

from kernel_mcp.barriers import Barrier
from kernel_mcp.network.h11_input import H11Input, TooManyBlanks
from kernel_mcp.sessions.questions import Question
from kernel_mcp.tools.answer_pages import (
    BODY_BYTES,
    HEADERS,
    AnswerPages,
    Asked,
    Give,
    PageRefused,
)
from kernel_mcp.units import KIB

HOST = "127.0.0.1"
REQUEST_S = 10.0
"""Seconds that a browser has for its request."""
HEAD_BYTES = 16 * KIB


class LoopbackPages:
    """The pages of one client. Their socket is open while there are any."""

    def __init__(self) -> None:
        self._pages = AnswerPages()
        self._server: asyncio.Server | None = None
        self._opening = anyio.Lock()
        self._principal = ""

    async def url_of(self, asked: Asked, question: Question, give: Give) -> str:
        """See `Pages`. Raises OSError without a free port."""
        async with self._opening:
            if self._server is None:
                self._server = await asyncio.start_server(self._connected, HOST, 0)
        self._principal = asked.principal  # the only one on stdio
        return f"http://{self._host}/{self._pages.path_of(asked, question, give)}"

    def close(self, owner: str, key: str = "") -> None:
        """See `Pages`."""
        self._pages.close(owner, key)
        if not self._pages and self._server is not None:
            self._server.close()
            self._server = None

    @property
    def _host(self) -> str:
        assert self._server is not None
        return f"{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        try:
            with Barrier("serving the page of a question"), anyio.move_on_after(REQUEST_S):
                status = HTTPStatus.OK
                try:
                    text = await self._answer(*await _request(connection, reader))
                except (h11.RemoteProtocolError, TooManyBlanks):
                    status = HTTPStatus.BAD_REQUEST
                    text = PageRefused(status).page
                except PageRefused as refused:
                    status, text = refused.status, refused.page
                body = text.encode()
                headers = [*HEADERS, ("Content-Length", str(len(body)))]
                writer.write(_head(status, headers) + body)
                writer.write_eof()
                while await reader.read(HEAD_BYTES):
                    pass  # a close with unread input would reset the connection
        finally:
            writer.close()

    async def _answer(self, request: h11.Request, body: bytes) -> str:
        """Return the page for a request. Raises PageRefused."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers
        }
        if self._server is None or headers.get("host") != self._host:
            raise PageRefused(HTTPStatus.MISDIRECTED_REQUEST)  # a page of others, named like this
        if headers.get("origin", f"http://{self._host}") != f"http://{self._host}":
            raise PageRefused(HTTPStatus.FORBIDDEN)
        path = request.target.decode("latin-1").removeprefix("/")
        method = request.method.decode("latin-1")
        try:
            return await self._pages.answer(self._principal, method, path, body)
        finally:
            self.close("")  # the socket, with its last page


async def _request(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> tuple[h11.Request, bytes]:
    """Read a request and its body. Raises PageRefused, h11.RemoteProtocolError, TooManyBlanks."""
    request: h11.Request | None = None
    body, incoming = b"", H11Input(connection)
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if not incoming.rest:
                data = await reader.read(HEAD_BYTES)
                if not data:
                    raise PageRefused(HTTPStatus.BAD_REQUEST)
                incoming.add(data)
            connection.receive_data(incoming.next())
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > BODY_BYTES:
                raise PageRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        elif isinstance(event, h11.EndOfMessage) and request is not None:
            return request, body
        else:
            raise PageRefused(HTTPStatus.BAD_REQUEST)


def _head(status: HTTPStatus, headers: list[tuple[str, str]]) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{n}: {v}" for n, v in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
