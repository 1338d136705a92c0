"""Heads of requests that can be read in one way only."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.network.http import (
    HEAD_BYTES,
    Head,
    HeadReader,
    ProxyRefusal,
    TunnelHost,
)

pytestmark = pytest.mark.anyio

GET = "GET http://example.com/a?b=c HTTP/1.1\r\nHost: example.com\r\n"
POST = GET.replace("GET", "POST", 1)
CONNECT = "CONNECT example.com:443 HTTP/1.1\r\n"


def parsed(text: str, within: TunnelHost | None = None) -> Head:
    return Head.parse(f"{text}\r\n".encode("latin-1"), within)


def test_a_request_to_a_proxy_becomes_one_to_its_host() -> None:
    head = parsed(GET + "Proxy-Authorization: Basic eA==\r\nX-A: b\r\nConnection: keep-alive\r\n")
    assert (head.method, head.host, head.port, head.target) == (
        b"GET",
        "example.com",
        80,
        b"/a?b=c",
    )
    assert head.sent_headers() == ((b"host", b"example.com"), (b"x-a", b"b"))
    for target, path in (
        ("http://example.com", b"/"),
        ("HTTP://EXAMPLE.com.:80?q", b"/?q"),
        ("http://example.com/http://other.example/", b"/http://other.example/"),
        ("http://example.com//x@y", b"//x@y"),
    ):
        head = parsed(f"GET {target} HTTP/1.1\r\nHost: Example.com\r\n")
        assert (head.host, head.port, head.target) == ("example.com", 80, path)
    head = parsed("GET http://[2606:4700::1111]:8080/ HTTP/1.0\r\n")
    assert (head.host, head.port, head.authority) == (
        *("2606:4700::1111", 8080),
        b"[2606:4700::1111]:8080",
    )


def test_a_connect_names_host_and_port() -> None:
    for more in ("", "Host: example.com:443\r\n", "Host: example.com\r\n", "Content-Length: 0\r\n"):
        head = parsed(CONNECT + more)
        assert head.connect
        assert (head.host, head.port) == ("example.com", 443)


def test_only_a_websocket_may_change_the_protocol() -> None:
    asked = "Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
    head = parsed(GET + asked)
    assert head.websocket
    assert head.sent_headers()[-2:] == ((b"connection", b"Upgrade"), (b"upgrade", b"websocket"))
    assert not parsed(GET + "Connection: Upgrade\r\nUpgrade: h2c\r\n").websocket
    assert not parsed(GET + "Upgrade: websocket\r\n").websocket
    assert not parsed(POST + "Content-Length: 3\r\n" + asked).websocket
    assert all(name != b"upgrade" for name, _ in parsed(GET + "Upgrade: h2c\r\n").sent_headers())


SMUGGLED = [
    POST + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
    POST + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
    POST + "Content-Length: 3\r\nContent-Length: 3\r\n",
    POST + "Content-Length: 3\r\nContent-Length: 4\r\n",
    POST + "Content-Length: 3, 3\r\n",
    POST + "Content-Length: +3\r\n",
    POST + "Content-Length: 0x3\r\n",
    POST + "Content-Length: 3 3\r\n",
    POST + "Content-Length:\r\n",
    POST + "Content-Length: -1\r\n",
    POST + "Content-Length: 1" + "0" * 20 + "\r\n",
    POST + "Content-Length : 3\r\n",
    POST + "Content-Length\t: 3\r\n",
    POST + " Content-Length: 3\r\n",
    POST + "X: y\r\n Content-Length: 3\r\n",
    POST + "X: y\r\n\tz\r\n",
    POST + "Content-Length: 3\n",
    POST + "X: a\rContent-Length: 3\r\n",
    POST + "X: a\nContent-Length: 3\r\n",
    POST + "X: a\0b\r\n",
    POST + "X: a\x7fb\r\n",
    POST + "X\r\n",
    POST + ": x\r\n",
    POST + "X y: z\r\n",
    POST + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    POST + "Transfer-Encoding: identity\r\n",
    POST + "Transfer-Encoding: gzip, chunked\r\n",
    POST + "Transfer-Encoding: chunked, identity\r\n",
    POST + "Transfer-Encoding: xchunked\r\n",
    POST + "Transfer-Encoding: \x0bchunked\r\n",
    POST + "Transfer_Encoding: chunked\r\nTransfer-Encoding: x\r\n",
    POST.replace("1.1", "1.0") + "Transfer-Encoding: chunked\r\n",
    POST + "Connection: content-length\r\nContent-Length: 3\r\n",
    POST + "Connection: close, host\r\n",
    POST + "Expect: something\r\n",
    GET + "Host: example.com\r\n",
    GET + "Host: other.example\r\n",
    GET.replace("Host: example.com", "Host: other.example"),
    GET.replace("Host: example.com", "Host: example.com:8080"),
    GET.replace("Host: example.com", "Host: example.com, other.example"),
    GET.replace("Host: example.com", "Host: user@example.com"),
    GET.replace("Host: example.com", "Host:"),
    GET.replace("Host: example.com\r\n", ""),
    GET.replace("example.com/a", "example.com\\@other.example/a"),
    GET.replace("http://", "http://user:pass@"),
    GET.replace("http://example.com", ""),
    GET.replace("http://", "https://"),
    GET.replace("http://", "ftp://"),
    GET.replace("http://", "//"),
    GET.replace("http://example.com/", "http:///"),
    GET.replace("example.com/a", "example.com:/a"),
    GET.replace("example.com/a", "example.com:080x/a"),
    GET.replace("example.com/a", "example.com#/a"),
    GET.replace("example.com/a", "ex%61mple.com/a"),
    GET.replace("GET ", "GET  "),
    GET.replace("GET ", " GET "),
    GET.replace("GET ", "GET\t"),
    GET.replace("HTTP/1.1", "HTTP/1.1 "),
    GET.replace("HTTP/1.1", "HTTP/2.0"),
    GET.replace("HTTP/1.1", "HTTP/0.9"),
    GET.replace(" HTTP/1.1", ""),
    GET.replace("GET", "G(T"),
    GET.replace("?b=c", "?b=\xe4"),
    "\r\n" + GET,
    CONNECT + "Content-Length: 3\r\n",
    CONNECT + "Transfer-Encoding: chunked\r\n",
    CONNECT + "Host: other.example:443\r\n",
    CONNECT + "Host: example.com:80\r\n",
    CONNECT.replace(":443", ""),
    CONNECT.replace("example.com:443", "http://example.com:443/"),
    CONNECT.replace("example.com:443", "user@example.com:443"),
    CONNECT.replace("example.com:443", "example.com:443/"),
    CONNECT.replace("example.com", "2130706433"),
    CONNECT.replace("example.com", "0x7f.1"),
    CONNECT.replace("example.com", "[fe80::1%25lo]"),
    CONNECT.replace("example.com", "::1"),
]


@pytest.mark.parametrize("text", SMUGGLED)
def test_what_can_be_read_in_two_ways_is_refused(text: str) -> None:
    with pytest.raises(ProxyRefusal) as refused:
        parsed(text)
    assert refused.value.status in (400, 417, 421)
    assert refused.value.verdict == "refused"


def test_a_connection_to_a_host_is_for_that_host_alone() -> None:
    within = TunnelHost("example.com", 8080, 80)
    own = "GET /a HTTP/1.1\r\nHost: example.com:8080\r\n"
    assert parsed(own, within).authority == b"example.com:8080"
    assert parsed(own.replace("/a", "http://example.com:8080/a"), within).target == b"/a"
    for text in (
        own.replace("Host: example.com", "Host: other.example"),
        own.replace(":8080", ""),
        own.replace("/a", "http://other.example/a"),
        own.replace("Host: example.com:8080\r\n", ""),
        CONNECT,
    ):
        with pytest.raises(ProxyRefusal):
            parsed(text, within)


@given(st.binary(max_size=200), st.sampled_from([GET, POST]), st.integers(0, 80))
def test_what_is_taken_means_the_same_to_h11(noise: bytes, text: str, place: int) -> None:
    raw = text.encode()
    raw = raw[:place] + noise + raw[place:] + b"\r\n"
    if b"\r\n\r\n" in raw[:-4]:
        return
    try:
        head = Head.parse(raw)
    except ProxyRefusal:
        return
    server = h11.Connection(h11.SERVER)
    server.receive_data(raw)
    event = server.next_event()
    assert isinstance(event, h11.Request)
    assert event.method == head.method
    assert tuple(event.headers) == head.headers


class Said:
    """A stream that says these pieces."""

    received = sent = 0
    stale = False

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    async def read(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    async def write(self, data: bytes) -> None:
        raise NotImplementedError

    async def shut(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


async def test_heads_are_taken_off_a_stream_in_whatever_pieces_they_come() -> None:
    whole = b"GET / HTTP/1.1\r\nA: b\r\n\r\n"
    begun: list[int] = []
    reader = HeadReader(Said(*(bytes([each]) for each in whole * 2), b"rest"))
    assert await reader.next(lambda: begun.append(1)) == whole
    assert await reader.next(lambda: begun.append(1)) == whole
    assert len(begun) == 2
    reader = HeadReader(Said(whole + whole + b"rest"))
    assert await reader.next(lambda: None) == whole
    assert await reader.next(lambda: None) == whole
    assert reader.rest == b"rest"
    assert await HeadReader(Said()).next(lambda: begun.append(1)) is None
    assert len(begun) == 2


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\n\n",
        b"GET / HTTP/1.1\r\nA: b\n\r\n\r\n",
        b"\nGET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"b" * HEAD_BYTES + b"\r\n\r\n",
        b"x" * (2 * HEAD_BYTES),
        b"GET / HTTP/1.1\r\nA: b\r\n",
    ],
)
async def test_no_head_has_bare_line_feeds_or_no_end(data: bytes) -> None:
    for size in (len(data), 1000, 7):
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        with pytest.raises(ProxyRefusal):
            await HeadReader(Said(*pieces)).next(lambda: None)


def test_a_refusal_is_in_the_line_that_clients_show() -> None:
    answer = ProxyRefusal("no\r\nX: y\N{SNOWMAN} " + "long " * 100).answer()
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    client.receive_data(answer)
    response = client.next_event()
    assert isinstance(response, h11.Response)
    assert response.status_code == 403
    assert response.reason.startswith(b"no X: y? long long")
    assert (b"x", b"y") not in list(response.headers)
