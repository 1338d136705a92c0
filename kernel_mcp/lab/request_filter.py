"""Filter the requests to JupyterLab's server: only those of its own page are answered.

Jupyter servers have more endpoints than a page with notebooks needs: files of kernel specs,
exports, builds of JupyterLab itself. Some do not check the origin of a request, and browsers send
the cookie to other servers on loopback, too.
"""

# tornado is typed, but not all of its classes are.
# mypy: disable-error-code="misc"

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from tornado.httputil import HTTPServerRequest
from tornado.routing import Matcher, Rule
from tornado.web import Application, ErrorHandler

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Host names that mean this machine."""
_READ = re.compile(
    r"/|/lab(/(tree|workspaces)(/.*)?)?|/login|/logout|/favicon\.ico|/static/.*|/lab/extensions/.*"
    r"|/lab/api/(build|settings|themes|translations|workspaces|licenses)(/.*)?"
    r"|/api/(me|status|kernelspecs|events/subscribe|collaboration/room/.*|fileid/.*)"
    r"|/api(/contents(/.*)?|/sessions(/[^/]+)?|/kernels(/[^/]+(/channels)?)?)?"
)
_WRITE = {
    "POST": re.compile(
        r"/login|/api/sessions|/api/kernels(/[^/]+/interrupt)?"
        r"|/api/contents(/(?!.*/trust$).*)?"
    ),
    "PUT": re.compile(
        r"/lab/api/(settings|workspaces)/.*|/api/collaboration/session/.*|/api/contents/.*"
    ),
    "PATCH": re.compile(r"/api/(contents|sessions)/.*"),
    "DELETE": re.compile(r"/lab/api/workspaces/.*|/api/(contents|sessions|kernels)/.*"),
}


def needed(method: str, path: str) -> bool:
    """Return True if JupyterLab's page needs this request; `path` is the undecoded one."""
    pattern = _READ if method in ("GET", "HEAD") else _WRITE.get(method)
    return pattern is not None and pattern.fullmatch(path) is not None


def own(host: str, origin: str | None) -> bool:
    """Return True if `host` means this machine and `origin` is absent or the server's own."""
    if urlsplit(f"//{host}").hostname not in LOCAL:
        return False
    return origin is None or origin.lower() == f"http://{host.lower()}"


def guard(application: Application) -> None:
    """Refuse foreign and unneeded requests before they reach the server's handlers."""
    rules: list[Any] = application.default_router.rules
    rules[:0] = [
        Rule(_Foreign(), ErrorHandler, {"status_code": 403}),
        Rule(_Unneeded(), ErrorHandler, {"status_code": 404}),
    ]


class _Foreign(Matcher):
    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        return None if own(request.host, request.headers.get("Origin")) else {}


class _Unneeded(Matcher):
    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        return None if needed(request.method or "", request.path) else {}
