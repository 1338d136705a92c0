"""HTTPS to the hosts of secrets, ended and begun anew in the proxy: requests filled, replies read.

HTTP/1.1 alone, one connection to the host for each of the session's. The host is verified as any
client would. What a request asks to have compressed, in parts or as another protocol is not asked
for, as replies could not be searched then.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, TypeAlias, TypeVar

import anyio
import h11
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from kernel_mcp.network.authority import Authority
from kernel_mcp.network.secrets import Found, Headers, Scan, Secret, most_held, sought

WHOLE_BYTES = 64 * 1024
"""A reply that tells it is no longer than this is searched before any of it is passed on."""
HANDSHAKE_S = 20.0
_HEAD_BYTES = 64 * 1024
_PIECE_BYTES = 64 * 1024
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authorization", b"proxy-connection", b"te", b"upgrade"}
)
"""What is between two neighbours only (RFC 9110, 7.6.1)."""
_PARTS = frozenset({b"range", b"if-range", b"request-range"})
_NOT_ASKED = _HOP_BY_HOP | {b"accept-encoding", b"expect"}

_LOST = (
    anyio.EndOfStream,
    anyio.ClosedResourceError,
    anyio.BrokenResourceError,
    OSError,  # of TLS, too
    h11.ProtocolError,
)
"""One of the two went away or spoke something else: both lose their connections."""

Result = TypeVar("Result")
Event: TypeAlias = "h11.Event | type[h11.PAUSED]"


class Refused(Exception):
    """A request or a reply that is not passed on, with the status and words for the client."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Link(Protocol):
    """One of the two connections. Raises OSError."""

    async def read(self) -> bytes:
        """What has come; empty at the end."""

    async def write(self, data: bytes) -> None:
        """Send all of it."""

    def close(self) -> None:
        """Close it; twice, too."""


class _Stream(ByteStream):
    """A link as TLS takes one; `first` has been read of it."""

    def __init__(self, link: Link, first: bytes = b"") -> None:
        self._link = link
        self._first = first

    async def receive(self, max_bytes: int = _PIECE_BYTES) -> bytes:
        data, self._first = self._first or await self._link.read(), b""
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        await self._link.write(item)

    async def send_eof(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        self._link.close()


class Speech:
    """HTTP/1.1 over a stream, event by event. Its methods raise `_LOST`."""

    def __init__(self, stream: ByteStream, role: type[h11.CLIENT] | type[h11.SERVER]) -> None:
        self.stream = stream
        self.http = h11.Connection(role, max_incomplete_event_size=_HEAD_BYTES)

    async def receive(self) -> Event:
        """The next event; whoever waits for `100 Continue` gets it."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            if self.http.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[]))
            await self.more()
        return event  # type: ignore[return-value]

    async def more(self) -> bool:
        """Wait for bytes of any kind; False at the end."""
        try:
            data = await self.stream.receive(_PIECE_BYTES)
        except anyio.EndOfStream:
            data = b""
        self.http.receive_data(data)
        return bool(data)

    async def send(self, *events: h11.Event) -> None:
        """Write events as one piece."""
        pieces = [self.http.send(event) or b"" for event in events]
        if data := b"".join(pieces):
            await self.stream.send(data)

    @property
    def again(self) -> bool:
        """Whether another request and reply may follow these."""
        if self.http.our_state is h11.DONE and self.http.their_state is h11.DONE:
            self.http.start_next_cycle()
            return True
        return False


@dataclass
class Termination:
    """What serves connections of sessions to `host`, and keeps `secrets` out of the replies.

    serving    makes TLS as the host; `trust` verifies the real one
    refused    is told what was not passed on, in words, and `refused` or `failed`
    """

    host: str
    port: int
    secrets: Sequence[Secret]
    serving: ssl.SSLContext
    trust: ssl.SSLContext
    refused: Callable[[str, str], None]

    def __post_init__(self) -> None:
        self._sought = sought(self.secrets)

    async def run(self, session: Link, outside: Link, first: bytes = b"") -> None:
        """Pass requests of one connection until either end closes; then both are closed.

        `first` is what has been read from the session: the beginning of its TLS.
        """
        try:
            with suppress(TimeoutError, *_LOST):
                await self._run(_Stream(session, first), _Stream(outside))
        finally:
            session.close()
            outside.close()

    async def _run(self, session: ByteStream, outside: ByteStream) -> None:
        try:
            with anyio.fail_after(HANDSHAKE_S):
                inner = await TLSStream.wrap(
                    session, server_side=True, ssl_context=self.serving, standard_compatible=False
                )
        except (TimeoutError, *_LOST) as reason:
            why = f"the session makes no TLS connection to {self.host}: {_said(reason)}"
            self.refused(why, "failed")
            return
        client = Speech(inner, h11.SERVER)
        try:
            with anyio.fail_after(HANDSHAKE_S):
                outer = await TLSStream.wrap(
                    outside,
                    server_side=False,
                    hostname=self.host,
                    ssl_context=self.trust,
                    standard_compatible=False,
                )
        except (TimeoutError, *_LOST) as reason:
            why = f"{self.host} makes no TLS connection: {_said(reason)}"
            if isinstance(reason, ssl.SSLCertVerificationError):
                why = f"{self.host} is not who it says it is: {reason.verify_message}"
            refusal = Refused(HTTPStatus.BAD_GATEWAY, why)
            self._tell(refusal)
            await client.receive()
            await _answer(client, refusal)
            return
        host = Speech(outer, h11.CLIENT)
        while await self._exchange(client, host):
            pass

    async def _exchange(self, client: Speech, host: Speech) -> bool:
        """One request and its reply; whether another may follow."""
        try:
            # a host that closes, or says more than it was asked, ends the connection
            request = await _unless(client.receive, host.more)
            if not isinstance(request, h11.Request):
                return False
            await host.send(self._filled(request))
            await _unless(lambda: self._reply(request, client, host), lambda: _upload(client, host))
        except h11.RemoteProtocolError as error:
            refusal = Refused(
                HTTPStatus(error.error_status_hint), f"this is no proper HTTP: {error}"
            )
            self._tell(refusal)
            await _answer(client, refusal)
            return False
        except Refused as refusal:
            self._tell(refusal)
            await _answer(client, refusal)
            return False
        return host.again and client.again

    def _tell(self, refusal: Refused) -> None:
        failed = refusal.status is HTTPStatus.BAD_GATEWAY
        self.refused(str(refusal), "failed" if failed else "refused")

    def _filled(self, request: h11.Request) -> h11.Request:
        """A request as the host gets it. Raises Refused."""
        named = dict(request.headers)
        if named.get(b"host", b"").decode("latin-1").lower() not in (
            self.host,
            f"{self.host}:{self.port}",
        ):
            raise Refused(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"this is a connection to {self.host}: the Host of its requests has to be that",
            )
        if request.http_version != b"1.1":
            raise Refused(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1.1 is spoken here")
        if not request.target.startswith(b"/") and request.target != b"*":
            raise Refused(HTTPStatus.BAD_REQUEST, "a request in a tunnel begins with its path")
        if b"content-length" in named and b"transfer-encoding" in named:
            raise Refused(HTTPStatus.BAD_REQUEST, "a request has one length")
        if b"websocket" in named.get(b"upgrade", b"").lower():
            raise Refused(
                HTTPStatus.NOT_IMPLEMENTED,
                f"no websockets to {self.host}: there is a secret for it, and what they carry is "
                "not searched for it",
            )
        given: Headers = request.headers.raw_items()
        headers = [(name, text) for name, text in given if name.lower() not in _NOT_ASKED]
        filled = [(name, self._fill(name, text)) for name, text in headers]
        if filled != headers:  # a part of a reply may hold a part of the value
            filled = [each for each in filled if each[0].lower() not in _PARTS]
        filled.append((b"Accept-Encoding", b"identity"))
        return h11.Request(method=request.method, target=request.target, headers=filled)

    def _fill(self, name: bytes, text: bytes) -> bytes:
        for secret in self.secrets:
            text = secret.fill(name, text)
        return text

    async def _reply(self, request: h11.Request, client: Speech, host: Speech) -> None:
        """Pass a reply on. Raises Refused as long as nothing of it was."""
        scan = Scan(self._sought, most_held(self.secrets))
        sent = False
        left = float("inf")
        try:
            response = await host.receive()
            while isinstance(response, h11.InformationalResponse):
                response = await host.receive()
            if not isinstance(response, h11.Response):
                raise Refused(HTTPStatus.BAD_GATEWAY, f"{self.host} closed and has not answered")
            left = _length(response)
            whole = left <= WHOLE_BYTES
            waiting: list[h11.Event] = [self._checked(request, response)]
            event: Event = response
            while not isinstance(event, h11.EndOfMessage):
                event = await host.receive()
                if isinstance(event, h11.Data):
                    waiting.append(h11.Data(data=scan.feed(bytes(event.data))))
                    if whole:
                        continue
                elif isinstance(event, h11.EndOfMessage):
                    trailers: Headers = event.headers.raw_items()
                    self._search(trailers)
                    waiting.append(h11.Data(data=scan.end()))
                    waiting.append(h11.EndOfMessage(headers=trailers))
                else:
                    raise anyio.EndOfStream
                left -= sum(len(each.data) for each in waiting if isinstance(each, h11.Data))
                sent = True
                await client.send(*waiting)
                waiting = []
        except Found as secret:
            words = f"a reply held the value of the secret {secret} and was cut off"
            self.refused(words, "refused")
            words = (
                f"a reply of {self.host} held the value of {secret}, which code does not get to "
                "see, and was cut off"
            )
            if not sent:
                raise Refused(HTTPStatus.BAD_GATEWAY, words) from None
            await _cut(client, words, left)
            raise anyio.EndOfStream from None
        except h11.RemoteProtocolError as error:
            if sent:
                raise anyio.EndOfStream from None
            words = f"{self.host} does not answer in proper HTTP: {_unquoted(error)}"
            raise Refused(HTTPStatus.BAD_GATEWAY, words) from None

    def _checked(self, request: h11.Request, response: h11.Response) -> h11.Response:
        """A reply's head as the session gets it. Raises Refused, Found."""
        headers: Headers = response.headers.raw_items()
        self._search(headers, bytes(response.reason))
        named = dict(response.headers)
        codings = [text for name, text in response.headers if name == b"content-encoding"]
        coding = b", ".join(codings).decode("latin-1").strip().lower()
        bare = request.method == b"HEAD" or response.status_code in (204, 304)
        if coding not in ("", "identity") and not bare:
            raise Refused(
                HTTPStatus.BAD_GATEWAY,
                f"{self.host} answers compressed ({coding}) though it is asked not to, and what is "
                "compressed cannot be searched for its secret",
            )
        if b"content-length" in named and b"transfer-encoding" in named:
            raise Refused(HTTPStatus.BAD_GATEWAY, f"{self.host} gives two lengths of one reply")
        headers = [each for each in headers if each[0].lower() not in _HOP_BY_HOP]
        if b"close" in named.get(b"connection", b"").lower():
            headers.append((b"Connection", b"close"))
        return h11.Response(
            status_code=response.status_code, headers=headers, reason=response.reason
        )

    def _search(self, headers: Headers, reason: bytes = b"") -> None:
        """Raise Found for what is in a head or in trailers."""
        texts = [reason, *(part for each in headers for part in each)]
        Scan(self._sought, 0).feed(b"\n".join(texts))


async def _unless(
    work: Callable[[], Awaitable[Result]], beside: Callable[[], Awaitable[object]]
) -> Result:
    """What `work` returns or raises; EndOfStream when `beside` has come to its end before that."""
    results: list[Result] = []
    failure: Exception = anyio.EndOfStream()

    async def watch() -> None:
        with suppress(*_LOST):
            await beside()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            results.append(await work())
        except (Refused, *_LOST) as error:
            failure = error
        tasks.cancel_scope.cancel()
    if results:
        return results[0]
    raise failure


async def _upload(client: Speech, host: Speech) -> None:
    """Pass a request's body on; then return when the client has gone."""
    event: Event | None = None
    while not isinstance(event, h11.EndOfMessage):
        event = await client.receive()
        if not isinstance(event, h11.Data | h11.EndOfMessage):
            return
        passed = h11.Data(data=bytes(event.data)) if isinstance(event, h11.Data) else event
        try:
            await host.send(passed)
        except _LOST:  # it may have answered before
            await anyio.sleep_forever()
    if await client.more():  # the next request
        await anyio.sleep_forever()


def _unquoted(error: h11.RemoteProtocolError) -> str:
    """Why h11 takes no reply, without the bytes of it that it quotes: nobody has searched those."""
    return re.split(r":? *(?:bytearray\()?b['\"]", str(error), maxsplit=1)[0]


def _said(reason: Exception) -> str:
    return str(reason) or type(reason).__name__


def _length(response: h11.Response) -> float:
    """Bytes that a reply says it has; infinite where it does not."""
    named = dict(response.headers)
    return int(named[b"content-length"]) if b"content-length" in named else float("inf")


async def _answer(client: Speech, refusal: Refused) -> None:
    """Say why, where nothing has been said yet; the connection is closed after it."""
    if client.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    text = f"kernel-mcp: {refusal}\n".encode()
    headers = [
        ("Content-Type", "text/plain; charset=utf-8"),
        ("Content-Length", str(len(text))),
        ("Connection", "close"),
    ]
    reason = refusal.status.phrase
    response = h11.Response(status_code=refusal.status, headers=headers, reason=reason)
    await client.send(response, h11.Data(data=text), h11.EndOfMessage())


async def _cut(client: Speech, words: str, left: float) -> None:
    """Say why where there is room; without its end no client takes the reply for whole."""
    text = f"\nkernel-mcp: {words}\n".encode()
    await client.send(h11.Data(data=text[: max(0, int(min(left, len(text) + 1)) - 1)]))


class Terminations:
    """Those of all hosts with secrets; `trust` are the authorities that real hosts have, as PEM."""

    def __init__(self, secrets: Sequence[Secret], trust: str) -> None:
        """Raises ssl.SSLError for what is no certificate."""
        self._secrets = secrets
        self._authority = Authority([each.host for each in secrets])
        self._trust = ssl.create_default_context(cadata=trust)

    @property
    def certificate(self) -> str:
        """What kernels have to trust, as PEM."""
        return self._authority.certificate

    def of(self, host: str, port: int, refused: Callable[[str, str], None]) -> Termination | None:
        """That of connections to `host`; None where there is no secret for it."""
        secrets = [each for each in self._secrets if each.host == host]
        if not secrets:
            return None
        serving = self._authority.context(host)
        return Termination(host, port, secrets, serving, self._trust, refused)


def preload() -> None:
    """Load what anyio loads at its first use, while this process may read the files."""
    anyio.run(anyio.sleep, 0)
