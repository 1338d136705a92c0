"""Strict parsing of request heads, and the errors that refuse a connection or request.

Requests that two programs may interpret differently are refused before they are passed to h11. They
have repeated or contradicting lengths, folded lines, bare line feeds, or a Host header that differs
from the target.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol, TypeAlias

from kernel_mcp.network.rules import BadHost, join_port, plain_host, split_port
from kernel_mcp.records import dataclass

HEAD_BYTES = 32 * 1024
MOST_HEADERS = 200
_PHRASE = 220
"""Longest reason phrase, in characters: many clients show nothing else of a refusal."""

Headers: TypeAlias = "tuple[tuple[bytes, bytes], ...]"
"""Pairs of name, in lower case, and value."""

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rb"(%s) ([!-~]+) HTTP/1\.([01])" % _TOKEN)
_HEADER_NAME = re.compile(_TOKEN)
_VALUE_BYTES = bytes([*b"\t", *range(0x20, 0x7F), *range(0x80, 0x100)])
_ABSOLUTE = re.compile(rb"http://([^/?#@\\]+)([/?][^#]*)?", re.IGNORECASE)
_BARE_FEED = re.compile(rb"(?<!\r)\n")
_END = b"\r\n\r\n"
HOP = frozenset(
    [
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"proxy-connection", b"te", b"trailer", b"upgrade", b"http2-settings"),
    ]
)
"""Hop-by-hop headers, which are not forwarded (RFC 9110, 7.6.1)."""
_CONNECTION_WORDS = frozenset([*HOP, b"close", b"trailers", b""])


class ProxyRefusal(Exception):
    """A connection or request is refused or has failed; `message` is the reason for the client.

    status   HTTP status of the answer
    verdict  `refused` by a rule, or `failed` because of the peer or the network
    """

    def __init__(self, message: str, status: int = 403, verdict: str = "refused") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.verdict = verdict

    def answer(self) -> bytes:
        """Return an HTTP response, with `message` as body and reason, that ends the connection."""
        line = " ".join(self.message.split()).encode("ascii", "replace")
        if len(line) > _PHRASE:
            line = line[: _PHRASE - 3] + b"..."
        body = f"kernel-mcp: {self.message}\n".encode()
        return (
            b"HTTP/1.1 %d %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n"
            b"Connection: close\r\n\r\n%s" % (self.status, line, len(body), body)
        )


class ByteStream(Protocol):
    """Bytes to and from one side: a `tunnel.SocketStream`, or `tls.Tls` over one."""

    received: int
    sent: int

    async def read(self) -> bytes:
        """Return the next bytes, as soon as there are any; empty at the end. Raises OSError."""

    async def write(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError."""

    @property
    def stale(self) -> bool:
        """True if an idle connection cannot be reused."""

    async def shut(self) -> None:
        """Close the sending side only. Raises OSError."""

    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True, slots=True)
class TunnelHost:
    """The one host that requests inside a CONNECT may name; `default_port` is its scheme's."""

    host: str
    port: int
    default_port: int


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request that has been checked strictly.

    target     path and query; empty for CONNECT
    headers    as received; `sent_headers` returns those for the host
    authority  value of the Host header for the host
    websocket  True if it asks for an upgrade to a websocket
    modern     True for HTTP/1.1, False for HTTP/1.0
    raw        the received bytes, with the empty line
    """

    method: bytes
    host: str
    port: int
    target: bytes
    headers: Headers
    authority: bytes
    websocket: bool
    modern: bool
    raw: bytes

    @property
    def connect(self) -> bool:
        """True for a CONNECT request, which asks for a tunnel."""
        return self.method == b"CONNECT"

    def sent_headers(self) -> Headers:
        """Return the headers to forward: Host first, hop-by-hop headers removed."""
        kept = [(b"host", self.authority)]
        kept += [each for each in self.headers if each[0] not in HOP and each[0] != b"host"]
        if self.websocket:
            kept += [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
        return tuple(kept)

    @classmethod
    def parse(cls, raw: bytes, tunnel: TunnelHost | None = None) -> Head:
        """Parse `raw`, which includes the empty line. Raises ProxyRefusal.

        It is a request to a proxy, or one inside a connection to the host `tunnel`.
        """
        first, *lines = raw.removesuffix(_END).split(b"\r\n")
        matched = _REQUEST_LINE.fullmatch(first)
        if matched is None:
            raise bad_request("its first line is no request of HTTP/1.1")
        method, target, minor = matched.groups()
        if len(lines) > MOST_HEADERS:
            raise bad_request(f"it has more than {MOST_HEADERS} headers", 431)
        headers = tuple(map(_header, lines))
        modern = minor == b"1"
        connection = _check_framing(headers, modern=modern)
        host, port, path, default = _request_target(method, target, tunnel)
        _check_host(headers, host, port, default, needed=modern and method != b"CONNECT")
        lengths = [value for name, value in headers if name == b"content-length"]
        bodiless = not values_of(headers, b"transfer-encoding") and lengths in ([], [b"0"])
        if method == b"CONNECT" and not bodiless:
            raise bad_request("a CONNECT has no body")
        websocket = (
            (method, modern, bodiless) == (b"GET", True, True)
            and b"upgrade" in connection
            and [value.lower() for value in values_of(headers, b"upgrade")] == [b"websocket"]
        )
        authority = join_port(host, None if port == default else port).encode("ascii")
        return cls(method, host, port, path, headers, authority, websocket, modern, raw)


def bad_request(reason: str, status: int = 400) -> ProxyRefusal:
    return ProxyRefusal(
        f"the request cannot be passed on: {reason}. Send it as a usual client would", status
    )


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not _HEADER_NAME.fullmatch(name) or value.translate(None, _VALUE_BYTES):
        raise bad_request("one of its headers is none, or goes over several lines")
    return name.lower(), value.strip(b" \t")


def values_of(headers: Headers, name: bytes) -> list[bytes]:
    return [value for each, value in headers if each == name]


def _check_framing(headers: Headers, *, modern: bool) -> frozenset[bytes]:
    """Return the options of Connection.

    Raises ProxyRefusal unless the body's length is unambiguous.
    """
    lengths, codings = (
        values_of(headers, b"content-length"),
        values_of(headers, b"transfer-encoding"),
    )
    if len(lengths) > 1 or any(not re.fullmatch(rb"[0-9]{1,18}", each) for each in lengths):
        raise bad_request("its Content-Length is not one number")
    if lengths and codings:
        raise bad_request("it has both Content-Length and Transfer-Encoding")
    if codings and (not modern or [each.lower() for each in codings] != [b"chunked"]):
        raise bad_request("its Transfer-Encoding is not chunked alone")
    words = frozenset(
        word.strip().lower()
        for value in values_of(headers, b"connection")
        for word in value.split(b",")
    )
    if not words <= _CONNECTION_WORDS:
        raise bad_request("its Connection header names others that are to be left out")
    expected = [each.lower() for each in values_of(headers, b"expect")]
    if expected not in ([], [b"100-continue"]):
        raise bad_request("it expects what is not known here", 417)
    return words


def _request_target(
    method: bytes, target: bytes, tunnel: TunnelHost | None
) -> tuple[str, int, bytes, int]:
    """Return host, port, path and default port of a request line. Raises ProxyRefusal."""
    if method == b"CONNECT":
        if tunnel is not None:
            raise bad_request("a CONNECT within a connection")
        host, port = _authority(target)
        if port is None:
            raise bad_request("a CONNECT names host and port")
        return host, port, b"", 443
    matched = _ABSOLUTE.fullmatch(target)
    if matched is not None:
        default = 80
        host, port = _authority(matched[1])
        path = matched[2] or b"/"
        path = path if path.startswith(b"/") else b"/" + path
    elif tunnel is not None and (target.startswith(b"/") or target == b"*"):
        host, port, path, default = tunnel.host, tunnel.port, target, tunnel.default_port
    elif tunnel is not None:
        raise bad_request("within a connection to a host a request begins with its path")
    else:
        raise bad_request(
            "this is a proxy: it takes http:// addresses without user and password, and CONNECT "
            "for all others"
        )
    port = default if port is None else port
    if tunnel is not None and (host, port) != (tunnel.host, tunnel.port):
        raise bad_request(f"the connection is for {tunnel.host}:{tunnel.port}", 421)
    return host, port, path, default


def _authority(text: bytes) -> tuple[str, int | None]:
    try:
        host, port = split_port(text.decode("ascii"))
        return plain_host(host), port
    except (BadHost, UnicodeDecodeError) as reason:
        raise bad_request(str(reason)) from None


def _check_host(headers: Headers, host: str, port: int, default: int, *, needed: bool) -> None:
    """Raise ProxyRefusal for several Host headers, a missing needed one, or one that differs."""
    said = values_of(headers, b"host")
    if len(said) > 1 or (needed and not said):
        raise bad_request("it does not have one Host header")
    for value in said:
        name, number = _authority(value)
        if name != host or number not in (port, None if port == default else port):
            raise bad_request(f"its Host header names another place than {host}:{port}", 421)


class HeadReader:
    """Reads request heads from a stream; `rest` is what was read beyond the last one."""

    def __init__(self, stream: ByteStream, rest: bytes = b"") -> None:
        self._stream = stream
        self.rest = rest

    async def next(self, begun: Callable[[], None]) -> bytes | None:
        """Return the next head with its empty line, or None at the end of the stream.

        `begun` is called when its first byte has arrived. Raises ProxyRefusal, OSError.
        """
        data = bytearray(self.rest)
        looked = 0
        if data:
            begun()
        while True:
            start = max(looked - 3, 0)
            end = data.find(_END, start)
            if bare := _BARE_FEED.search(data, max(looked - 1, 0), end if end >= 0 else len(data)):
                if bare.start():
                    raise bad_request("it has a line that ends without a carriage return")
                raise bad_request("it begins with an empty line")
            if end >= 0:
                break
            looked = len(data)
            if looked > HEAD_BYTES:
                raise bad_request(f"its head is longer than {HEAD_BYTES} bytes", 431)
            piece = await self._stream.read()
            if not piece:
                if data:
                    raise bad_request("it ends within its head")
                return None
            if not data:
                begun()
            data += piece
        end += len(_END)
        if end > HEAD_BYTES:
            raise bad_request(f"its head is longer than {HEAD_BYTES} bytes", 431)
        self.rest = bytes(data[end:])
        return bytes(data[:end])
