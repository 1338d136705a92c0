"""What clients say first: heads of HTTP and hellos of TLS that can be read in one way only."""

from __future__ import annotations

import ssl

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.network.http import (
    HEAD_BYTES,
    HELLO_BYTES,
    BadHello,
    Head,
    HeadReader,
    Hello,
    Refused,
    Within,
)

pytestmark = pytest.mark.anyio

GET = "GET http://example.com/a?b=c HTTP/1.1\r\nHost: example.com\r\n"
POST = GET.replace("GET", "POST", 1)
CONNECT = "CONNECT example.com:443 HTTP/1.1\r\n"


def parsed(text: str, within: Within | None = None) -> Head:
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
    with pytest.raises(Refused) as refused:
        parsed(text)
    assert refused.value.status in (400, 417, 421)
    assert refused.value.verdict == "refused"


def test_a_connection_to_a_host_is_for_that_host_alone() -> None:
    within = Within("example.com", 8080, 80)
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
        with pytest.raises(Refused):
            parsed(text, within)


@given(st.binary(max_size=200), st.sampled_from([GET, POST]), st.integers(0, 80))
def test_what_is_taken_means_the_same_to_h11(noise: bytes, text: str, place: int) -> None:
    raw = text.encode()
    raw = raw[:place] + noise + raw[place:] + b"\r\n"
    if b"\r\n\r\n" in raw[:-4]:
        return
    try:
        head = Head.parse(raw)
    except Refused:
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
        with pytest.raises(Refused):
            await HeadReader(Said(*pieces)).next(lambda: None)


def test_a_refusal_is_in_the_line_that_clients_show() -> None:
    answer = Refused("no\r\nX: y\N{SNOWMAN} " + "long " * 100).answer()
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    client.receive_data(answer)
    response = client.next_event()
    assert isinstance(response, h11.Response)
    assert response.status_code == 403
    assert response.reason.startswith(b"no X: y? long long")
    assert (b"x", b"y") not in list(response.headers)


def hello(name: str | None = "example.com") -> bytes:
    """What OpenSSL sends first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    out = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return out.read()


def records(message: bytes, size: int) -> bytes:
    """A handshake message in records of `size` bytes."""
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + len(each).to_bytes(2, "big") + each for each in pieces)


def with_extension(data: bytes, kind: int, content: bytes) -> bytes:
    """The hello of OpenSSL with one more extension."""
    more = kind.to_bytes(2, "big") + len(content).to_bytes(2, "big") + content
    body = bytearray(data[9:])
    place = 2 + 32
    place += 1 + body[place]
    place += 2 + int.from_bytes(body[place : place + 2], "big")
    place += 1 + body[place]
    size = int.from_bytes(body[place : place + 2], "big") + len(more)
    body[place : place + 2] = size.to_bytes(2, "big")
    body += more
    return records(b"\x01" + len(body).to_bytes(3, "big") + bytes(body), 1 << 14)


@pytest.mark.parametrize("size", [1, 5, 100, 1 << 14])
@pytest.mark.parametrize("step", [1, 7, 1 << 14])
def test_the_server_name_is_found_in_whatever_records_and_pieces_it_comes(
    size: int, step: int
) -> None:
    data = records(hello("Example.com")[5:], size)
    found = Hello()
    names = [found.feed(data[at : at + step]) for at in range(0, len(data), step)]
    assert names[-1] == "example.com"
    assert set(names[:-1]) <= {None}
    assert found.raw == data


SNI = b"\0\x0e\0\0\x0bexample.com"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (with_extension(hello(), 0xFE0D, b"\0" * 20), "hides"),
        (with_extension(hello(), 0xFFCE, b"\0" * 20), "hides"),
        (with_extension(hello(), 0, SNI), "twice"),
        (with_extension(hello(None), 0, b"\0\x11" + SNI[2:] + b"\0\0\0"), "no way that is known"),
        (with_extension(hello(None), 0, b"\0\0"), "cut short"),
        (with_extension(hello(None), 0, b"\0\x03\0\0\0"), "no way that is known"),
        (with_extension(hello(None), 0, SNI.replace(b"example", b"ex\xe4mple")), "no way"),
        (records(b"\x02" + hello()[6:], 1 << 14), "ClientHello"),
        (records(b"\x01\xff\xff\xff" + b"x" * HELLO_BYTES * 2, 1 << 14), "too long"),
        (records(hello()[5:] + b"\x01\0\0\0", 1 << 14), "more follows"),
        (b"\x16\x03\x01\0\0" * 10, "speak TLS"),
        (b"\x16\x02\x01\0\x05hello", "speak TLS"),
        (b"\x80\x2e\x01\0\x02", "speak TLS"),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "speak TLS"),
        (b"GET / HTTP/1.1\r\n\r\n", "speak TLS"),
    ],
)
def test_no_hello_without_one_server_name_in_the_open(data: bytes, says: str) -> None:
    with pytest.raises(BadHello, match=says):
        Hello().feed(data)


def test_a_hello_may_name_no_server() -> None:
    assert Hello().feed(hello(None)) == ""


@given(st.binary(max_size=300), st.integers(0, 600), st.booleans())
def test_a_hello_in_any_state_is_read_or_refused(noise: bytes, place: int, put_in: bool) -> None:
    data = bytearray(BASE)
    data[place : place + (0 if put_in else len(noise))] = noise
    try:
        name = Hello().feed(bytes(data))
    except BadHello:
        return
    assert name is None or name.isascii()


BASE = hello()
