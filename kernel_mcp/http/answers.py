"""Pages on which a person answers questions of code, behind the login of an HTTP server.

A browser has no bearer token, so it logs in by HTTP's basic scheme: the password is the person's
token, the user name is ignored. A page is served to the principal whose code asks, and no other.
"""

from __future__ import annotations

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kernel_mcp.http.connections import state_of
from kernel_mcp.http.gate import ANSWERS
from kernel_mcp.sessions.questions import Question
from kernel_mcp.tools.answer_pages import HEADERS, AnswerPages, Asked, Give, PageRefused


class HttpPages:
    """The pages of a tenant pool, below `url`."""

    def __init__(self, url: str) -> None:
        self._pages = AnswerPages()
        self._url = url
        self.route = Route(f"{ANSWERS}{{path}}", self._answer, methods=["GET", "POST"])

    async def url_of(self, asked: Asked, question: Question, give: Give) -> str:
        """See `Pages`."""
        return f"{self._url}{ANSWERS}{self._pages.path_of(asked, question, give)}"

    def close(self, owner: str, key: str = "") -> None:
        """See `Pages`."""
        self._pages.close(owner, key)

    async def _answer(self, request: Request) -> Response:
        who, path = state_of(request.scope)["principal"], request.path_params["path"]
        status = HTTPStatus.OK
        try:
            text = await self._pages.answer(who.name, request.method, path, await request.body())
        except PageRefused as refused:
            status, text = refused.status, refused.page
        headers = {name.lower(): value for name, value in HEADERS}
        return Response(text, status, headers)
