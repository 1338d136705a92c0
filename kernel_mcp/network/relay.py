"""Requests and responses between a session and hosts: h11 frames the bodies on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import h11

from kernel_mcp.network.http import (
    HEAD_BYTES,
    HOP,
    Head,
    HeadReader,
    Refused,
    Stream,
    Within,
    bad_request,
    values_of,
)

_STEP_EVENTS = 32
"""Pieces of a body, which may be of one byte, that are passed together."""


class Cut(Exception):
    """A response that has begun cannot be ended: the connection is to be closed."""


@dataclass(slots=True)
class Outcome:
    """How an exchange has ended, and what may follow on both connections."""

    client_again: bool = False
    host_again: bool = False
    switched: bool = False


class Exchange:
    """One request and its response, between a client and a host."""

    def __init__(self, client: Stream, host: Stream, head: Head, rest: bytes) -> None:
        self._client, self._host, self._head = client, host, head
        self._down = h11.Connection(h11.SERVER, HEAD_BYTES)
        self._up = h11.Connection(h11.CLIENT, HEAD_BYTES)
        self._down.receive_data(head.raw + rest)
        self._sent = client.sent

    async def run(self) -> Outcome:
        """Pass both. Raises Refused (nothing was answered yet), Cut, OSError of the client."""
        try:
            self._down.next_event()
        except h11.RemoteProtocolError as reason:
            raise bad_request(str(reason)) from None
        request = h11.Request(
            method=self._head.method,
            target=self._head.target,
            headers=list(self._head.sent_headers()),
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
        except Refused as refusal:
            raise self._refusal(refusal) from None
        except h11.LocalProtocolError as reason:
            raise Cut(str(reason)) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._outcome()

    @property
    def rest(self) -> bytes:
        """What the client has sent behind its request."""
        return self._down.trailing_data[0]

    @property
    def host_rest(self) -> bytes:
        """What the host has sent behind its response."""
        return self._up.trailing_data[0]

    def _outcome(self) -> Outcome:
        if self._up.their_state is h11.SWITCHED_PROTOCOL:
            return Outcome(switched=True)
        return Outcome(
            client_again=self._down.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE},
            host_again=self._up.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}
            and not self.host_rest,
        )

    async def _upload(self) -> None:
        while True:
            try:
                event = self._down.next_event()
            except h11.RemoteProtocolError as reason:
                raise bad_request(str(reason)) from None
            if event is h11.NEED_DATA:
                self._down.receive_data(await self._client.read())
                continue
            data = self._up.send(event) if isinstance(event, h11.Data) else None
            if isinstance(event, h11.EndOfMessage):
                data = self._up.send(h11.EndOfMessage())
            if data is None:
                return
            try:
                await self._host.write(data)
            except OSError:
                return  # its answer says why, if there is one
            if isinstance(event, h11.EndOfMessage):
                return

    async def _download(self) -> None:
        out = b""
        count = 0
        while True:
            try:
                event = self._up.next_event()
            except h11.RemoteProtocolError as reason:
                raise self._failure(f"its answer is no HTTP: {reason}") from None
            count += 1
            if out and (event is h11.NEED_DATA or count % _STEP_EVENTS == 0):
                await self._client.write(out)
                out = b""
            if event is h11.NEED_DATA:
                self._up.receive_data(await self._answered())
            elif isinstance(event, h11.InformationalResponse):
                out += self._interim(event)
                if event.status_code == 101:
                    await self._client.write(out)
                    return
            elif isinstance(event, h11.Response):
                out += self._begin(event)
            elif isinstance(event, h11.Data):
                out += self._down.send(h11.Data(data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                out += self._down.send(h11.EndOfMessage())
                await self._client.write(out)
                return
            else:
                raise self._failure("it ended the connection without an answer")

    async def _answered(self) -> bytes:
        try:
            return await self._host.read()
        except OSError as reason:
            raise self._failure(f"the connection broke: {reason}") from None

    def _interim(self, event: h11.InformationalResponse) -> bytes:
        """A response before the response: only what the client has asked for goes on."""
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
        headers = tuple(event.headers)
        if values_of(headers, b"content-length") and values_of(headers, b"transfer-encoding"):
            raise self._failure("its answer has both Content-Length and Transfer-Encoding")
        headers = tuple(each for each in headers if each[0] not in HOP)
        answer = h11.Response(
            status_code=event.status_code, headers=list(headers), reason=event.reason
        )
        return self._down.send(answer)

    def _failure(self, words: str) -> Refused:
        return Refused(f"{self._head.host}: {words}", 502, "failed")

    def _refusal(self, refusal: Refused) -> Exception:
        if self._client.sent != self._sent:  # a part of the answer is there
            cut = Cut(refusal.words)
            cut.__cause__ = refusal
            return cut
        return refusal


class Relay:
    """All requests of one client, to the hosts that `connect` leads to, or `within` one.

    `phase` is told what is waited for: `request`, `head`, `host` or `answer`. `over` is told of
    every exchange, with None or why it was none, the host's stream and its bytes before.
    """

    def __init__(
        self,
        client: Stream,
        connect: Callable[[str, int], Awaitable[Stream]],
        *,
        phase: Callable[[str], None],
        over: Callable[[tuple[str, int], Refused | None, Stream | None, tuple[int, int]], None],
        within: Within | None = None,
        rest: bytes = b"",
        host: Stream | None = None,
    ) -> None:
        self._client = client
        self._connect = connect
        self._phase = phase
        self._over = over
        self._within = within
        self._heads = HeadReader(client, rest)
        self.host = host
        self._place = None if within is None else (within.host, within.port)
        self.exchange: Exchange | None = None

    @property
    def rest(self) -> bytes:
        """What came behind the last head."""
        return self._heads.rest

    async def run(self) -> Head | None:
        """Serve all. What it ends with: a CONNECT, or a request after which bytes are passed.

        None at the end. Raises Refused, Cut, OSError.
        """
        while True:
            self._phase("request")
            raw = await self._heads.next(lambda: self._phase("head"))
            if raw is None:
                return None
            head = Head.parse(raw, self._within)
            if head.connect:
                return head
            outcome = await self._one(head)
            if outcome.switched:
                return head
            if not outcome.host_again:
                self.close_host()
            if not outcome.client_again:
                return None

    async def _one(self, head: Head) -> Outcome:
        before, refusal = (0, 0), None
        try:
            self._phase("host")
            await self._reach(head)
            assert self.host is not None
            before = self.host.sent, self.host.received
            self._phase("answer")
            self.exchange = Exchange(self._client, self.host, head, self._heads.rest)
            outcome = await self.exchange.run()
            self._heads.rest = self.exchange.rest
            return outcome
        except Refused as reason:
            refusal = reason
            raise
        except Cut as reason:
            refusal = Refused(str(reason), 502, "failed")
            raise
        except OSError as reason:
            refusal = Refused(f"the session's side broke: {reason}", 502, "failed")
            raise
        finally:
            self._over((head.host, head.port), refusal, self.host, before)

    async def _reach(self, head: Head) -> None:
        """Have a connection to the host of a request: the last one's where it still serves."""
        place = (head.host, head.port)
        if self.host is not None and (self._place != place or self.host.stale):
            self.close_host()
        if self.host is None:
            self.host = await self._connect(*place)
            self._place = place

    def close_host(self) -> None:
        """Close the connection to a host."""
        if self.host is not None:
            self.host.close()
            self.host = None
