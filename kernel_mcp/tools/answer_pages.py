"""Pages on this machine's loopback on which a person types a secret that code asks for.

A form of the client is no place for it: MCP forbids that. A page has an address that cannot be
guessed, takes one answer, and is there while its question is open.
"""

from __future__ import annotations

import asyncio
import html
import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from urllib.parse import parse_qs

import anyio
import h11

from kernel_mcp.barriers import Barrier
from kernel_mcp.network.h11_input import H11Input, TooManyBlanks
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.questions import ANSWER_CHARS, Question
from kernel_mcp.units import KIB

HOST = "127.0.0.1"
MOST_PAGES = 100
REQUEST_S = 10.0
"""Seconds that a browser has for its request."""
HEAD_BYTES = 16 * KIB
BODY_BYTES = 4 * ANSWER_CHARS
FIELD = "answer"
HEADERS = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Cache-Control", "no-store"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'",
    ),
    ("Connection", "close"),
)
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>body{{font:1rem/1.5 system-ui;max-width:34rem;margin:4rem auto;padding:0 1rem}}
input,button{{font:inherit;padding:.4rem .6rem}}input{{width:20rem;max-width:100%}}</style>
<h1>{title}</h1>{body}</html>"""
FORM = """<p>{words}</p><form method="post">
<input type="password" name="answer" autocomplete="off" autofocus aria-label="Answer">
<button>Send</button></form>
<p>This goes to the code alone. The model sees it if the code prints it.</p>"""
SENT, LATE = "Sent: you can close this page.", "The code no longer waits for an answer."
NOTHING = "There is no question here. It was answered, or its code no longer waits."

Give = Callable[[str], Awaitable[bool]]
"""Hands the answer to the code; returns False if it no longer waits."""


@dataclass(frozen=True, slots=True)
class _Page:
    owner: str
    key: str
    words: str
    give: Give


class _Refused(Exception):
    """Raised for a request that is answered with this status."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class AnswerPages:
    """The pages of the open questions of one client. Its socket is open while there are any."""

    def __init__(self) -> None:
        self._pages: dict[str, _Page] = {}
        self._server: asyncio.Server | None = None
        self._opening = anyio.Lock()

    async def url_of(self, owner: str, question: Question, give: Give) -> str:
        """Return the address of the page of a question, which is made at the first call.

        `owner` and the question's key identify it. Raises OSError without a free port.
        """
        async with self._opening:
            if self._server is None:
                self._server = await asyncio.start_server(self._connected, HOST, 0)
        for path, page in self._pages.items():
            if (page.owner, page.key) == (owner, question.key):
                return self._url(path)
        if len(self._pages) >= MOST_PAGES:
            del self._pages[next(iter(self._pages))]
        path = secrets.token_urlsafe(32)
        self._pages[path] = _Page(owner, question.key, question.words, give)
        return self._url(path)

    def close(self, owner: str, key: str = "") -> None:
        """Remove the pages of an owner, or only that of a question."""
        self._pages = {
            path: page
            for path, page in self._pages.items()
            if page.owner != owner or key not in ("", page.key)
        }
        if not self._pages and self._server is not None:
            self._server.close()
            self._server = None

    def _url(self, path: str) -> str:
        return f"http://{self._host}/{path}"

    @property
    def _host(self) -> str:
        assert self._server is not None
        return f"{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        try:
            with Barrier("serving the page of a question"), anyio.move_on_after(REQUEST_S):
                try:
                    status, title, body = await self._answer(*await _request(connection, reader))
                except (_Refused, h11.RemoteProtocolError, TooManyBlanks) as error:
                    status = getattr(error, "status", HTTPStatus.BAD_REQUEST)
                    title, body = status.phrase, f"<p>{NOTHING}</p>"
                text = PAGE.format(title=title, body=body).encode()
                headers = [*HEADERS, ("Content-Length", str(len(text)))]
                writer.write(_head(status, headers) + text)
                writer.write_eof()
                while await reader.read(HEAD_BYTES):
                    pass  # a close with unread input would reset the connection
        finally:
            writer.close()

    async def _answer(self, request: h11.Request, body: bytes) -> tuple[HTTPStatus, str, str]:
        """Return the status, the title and the body of the page for a request. Raises _Refused."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers
        }
        if self._server is None or headers.get("host") != self._host:
            raise _Refused(HTTPStatus.MISDIRECTED_REQUEST)  # a page of others that names itself so
        path = request.target.decode("latin-1").removeprefix("/")
        page = self._pages.get(path)
        if page is None:
            raise _Refused(HTTPStatus.NOT_FOUND)
        if request.method == b"GET":
            return HTTPStatus.OK, "A question of code", FORM.format(words=html.escape(page.words))
        if request.method != b"POST":
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED)
        if headers.get("origin", f"http://{self._host}") != f"http://{self._host}":
            raise _Refused(HTTPStatus.FORBIDDEN)
        try:
            fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=4)
        except ValueError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST) from error
        if FIELD not in fields:
            raise _Refused(HTTPStatus.BAD_REQUEST)
        self.close(page.owner, page.key)
        given = await page.give(fields[FIELD][0])
        return HTTPStatus.OK, "A question of code", f"<p>{SENT if given else LATE}</p>"


async def _request(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> tuple[h11.Request, bytes]:
    """Read a request and its body. Raises _Refused, h11.RemoteProtocolError, TooManyBlanks."""
    request: h11.Request | None = None
    body, incoming = b"", H11Input(connection)
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if not incoming.rest:
                data = await reader.read(HEAD_BYTES)
                if not data:
                    raise _Refused(HTTPStatus.BAD_REQUEST)
                incoming.add(data)
            connection.receive_data(incoming.next())
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > BODY_BYTES:
                raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        elif isinstance(event, h11.EndOfMessage) and request is not None:
            return request, body
        else:
            raise _Refused(HTTPStatus.BAD_REQUEST)


def _head(status: HTTPStatus, headers: list[tuple[str, str]]) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{n}: {v}" for n, v in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
