"""Relay of requests and responses between a session and hosts, framed by h11 on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import h11

from kernel_mcp.network.h11_input import H11Input, TooManyBlanks
from kernel_mcp.network.http import (
    HEAD_BYTES,
    HOP,
    ByteStream,
    Head,
    Headers,
    HeadReader,
    ProxyRefusal,
    TunnelHost,
    bad_request,
    values_of,
)
from kernel_mcp.records import dataclass

_STEP_EVENTS = 32
"""Body events, each perhaps of one byte, that are passed on in one write."""


class IncompleteResponse(Exception):
    """A response that has begun cannot be completed; the connection has to be closed."""

    def __init__(self, refusal: ProxyRefusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(slots=True)
class ExchangeResult:
    """How an exchange has ended.

    client_reusable, host_reusable  True if that connection can carry another request
    switched                        True if the connection has been upgraded to a websocket
    """

    client_reusable: bool = False
    host_reusable: bool = False
    switched: bool = False


class ResponseFilter:
    """Filter of one response; this one passes it on unchanged.

    buffer_bytes  a response of at most this Content-Length is passed on in one piece or not at all
    """

    buffer_bytes = -1

    def begin(self, response: h11.Response) -> None:
        """Check the head of the response. Raises ProxyRefusal."""

    def pass_on(self, data: bytes) -> bytes:
        """Filter the next piece of the body; return what can be passed on now.

        Raises ProxyRefusal.
        """
        return data

    def end(self, trailers: Headers) -> bytes:  # subclasses use the argument
        """Check the trailers, which are not forwarded; return the body's rest.

        Raises ProxyRefusal.
        """
        return b""


class HostFilter:
    """Filters for requests and responses of one host; these change nothing."""

    def request_headers(self, head: Head) -> Headers:
        """Return the headers to send to the host. Raises ProxyRefusal."""
        return head.sent_headers()

    def response_filter(self, head: Head) -> ResponseFilter:  # subclasses use the argument
        """Return the filter for the response to this request."""
        return ResponseFilter()


class _Intake:
    """Feeds h11 from a stream, piece by piece."""

    def __init__(self, connection: h11.Connection, stream: ByteStream, rest: bytes = b"") -> None:
        self._connection, self._stream = connection, stream
        self._input = H11Input(connection)
        self._input.add(rest)

    @property
    def rest(self) -> bytes:
        """Received bytes that h11 does not have yet."""
        return self._input.rest

    async def take(self) -> None:
        """Feed one piece to h11; read from the stream first if none is left.

        Raises OSError, TooManyBlanks.
        """
        if not self._input.rest:
            self._input.add(await self._stream.read())
        self._connection.receive_data(self._input.next())


class Exchange:
    """One request and its response, between a client and a host."""

    def __init__(
        self,
        client: ByteStream,
        host: ByteStream,
        head: Head,
        rest: bytes,
        headers: Headers,
        response_filter: ResponseFilter,
    ) -> None:
        self._client, self._host, self._head = client, host, head
        self._headers, self._filter = headers, response_filter
        self._down = h11.Connection(h11.SERVER, HEAD_BYTES)
        self._up = h11.Connection(h11.CLIENT, HEAD_BYTES)
        self._down.receive_data(head.raw)
        self._sent = _Intake(self._down, client, rest)
        self._received = _Intake(self._up, host)
        self._before = client.sent
        self._buffered = False
        self._left = float("inf")
        """Bytes of the response body still to be sent; infinite without Content-Length."""

    async def run(self) -> ExchangeResult:
        """Pass the request to the host and the response to the client.

        Raises ProxyRefusal while nothing of the response has been sent, IncompleteResponse
        afterwards, and OSError if the client's connection breaks.
        """
        try:
            self._down.next_event()
        except h11.RemoteProtocolError as reason:
            raise bad_request(str(reason)) from None
        request = h11.Request(
            method=self._head.method, target=self._head.target, headers=list(self._headers)
        )
        try:
            await self._host.write(self._up.send(request))
        except OSError as reason:
            raise self._failure(f"the connection broke: {reason}") from None
        tasks = [asyncio.ensure_future(each) for each in (self._upload(), self._download())]
        upload, download = tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if upload.done():
                upload.result()
            await download
        except (ProxyRefusal, h11.LocalProtocolError) as reason:
            refusal = reason if isinstance(reason, ProxyRefusal) else self._protocol_failure(reason)
            if self._client.sent == self._before:
                raise refusal from None
            if download.done():
                await self._end_short(refusal)
            raise IncompleteResponse(refusal) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._result()

    @property
    def rest(self) -> bytes:
        """Bytes that the client has sent after its request."""
        return self._down.trailing_data[0] + self._sent.rest

    @property
    def host_rest(self) -> bytes:
        """Bytes that the host has sent after its response."""
        return self._up.trailing_data[0] + self._received.rest

    def _result(self) -> ExchangeResult:
        if self._up.their_state is h11.SWITCHED_PROTOCOL:
            return ExchangeResult(switched=True)
        return ExchangeResult(
            client_reusable=self._down.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE},
            host_reusable=self._up.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}
            and not self.host_rest,
        )

    async def _upload(self) -> None:
        while True:
            try:
                event = self._down.next_event()
            except h11.RemoteProtocolError as reason:
                raise bad_request(str(reason)) from None
            if event is h11.NEED_DATA:
                try:
                    await self._sent.take()
                except TooManyBlanks:
                    raise bad_request("it has a long run of blanks between its chunks") from None
                continue
            data = self._up.send(event) if isinstance(event, h11.Data) else None
            if isinstance(event, h11.EndOfMessage):
                data = self._up.send(h11.EndOfMessage())
            if data is None:
                return
            try:
                await self._host.write(data)
            except OSError:
                return  # its response says why, if there is one
            if isinstance(event, h11.EndOfMessage):
                return

    async def _download(self) -> None:
        out = bytearray()
        count = 0
        while True:
            try:
                event = self._up.next_event()
            except h11.RemoteProtocolError as reason:
                words = f"it does not answer in proper HTTP: {_unquoted(reason)}"
                raise self._failure(words) from None
            count += 1
            may_wait = event is not h11.NEED_DATA and count % _STEP_EVENTS
            if out and not may_wait and not self._buffered:
                await self._write(out)
            if event is h11.NEED_DATA:
                await self._take_answer()
            elif isinstance(event, h11.InformationalResponse):
                out += self._interim(event)
                if event.status_code == 101:
                    await self._write(out)
                    return
            elif isinstance(event, h11.Response):
                out += self._begin(event)
            elif isinstance(event, h11.Data):
                out += self._pass(self._filter.pass_on(bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage):
                out += self._pass(self._filter.end(tuple(event.headers.raw_items())))
                out += self._down.send(h11.EndOfMessage())
                await self._write(out)
                return
            else:
                raise self._failure("it ended the connection without an answer")

    async def _take_answer(self) -> None:
        try:
            await self._received.take()
        except OSError as reason:
            raise self._failure(f"the connection broke: {reason}") from None
        except TooManyBlanks:
            words = "it does not answer in proper HTTP: a header is a long run of blanks"
            raise self._failure(words) from None

    def _interim(self, event: h11.InformationalResponse) -> bytes:
        """Return the bytes to send for an interim response (1xx); empty if it is not forwarded.

        Forwarded are an upgrade to a websocket, and a 100 that the client waits for. Raises
        ProxyRefusal for another upgrade.
        """
        if event.status_code == 101:
            if [value.lower() for value in values_of(tuple(event.headers), b"upgrade")] != [
                b"websocket"
            ]:
                raise self._failure("it changes to a protocol that nobody asked for")
            kept = [each for each in event.headers if each[0] not in HOP]
            kept += [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
            switch = h11.InformationalResponse(status_code=101, headers=kept, reason=event.reason)
            return self._down.send(switch)
        if event.status_code == 100 and self._down.they_are_waiting_for_100_continue:
            return self._down.send(h11.InformationalResponse(status_code=100, headers=[]))
        return b""

    def _begin(self, event: h11.Response) -> bytes:
        self._filter.begin(event)
        headers = tuple(event.headers)
        lengths = values_of(headers, b"content-length")
        if lengths and values_of(headers, b"transfer-encoding"):
            raise self._failure("its answer has both Content-Length and Transfer-Encoding")
        if lengths:
            self._left = int(lengths[0])
        self._buffered = self._left <= self._filter.buffer_bytes
        headers = tuple(each for each in headers if each[0] not in HOP)
        answer = h11.Response(
            status_code=event.status_code, headers=list(headers), reason=event.reason
        )
        return self._down.send(answer)

    def _pass(self, data: bytes) -> bytes:
        self._left -= len(data)
        return self._down.send(h11.Data(data=data)) if data else b""

    async def _write(self, out: bytearray) -> None:
        data = bytes(out)
        out.clear()
        await self._client.write(data)
        if self._down.our_state is h11.SEND_RESPONSE:  # only interim responses so far
            self._before = self._client.sent

    async def _end_short(self, refusal: ProxyRefusal) -> None:
        """Append the reason to the body, as far as Content-Length allows.

        The response is left without its end, so that clients detect that it is incomplete.
        """
        if self._down.our_state is h11.SEND_BODY:
            text = f"\nkernel-mcp: {refusal.message}\n".encode()
            room = min(self._left, len(text) + 1) - 1
            with suppress(OSError):
                await self._client.write(self._pass(text[: max(0, int(room))]))

    def _protocol_failure(self, reason: h11.LocalProtocolError) -> ProxyRefusal:
        return self._failure(f"its answer cannot be passed on: {_unquoted(reason)}")

    def _failure(self, words: str) -> ProxyRefusal:
        words = f"{self._head.host}: {words}. Try again, or use another host"
        return ProxyRefusal(words, 502, "failed")


def _unquoted(error: Exception) -> str:
    """Return h11's error text without the bytes that it quotes.

    Those have not been searched for secrets.
    """
    text = str(error).partition("b'")[0].partition('b"')[0]
    return text.removesuffix("bytearray(").rstrip(" ").removesuffix(":")


class Relay:
    """Relay of all requests of one client, to any host, or to the one host `tunnel`.

    connect      opens a stream to a host and port
    on_phase     called with what is awaited next: `request`, `head`, `host` or `answer`
    on_exchange  called after each exchange, with host and port, the refusal or None, the host's
                 stream or None, and the bytes sent and received on it before
    """

    def __init__(
        self,
        client: ByteStream,
        connect: Callable[[str, int], Awaitable[ByteStream]],
        *,
        on_phase: Callable[[str], None],
        on_exchange: Callable[
            [tuple[str, int], ProxyRefusal | None, ByteStream | None, tuple[int, int]], None
        ],
        tunnel: TunnelHost | None = None,
        rest: bytes = b"",
        host: ByteStream | None = None,
        host_filter: HostFilter,
    ) -> None:
        self._client = client
        self._connect = connect
        self._on_phase = on_phase
        self._on_exchange = on_exchange
        self._tunnel = tunnel
        self._filter = host_filter
        self._heads = HeadReader(client, rest)
        self.host = host
        self._connected_to = None if tunnel is None else (tunnel.host, tunnel.port)
        self.exchange: Exchange | None = None

    @property
    def rest(self) -> bytes:
        """Bytes that were read beyond the last head or request."""
        return self._heads.rest

    async def run(self) -> Head | None:
        """Serve requests. Return the CONNECT or the websocket upgrade that ends them.

        Returns None when the client has closed, or its connection cannot be reused. Raises
        ProxyRefusal, IncompleteResponse, OSError.
        """
        while True:
            self._on_phase("request")
            raw = await self._heads.next(lambda: self._on_phase("head"))
            if raw is None:
                return None
            head = Head.parse(raw, self._tunnel)
            if head.connect:
                return head
            result = await self._exchange_one(head)
            if result.switched:
                return head
            if not result.host_reusable:
                self.close_host()
            if not result.client_reusable:
                return None

    async def _exchange_one(self, head: Head) -> ExchangeResult:
        refusal = None
        before = (0, 0) if self.host is None else (self.host.sent, self.host.received)
        try:
            headers = self._filter.request_headers(head)
            self._on_phase("host")
            await self._connect_host(head)
            assert self.host is not None
            before = self.host.sent, self.host.received
            self._on_phase("answer")
            response = self._filter.response_filter(head)
            self.exchange = Exchange(
                self._client, self.host, head, self._heads.rest, headers, response
            )
            result = await self.exchange.run()
            self._heads.rest = self.exchange.rest
            return result
        except ProxyRefusal as reason:
            refusal = reason
            raise
        except IncompleteResponse as reason:
            refusal = reason.refusal
            raise
        except OSError as reason:
            refusal = ProxyRefusal(f"the session's side broke: {reason}", 502, "failed")
            raise IncompleteResponse(refusal) from None
        finally:
            self._on_exchange((head.host, head.port), refusal, self.host, before)

    async def _connect_host(self, head: Head) -> None:
        """Connect to the host of a request, or reuse the connection of the previous request."""
        place = (head.host, head.port)
        if self.host is not None and (self._connected_to != place or self.host.stale):
            self.close_host()
        if self.host is None:
            self.host = await self._connect(*place)
            self._connected_to = place

    def close_host(self) -> None:
        """Close the connection to the host, if there is one."""
        if self.host is not None:
            self.host.close()
            self.host = None
