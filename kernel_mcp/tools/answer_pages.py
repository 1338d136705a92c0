"""Pages on which a person types a secret that code asks for.

A form of the client is no place for it: MCP forbids that. A page has an address that cannot be
guessed, takes one answer, and is there while its question is open.
"""

from __future__ import annotations

import html
import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Protocol
from urllib.parse import parse_qs

from kernel_mcp.records import dataclass
from kernel_mcp.sessions.questions import ANSWER_CHARS, Question

MOST_PAGES = 100
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
TITLE = "A question of code"
SENT, LATE = "Sent: you can close this page.", "The code no longer waits for an answer."
NOTHING = "There is no question here. It was answered, or its code no longer waits."

Give = Callable[[str], Awaitable[bool]]
"""Hands the answer to the code; returns False if it no longer waits."""


class PageRefused(Exception):
    """Raised for a request that is answered with this status."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status

    @property
    def page(self) -> str:
        """The page for the person."""
        return PAGE.format(title=self.status.phrase, body=f"<p>{NOTHING}</p>")


class Pages(Protocol):
    """The pages of the clients of one transport."""

    async def url_of(self, asked: Asked, question: Question, give: Give) -> str:
        """Return the address of the page of a question, which is made at the first call.

        Raises OSError if it cannot be served.
        """

    def close(self, owner: str, key: str = "") -> None:
        """Remove the pages of an owner, or only that of a question."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The person asked: `owner` and the question's key identify a page of this principal."""

    principal: str
    owner: str


@dataclass(frozen=True, slots=True)
class _Page:
    asked: Asked
    key: str
    words: str
    give: Give


class AnswerPages:
    """The pages of open questions, by their paths."""

    def __init__(self) -> None:
        self._pages: dict[str, _Page] = {}

    def __bool__(self) -> bool:
        return bool(self._pages)

    def path_of(self, asked: Asked, question: Question, give: Give) -> str:
        """Return the path of the page of a question, which is made at the first call."""
        for path, page in self._pages.items():
            if (page.asked, page.key) == (asked, question.key):
                return path
        if len(self._pages) >= MOST_PAGES:
            del self._pages[next(iter(self._pages))]
        path = secrets.token_urlsafe(32)
        self._pages[path] = _Page(asked, question.key, question.words, give)
        return path

    def close(self, owner: str, key: str = "") -> None:
        """See `Pages`."""
        self._pages = {
            path: page
            for path, page in self._pages.items()
            if page.asked.owner != owner or key not in ("", page.key)
        }

    async def answer(self, principal: str, method: str, path: str, body: bytes) -> str:
        """Return the page for a request of a principal. Raises PageRefused."""
        page = self._pages.get(path)
        if page is None or page.asked.principal != principal:
            raise PageRefused(HTTPStatus.NOT_FOUND)
        if method == "GET":
            return PAGE.format(title=TITLE, body=FORM.format(words=html.escape(page.words)))
        if method != "POST":
            raise PageRefused(HTTPStatus.METHOD_NOT_ALLOWED)
        if len(body) > BODY_BYTES:
            raise PageRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        try:
            fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=4)
        except ValueError as error:
            raise PageRefused(HTTPStatus.BAD_REQUEST) from error
        if FIELD not in fields:
            raise PageRefused(HTTPStatus.BAD_REQUEST)
        self.close(page.asked.owner, page.key)
        given = await page.give(fields[FIELD][0])
        return PAGE.format(title=TITLE, body=f"<p>{SENT if given else LATE}</p>")
