"""An issuer's metadata: where it is looked for, and what is accepted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kernel_mcp.identity import discovery
from kernel_mcp.identity.discovery import (
    MOST_BYTES,
    Unreachable,
    documents,
    fetch_json,
    keys_address,
)
from tests.unit.identity.signing import ISSUER, FakeIssuer

pytestmark = pytest.mark.anyio


def test_documents_are_looked_for_where_the_specification_says() -> None:
    assert documents("https://a.example/") == (
        "https://a.example/.well-known/oauth-authorization-server",
        "https://a.example/.well-known/openid-configuration",
    )
    assert documents("https://a.example:8443/realms/x") == (
        "https://a.example:8443/.well-known/oauth-authorization-server/realms/x",
        "https://a.example:8443/.well-known/openid-configuration/realms/x",
        "https://a.example:8443/realms/x/.well-known/openid-configuration",
    )


async def test_the_next_place_is_tried_where_nothing_is() -> None:
    server = FakeIssuer()
    page = server.pages.popitem()[1]
    server.pages[f"{ISSUER}/.well-known/openid-configuration"] = page
    assert await keys_address(ISSUER, server.fetch) == f"{ISSUER}/jwks"
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"issuer": "https://evil.example", "jwks_uri": f"{ISSUER}/jwks"}, "is of the issuer"),
        ({"issuer": f"{ISSUER}/", "jwks_uri": f"{ISSUER}/jwks"}, "is of the issuer"),
        ({"jwks_uri": f"{ISSUER}/jwks"}, "is of the issuer 'None'"),
        ({"issuer": ISSUER}, "names no `jwks_uri`"),
        ({"issuer": ISSUER, "jwks_uri": 5}, "names no `jwks_uri`"),
        ({"issuer": ISSUER, "jwks_uri": "http://as.example/jwks"}, "which is not https"),
        ({"issuer": ISSUER, "jwks_uri": "http://127.0.0.1/jwks"}, "which is not https"),
        ({"issuer": ISSUER, "jwks_uri": "file:///etc/passwd"}, "which is not https"),
        ({"issuer": ISSUER, "jwks_uri": "https://u:p@as.example/"}, "which is not https"),
        ({"issuer": ISSUER, "jwks_uri": "https://["}, "which is not https"),
    ],
    ids=range(10),
)
async def test_a_document_that_is_wrong_is_not_used(document: dict[str, Any], reason: str) -> None:
    server = FakeIssuer()
    server.pages = {documents(ISSUER)[0]: document}
    with pytest.raises(Unreachable) as caught:
        await keys_address(ISSUER, server.fetch)
    assert reason in str(caught.value)


async def test_a_server_that_is_not_there_is_asked_once() -> None:
    server = FakeIssuer()
    server.down = "no route"
    with pytest.raises(Unreachable, match="no route"):
        await keys_address(ISSUER, server.fetch)
    assert len(server.asked) == 1


class Pages(BaseHTTPRequestHandler):
    """Answers that a fetch has to bear."""

    asked: list[str]
    over: threading.Event

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == "/good":
            self._answer(200, json.dumps({"a": 1}).encode())
        elif self.path == "/away":
            self._answer(302, b"", ("location", "/good"))
        elif self.path == "/packed":
            self._answer(200, b"x", ("content-encoding", "gzip"))
        elif self.path == "/large":
            self._answer(200, b"[" * (MOST_BYTES + 1))
        elif self.path == "/nested":
            self._answer(200, b"[" * 100_000)
        elif self.path == "/list":
            self._answer(200, b"[]")
        elif self.path == "/slow":
            self.over.wait()
        else:
            self._answer(int(self.path[1:]), b"")

    def _answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("content-length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: object = "", size: object = "") -> None:
        """Nowhere."""


@pytest.fixture
def pages() -> Iterator[tuple[str, list[str]]]:
    """The address of a server on loopback, and the list of what it is asked."""
    asked: list[str] = []
    over = threading.Event()
    handler = type("Own", (Pages,), {"asked": asked, "over": over})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        over.set()
        server.shutdown()
        thread.join()


async def test_a_document_is_fetched(
    pages: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # not for loopback
    assert await fetch_json(f"{pages[0]}/good") == {"a": 1}


@pytest.mark.parametrize(
    ("path", "reason", "absent"),
    [
        ("/away", "answers 302", False),
        ("/404", "answers 404", True),
        ("/429", "answers 429", False),
        ("/500", "answers 500", False),
        ("/packed", "compressed", False),
        ("/large", "has more than 256 KiB", False),
        ("/nested", "is no JSON object", False),
        ("/list", "is no JSON object", False),
    ],
)
async def test_answers_that_are_no_document(
    pages: tuple[str, list[str]], path: str, reason: str, absent: bool
) -> None:
    with pytest.raises(Unreachable) as caught:
        await fetch_json(pages[0] + path)
    assert reason in str(caught.value)
    assert caught.value.absent is absent
    assert pages[1] == [path]


async def test_a_server_that_says_nothing_is_given_up(
    pages: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "FETCH_S", 0.05)
    with pytest.raises(Unreachable, match=r"did not answer|Timeout"):
        await fetch_json(f"{pages[0]}/slow")


async def test_a_port_on_which_nobody_listens_is_a_reason() -> None:
    with pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:1/x: "):
        await fetch_json("http://127.0.0.1:1/x")
