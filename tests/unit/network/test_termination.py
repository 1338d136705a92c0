"""HTTPS through the proxy's own TLS: what hosts get, and what sessions get to see."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPResponse, HTTPSConnection, IncompleteRead
from socket import socket, socketpair

import pytest

from kernel_mcp.network.authority import Authority
from kernel_mcp.network.secrets import Secret, placeholder
from kernel_mcp.network.termination import Termination
from tests import tls_hosts

NAME = "api.test"
VALUE = "s3cr3t-value/of+the=host"
HELD = placeholder(len(VALUE))
SECRET = Secret("TOKEN", NAME, "Authorization", VALUE, HELD)
CHUNKED = "Transfer-Encoding: chunked"
BEARER = {"Authorization": f"Bearer {HELD}"}


class Link:
    """A socket as the proxy has one."""

    def __init__(self, sock: socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    async def read(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._sock, 65536)

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    def close(self) -> None:
        self._sock.close()


@dataclass
class World:
    """A host with a secret, and connections to it that are terminated on their way."""

    host: tls_hosts.Host
    authority: Authority
    trust: ssl.SSLContext
    loop: asyncio.AbstractEventLoop
    refused: list[tuple[str, str]]

    def refuse(self, words: str, verdict: str) -> None:
        self.refused.append((verdict, words))

    @contextlib.contextmanager
    def connected(self, trusted: str = "") -> Iterator[HTTPSConnection]:
        """A client of Python's own with a connection through a termination."""
        ours, theirs = socketpair()
        outside = socket()
        outside.connect(("127.0.0.1", self.host.port))
        termination = Termination(
            NAME, 443, [SECRET], self.authority.context(NAME), self.trust, self.refuse
        )
        running = asyncio.run_coroutine_threadsafe(
            termination.run(Link(theirs), Link(outside)), self.loop
        )
        context = ssl.create_default_context(cadata=trusted or self.authority.certificate)
        client = HTTPSConnection(NAME, context=context)
        client.sock = ours
        try:
            client.sock = context.wrap_socket(ours, server_hostname=NAME)
            yield client
        finally:
            client.close()
            running.result(20)

    def get(self, path: str, headers: dict[str, str] = BEARER) -> tuple[HTTPResponse, bytes]:
        """One request on a connection of its own."""
        with self.connected() as client:
            client.request("GET", path, headers=headers)
            response = client.getresponse()
            return response, response.read()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    real = Authority([NAME])
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    with tls_hosts.serving(NAME, real) as host:
        yield World(host, Authority([NAME]), tls_hosts.trust_of(real), loop, [])
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_host_gets_the_value_in_its_header_and_the_session_hears_of_it_only_changed(
    world: World,
) -> None:
    _, body = world.get("/length")
    assert json.loads(body)["digest"] == hashlib.sha256(f"Bearer {VALUE}".encode()).hexdigest()
    basic = base64.b64encode(f"user:{HELD}".encode()).decode()
    _, body = world.get("/length", {"Authorization": f"Basic {basic}"})
    sent = "Basic " + base64.b64encode(f"user:{VALUE}".encode()).decode()
    assert json.loads(body)["digest"] == hashlib.sha256(sent.encode()).hexdigest()


def test_it_stays_a_placeholder_in_paths_queries_bodies_and_other_headers(world: World) -> None:
    with world.connected() as client:
        client.request("POST", f"/{HELD}?key={HELD}", HELD, {"X-Key": HELD, "Cookie": HELD})
        assert client.getresponse().read() == b"no such service"
    path, headers, body = world.host.seen[-1]
    assert VALUE not in f"{path}{headers}{body!r}"
    assert path == f"/{HELD}?key={HELD}"
    assert (headers["X-Key"], headers["Cookie"], body) == (HELD, HELD, HELD.encode())


def test_hosts_are_asked_for_nothing_compressed_and_for_whole_replies(world: World) -> None:
    asked = {**BEARER, "Accept-Encoding": "gzip, br", "Range": "bytes=0-3", "TE": "trailers"}
    world.get("/length", asked)
    headers = world.host.seen[-1][1]
    assert headers["Accept-Encoding"] == "identity"
    assert not {"Range", "TE", "Connection"} & set(headers)
    world.get("/length", {"Range": "bytes=0-3"})
    assert world.host.seen[-1][1]["Range"] == "bytes=0-3"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/echo", "held the value of TOKEN"),
        ("/base64", "held the value of TOKEN"),
        ("/header", "held the value of TOKEN"),
        ("/malformed?header", "in proper HTTP: illegal header line\n"),
        ("/malformed?value", "in proper HTTP: "),
        ("/malformed?chunk", "in proper HTTP: illegal chunk header\n"),
        ("/malformed?status", "in proper HTTP: illegal status line\n"),
        ("/gzip", "compressed (gzip)"),
        ("/twice", "compressed (gzip, identity)"),
    ],
)
def test_a_reply_that_tells_the_value_is_replaced_by_words(
    world: World, path: str, words: str
) -> None:
    world.refused.clear()
    response, body = world.get(path)
    assert response.status == 502
    assert words in body.decode()
    assert VALUE not in body.decode() + str(response.headers)
    verdict, told = world.refused[0]
    assert verdict == ("refused" if "held" in words else "failed")
    assert VALUE not in told


@pytest.mark.parametrize("path", ["/large", "/split", "/trailer"])
def test_a_reply_that_has_begun_is_cut_off_and_no_client_takes_it_for_whole(
    world: World, path: str
) -> None:
    with pytest.raises((IncompleteRead, ConnectionError)) as cut:
        world.get(path)
    if isinstance(cut.value, IncompleteRead):
        assert VALUE[:3].encode() not in cut.value.partial


def test_many_requests_share_a_connection_and_large_bodies_pass(world: World) -> None:
    body = bytes(range(256)) * 80_000
    digest = hashlib.sha256(body).hexdigest()
    with world.connected() as client:
        for chunked in (False, True):
            given = (body[start : start + 99_999] for start in range(0, len(body), 99_999))
            client.request(
                "PUT", "/length", given if chunked else body, BEARER, encode_chunked=chunked
            )
            answer = json.loads(client.getresponse().read())
            assert (answer["length"], answer["body"]) == (len(body), digest)
        client.request("HEAD", "/large")
        assert client.getresponse().read() == b""
        client.request("POST", "/length", b"body", {**BEARER, "Expect": "100-continue"})
        assert json.loads(client.getresponse().read())["length"] == 4
        client.request("GET", "/events")
        response = client.getresponse()
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.read().count(b"data: ") == 5


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        (["GET / HTTP/1.1", "Host: other.test"], 421, "connection to api.test"),
        (["GET https://api.test/ HTTP/1.1", "Host: api.test"], 400, "begins with its path"),
        (["GET / HTTP/1.1", "Host: api.test", "Host: b.test"], 400, "Host"),
        (["PUT / HTTP/1.1", "Host: api.test", "Content-Length: 1", CHUNKED], 400, "one length"),
        (["GET / HTTP/1.0", "Host: api.test"], 505, "HTTP/1.1"),
        (["GET / HTTP/1.1", "Host: api.test", "Upgrade: websocket"], 501, "no websockets"),
        (["nonsense"], 400, "no proper HTTP"),
    ],
)
def test_requests_that_could_carry_it_elsewhere_are_refused_in_words(
    world: World, lines: list[str], status: int, words: str
) -> None:
    before = len(world.host.seen)
    with world.connected() as client:
        client.sock.sendall("\r\n".join([*lines, "", ""]).encode())
        response = HTTPResponse(client.sock)
        response.begin()
        assert (response.status, words in response.read().decode()) == (status, True)
    assert len(world.host.seen) == before
    assert words in world.refused[-1][1]


def test_a_host_that_cannot_prove_its_name_gets_nothing(world: World) -> None:
    before = len(world.host.seen)
    stranger = World(world.host, world.authority, ssl.create_default_context(), world.loop, [])
    response, body = stranger.get("/length")
    assert response.status == 502
    assert "api.test is not who it says it is" in body.decode()
    assert [verdict for verdict, _ in stranger.refused] == ["failed"]
    assert len(world.host.seen) == before


def test_a_session_that_does_not_trust_the_proxy_is_told_of(world: World) -> None:
    stranger = Authority([NAME]).certificate
    with pytest.raises(ssl.SSLCertVerificationError), world.connected(trusted=stranger):
        pass
    verdict, words = world.refused[-1]
    assert verdict == "failed"
    assert words.startswith(f"the session makes no TLS connection to {NAME}: ")
