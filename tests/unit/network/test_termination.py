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
from dataclasses import dataclass, replace
from http.client import HTTPResponse, HTTPSConnection, IncompleteRead
from socket import SHUT_WR, create_connection, socket

import pytest

from kernel_mcp.network.authority import Authority
from kernel_mcp.network.connection import Listener, ProxiedConnection, SessionTraffic
from kernel_mcp.network.rules import Rules
from kernel_mcp.network.secrets import Secret, authorities, placeholder
from kernel_mcp.network.termination import Terminations
from kernel_mcp.network.tls import Tls
from kernel_mcp.network.tunnel import ConnectionDeadline, SocketStream, StepQueue
from tests import tls_hosts
from tests.unit.network.near import Near, Told

pytestmark = pytest.mark.anyio

NAME = "api.test"
VALUE = "s3cr3t-value/of+the=host"
HELD = placeholder(len(VALUE))
SECRET = Secret("TOKEN", NAME, "Authorization", VALUE, HELD)
CHUNKED = "Transfer-Encoding: chunked"
BEARER = {"Authorization": f"Bearer {HELD}"}


@dataclass
class World:
    """A host with a secret, and connections of a session to it."""

    host: tls_hosts.Host
    terminations: Terminations
    loop: asyncio.AbstractEventLoop
    records: Told
    real: str
    """The certificate of the host's own authority."""
    rules: str = NAME
    port: int = 443

    @property
    def refused(self) -> list[tuple[str, str]]:
        """The reports of requests and connections that were not passed on."""
        return [each[1:] for each in self.records.all if each[1] != "ok"]

    async def _serve(self, theirs: socket) -> None:
        session = SessionTraffic("", self.loop)
        listener = Listener(1, theirs, Rules.parse([self.rules]), None, session)
        dialer = Near(lambda: create_connection(("127.0.0.1", self.host.port)))
        connection = ProxiedConnection(listener, theirs, dialer, self.records, self.terminations.of)
        await connection.task

    @contextlib.contextmanager
    def tunnelled(self) -> Iterator[socket]:
        """A connection that has got a tunnel to the host."""
        with socket() as listening, socket() as ours:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            ours.connect(listening.getsockname())
            theirs, _ = listening.accept()
            ours.settimeout(60)
            running = asyncio.run_coroutine_threadsafe(self._serve(theirs), self.loop)
            try:
                place = f"{NAME}:{self.port}"
                ours.sendall(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
                assert ours.recv(1000).startswith(b"HTTP/1.1 200 ")
                yield ours
            finally:
                ours.close()
                running.result(20)

    @contextlib.contextmanager
    def connected(self, trusted: str = "") -> Iterator[HTTPSConnection]:
        """A client of Python's own with a connection through a termination."""
        with self.tunnelled() as ours:
            trusted = trusted or self.terminations.authority.certificate
            context = ssl.create_default_context(cadata=trusted)
            client = HTTPSConnection(NAME, context=context)
            client.sock = context.wrap_socket(ours.dup(), server_hostname=NAME)
            try:
                yield client
            finally:
                client.close()

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
        yield World(host, Terminations([SECRET], real.certificate), loop, Told(), real.certificate)
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
    assert (headers["x-key"], headers["cookie"], body) == (HELD, HELD, HELD.encode())


def test_hosts_are_asked_for_nothing_compressed_and_for_whole_replies(world: World) -> None:
    asked = {**BEARER, "Accept-Encoding": "gzip, br", "Range": "bytes=0-3", "TE": "trailers"}
    world.get("/length", asked)
    headers = world.host.seen[-1][1]
    assert headers["accept-encoding"] == "identity"
    assert not {"range", "te", "connection"} & {name.lower() for name in headers}
    world.get("/length", {"Range": "bytes=0-3"})
    assert world.host.seen[-1][1]["range"] == "bytes=0-3"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/echo", "held the value of the secret TOKEN"),
        ("/base64", "held the value of the secret TOKEN"),
        ("/header", "held the value of the secret TOKEN"),
        ("/malformed?header", "in proper HTTP: illegal header line"),
        ("/malformed?value", "in proper HTTP: "),
        ("/malformed?chunk", "in proper HTTP: illegal chunk header"),
        ("/malformed?status", "in proper HTTP: illegal status line"),
        ("/gzip", "compressed (gzip)"),
        ("/twice", "compressed (gzip, identity)"),
    ],
)
def test_a_reply_that_tells_the_value_is_replaced_by_words(
    world: World, path: str, words: str
) -> None:
    world.records.all.clear()
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
        (["GET / HTTP/1.1", "Host: other.test"], 421, "names another place than api.test:443"),
        (["GET https://api.test/ HTTP/1.1", "Host: api.test"], 400, "begins with its path"),
        (["GET / HTTP/1.1", "Host: api.test", "Host: b.test"], 400, "Host"),
        (
            ["PUT / HTTP/1.1", "Host: api.test", "Content-Length: 1", CHUNKED],
            400,
            "both Content-Length",
        ),
        (["GET / HTTP/1.0", "Host: api.test"], 505, "HTTP/1.1"),
        (["GET / HTTP/1.1", "Host: api.test", "Upgrade: websocket"], 501, "no websockets"),
        (["nonsense"], 400, "no request of HTTP/1.1"),
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
    strict = Terminations([SECRET], authorities({}))
    stranger = replace(world, terminations=strict, records=Told())
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


@pytest.mark.parametrize("by", ["tls", "tcp"])
async def test_a_session_that_says_nothing_more_gets_its_answer(world: World, by: str) -> None:
    with world.tunnelled() as ours:
        loop = asyncio.get_running_loop()
        ours.setblocking(False)
        wire = SocketStream(ours.dup(), StepQueue(loop), ConnectionDeadline(loop))
        trust = ssl.create_default_context(cadata=world.terminations.authority.certificate)
        tls = Tls(wire, trust, NAME)
        await tls.begin()
        await tls.write(f"GET /large HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode())
        await (tls if by == "tls" else wire).shut()
        said = b""
        while data := await tls.read():
            said += data
        assert said.endswith(b"x" * 200_000 + b"y" * 10)
        tls.close()


def test_a_host_that_has_closed_is_asked_anew(world: World) -> None:
    with world.connected() as client:
        for _ in range(2):
            client.request("GET", "/closing", headers=BEARER)
            response = client.getresponse()
            assert (response.status, response.read()) == (200, b"closing")
            assert response.headers["connection"] is None


@pytest.mark.parametrize(
    ("rules", "port", "filled"),
    [(NAME, 443, True), (f"{NAME}:8443", 8443, True), ("*.test:8443", 8443, False)],
)
def test_it_is_put_into_https_on_443_and_on_ports_that_are_named_with_the_host(
    world: World, rules: str, port: int, filled: bool
) -> None:
    there = replace(world, rules=rules, port=port, records=Told())
    with there.connected(trusted=world.terminations.authority.certificate + world.real) as client:
        client.request("GET", "/length", headers={**BEARER, "Host": f"{NAME}:{port}"})
        digest = json.loads(client.getresponse().read())["digest"]
    sent = f"Bearer {VALUE if filled else HELD}"
    assert digest == hashlib.sha256(sent.encode()).hexdigest()


@pytest.mark.parametrize(
    ("rules", "port", "words"),
    [
        (f"{NAME}:8080", 8080, ""),
        ("*.test:8080,*.test", 8080, f"use https://{NAME}"),
        (NAME, 80, f"use https://{NAME}"),
        (NAME, 443, f"use https://{NAME}"),
    ],
)
def test_without_tls_only_a_named_port_gets_what_comes_as_it_is(
    world: World, rules: str, port: int, words: str
) -> None:
    there = replace(world, rules=rules, port=port, records=Told())
    before = len(world.host.seen)
    with there.tunnelled() as ours:
        ours.sendall(f"GET / HTTP/1.1\r\nHost: {NAME}\r\nAuthorization: {HELD}\r\n\r\n".encode())
        ours.shutdown(SHUT_WR)
        said = b"".join(iter(lambda: ours.recv(1000), b"")).decode()
    assert words in said
    assert any(verdict == "refused" for verdict, _ in there.refused) == bool(words)
    assert len(world.host.seen) == before
