"""One connection of a session, from its accept to its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, TypeAlias

from kernel_mcp.barriers import Barrier
from kernel_mcp.network.http import Head, Refused, Stream, Within
from kernel_mcp.network.records import Records, Used
from kernel_mcp.network.relay import Cut, Guard, Relay
from kernel_mcp.network.rules import Entry, Rules, literal, shown, why_never
from kernel_mcp.network.tls import UNRECOGNIZED_NAME, BadHello, Hello, Tls
from kernel_mcp.network.tunnel import RESOLVERS_OF_ONE, Dialer, Turns, Watch, Wire, pass_both_ways
from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from kernel_mcp.network.termination import Termination

Ending: TypeAlias = "Callable[[str], Termination | None]"
"""What ends TLS to a host in the proxy, None for most hosts; as `Terminations.of`."""

TLS_PORT, TLS_HANDSHAKE = 443, 22
HEAD_S, HELLO_S, HOST_S = 10.0, 10.0, 40.0
"""Seconds for the rest of a head, a first TLS message, and finding and reaching a host."""
IDLE_S, EXACT_IDLE_S, REQUEST_S = 600.0, 24 * 3600.0, 120.0
"""Seconds without a byte: of an answer or a tunnel, of a database, between two requests."""
ENDED_IDLE_S = 10.0
"""Of an answer, where the session has closed its side: most have given up then."""
_LINGER_S, _LINGER_BYTES = 2.0, 1 << 20
"""What is read, and not looked at, of a session that is told no, lest it misses the answer."""


class Session:
    """What the listeners of one session share."""

    def __init__(self, key: str, loop: asyncio.AbstractEventLoop) -> None:
        self.key = key
        self.turns = Turns(loop)
        self.resolving = asyncio.Semaphore(RESOLVERS_OF_ONE)
        self.connections: set[Connection] = set()
        self.listeners = 0
        self._bytes = 0

    @property
    def used(self) -> int:
        """Bytes that went both ways."""
        return self._bytes + sum(each.passed for each in self.connections)

    def forget(self, connection: Connection) -> None:
        """It has ended."""
        self.connections.discard(connection)
        self._bytes += connection.passed


@dataclass(slots=True, eq=False)
class Listener:
    """What listens in a session's namespace, and what its connections may reach.

    exact  the only host and port, to which bytes are passed as they are
    """

    number: int
    sock: socket.socket
    rules: Rules
    exact: tuple[str, int] | None
    session: Session
    connections: set[Connection] = field(default_factory=set)

    def entry_for(self, host: str, port: int) -> Entry:
        """The rule that permits a place. Raises Refused."""
        entry = self.rules.entry_for(host, port)
        if entry is None or (self.exact is not None and not entry.exact):
            never = why_never(host)
            step = f", nor can it: {never}" if never else ": use what it permits, or have it named"
            raise Refused(
                f"the operator's --network does not permit {shown(host, port)} here{step}. It "
                f"permits: {self.rules}"
            )
        return entry


_SAID_IN = ("head", "host")
"""Phases in which an answer in HTTP is still to come."""
_LIMITS: Mapping[str, tuple[float, bool, str]] = {
    "request": (REQUEST_S, True, ""),
    "head": (HEAD_S, False, "the request was not whole"),
    "host": (HOST_S, False, "the host could not be found and reached"),
    "answer": (IDLE_S, True, "nothing was passed"),
    "hello": (HELLO_S, False, "the first TLS message was not whole"),
    "tunnel": (IDLE_S, True, "nothing was passed"),
    "exact": (EXACT_IDLE_S, True, "nothing was passed"),
}
"""Of each phase its seconds, whether they begin again with each byte, and what is wrong then."""


class Connection:
    """One connection of a session, from its accept to its end."""

    def __init__(
        self,
        listener: Listener,
        sock: socket.socket,
        dialer: Dialer,
        records: Records,
        ending: Ending = lambda _: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending = ending
        self._listener, self._dialer, self._records = listener, dialer, records
        self._watch = Watch(self._loop)
        self._client = self._wire(sock)
        self._front: Stream = self._client
        """What the session is answered on: its connection, or TLS over that."""
        self._phase = "request"
        self._since = self._loop.time()
        self._place = ("", 0)
        self._host: Wire | None = None
        self._told: Refused | None = None
        self._cut: Refused | None = None
        self._to("request")
        self.task = self._loop.create_task(self._run())

    @property
    def passed(self) -> int:
        """Bytes of the session, both ways."""
        return self._client.sent + self._client.received

    def look(self, now: float) -> None:
        """End it when its time is over."""
        if (
            self._phase == "answer"
            and self._watch.idle_for(now) > ENDED_IDLE_S
            and self._client.ended
        ):
            words = f"the session had closed, and nothing came for {ENDED_IDLE_S:g} s"
            self.cut(Refused(words, 504, "failed"))
        elif now > self._watch.until:
            seconds, _, words = _LIMITS[self._phase]
            self.cut(Refused(f"{words} in {seconds:g} s: try again", 504, "failed"))
            self._watch.within(2 * _LINGER_S)  # a cancellation may be lost (Python 3.10, wait_for)

    def cut(self, refusal: Refused) -> None:
        """End it, for a reason."""
        self._cut = self._cut or refusal
        self.task.cancel()

    async def _run(self) -> None:
        refusal: Refused | None = None
        try:
            with Barrier("connecting for a session", str(self._listener.number)):
                refusal = await self._serve()
        finally:
            refusal = refusal or self._cut
            self._client.close()
            if self._host is not None:
                self._host.close()
            told = refusal is not None and refusal is self._told
            if not told and (self._host or (refusal and self._phase != "request")):
                self._note(self._place, refusal, self._host, (0, 0))

    async def _serve(self) -> Refused | None:
        """Serve it; why that has ended too soon."""
        try:
            if self._listener.exact is None:
                await self._requests(self._relay(self._client, self._reached_plainly))
            else:
                await self._exactly(*self._listener.exact)
        except Refused as reason:
            await self._say(b"" if self._listener.exact else reason.answer())
            return reason
        except BadHello as reason:
            await self._say(reason.alert)
            return Refused(f"{self._place[0]}: {reason}")
        except Cut as reason:
            return reason.refusal
        except OSError as reason:
            return Refused(f"the connection broke: {reason}", 502, "failed")
        except asyncio.CancelledError:
            if self._cut is None:
                raise
            if self._phase in _SAID_IN and self._listener.exact is None:
                await self._say(self._cut.answer())
            return self._cut
        return None

    async def _requests(self, relay: Relay) -> None:
        """Requests, and what the last of them has made of the connection."""
        try:
            head = await relay.run()
            if head is not None and head.connect:
                await self._tunnel(head, relay.rest)
            elif head is not None:
                await self._switched(relay, head)
            else:
                await self._say(b"")
        finally:
            relay.close_host()

    async def _exactly(self, host: str, port: int) -> None:
        self._to("host")
        self._host = await self._reached(host, port)
        self._to("exact")
        await pass_both_ways(self._client, self._host)

    async def _tunnel(self, head: Head, rest: bytes) -> None:
        """What follows a CONNECT: TLS to that name, HTTP to it, or anything to an exact place."""
        host, port = head.host, head.port
        exact = self._entry_for(host, port).exact
        end = self._ending(host) if exact or port == TLS_PORT else None
        self._host = await self._reached(host, port)
        await self._client.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        self._to("hello")
        if not exact or end is not None:
            rest = rest or await self._client.read()
            if not rest:
                return
        if rest and rest[0] != TLS_HANDSHAKE and not exact:
            await self._plain_tunnel(host, port, rest)
            return
        if not exact or (end is not None and rest[0] == TLS_HANDSHAKE):
            rest = await self._hello(host, rest)
            if not rest:
                return
            if end is not None:
                await self._terminated(end, host, port, rest)
                return
        self._to("exact" if exact else "tunnel")
        await self._host.write(rest)
        await pass_both_ways(self._client, self._host)

    async def _hello(self, host: str, rest: bytes) -> bytes:
        """The bytes of a first TLS message to `host`; none at the end. Raises BadHello.

        An address is no server name, and none is sent for one (RFC 6066, 3).
        """
        hello = Hello()
        wanted = host if literal(host) is None else ""
        while rest and (name := hello.feed(rest)) is None:
            rest = await self._client.read()
        if not rest:
            return b""
        if not name and wanted:
            raise BadHello("it names no server in TLS (SNI)", UNRECOGNIZED_NAME)
        if name != wanted:
            raise BadHello(f"its TLS is for another server (SNI {name!r:.90})", UNRECOGNIZED_NAME)
        return bytes(hello.raw)

    async def _plain_tunnel(self, host: str, port: int, rest: bytes) -> None:
        """Requests of plain HTTP within a CONNECT, as some clients make them for websockets."""
        self._check_plain(host, port)
        wire, self._host = self._host, None
        within = Within(host, port, 80)
        await self._requests(
            self._relay(self._client, self._reached_plainly, within=within, rest=rest, host=wire)
        )

    async def _terminated(self, end: Termination, host: str, port: int, rest: bytes) -> None:
        """Requests of HTTPS, which is ended here, to the host, with which it is begun anew."""
        self._front = tls = Tls(self._client, end.serving, first=rest)
        try:
            await tls.begin()
        except OSError as reason:
            raise end.distrusted(reason) from None

        async def reached(host: str, port: int) -> Stream:
            wire, self._host = self._host, None
            if wire is None or wire.stale:
                if wire is not None:
                    wire.close()
                wire = await self._reached(host, port)
            try:
                return await end.begun(wire)
            except BaseException:
                wire.close()
                raise

        within = Within(host, port, TLS_PORT)
        await self._requests(self._relay(tls, reached, within=within, guard=end))

    async def _switched(self, relay: Relay, head: Head) -> None:
        """A connection that has become a websocket."""
        host, exchange = relay.host, relay.exchange
        assert isinstance(host, Wire)
        assert exchange is not None
        relay.host, self._host, self._place = None, host, (head.host, head.port)
        self._to("tunnel")
        await host.write(exchange.rest)
        await self._client.write(exchange.host_rest)
        await pass_both_ways(self._client, host)

    def _relay(
        self,
        client: Stream,
        connect: Callable[[str, int], Awaitable[Stream]],
        *,
        within: Within | None = None,
        rest: bytes = b"",
        host: Wire | None = None,
        guard: Guard | None = None,
    ) -> Relay:
        return Relay(
            client,
            connect,
            phase=self._to,
            over=self._over,
            within=within,
            rest=rest,
            host=host,
            guard=guard or Guard(),
        )

    def _check_plain(self, host: str, port: int) -> None:
        """Refuse what is not in TLS where it has to be, unless the operator has named the place."""
        rules = self._listener.rules
        entry = rules.entry_for(host, port)
        if entry is not None and entry.exact:
            return
        if port == TLS_PORT:
            raise Refused(f"{host}:{port} is for TLS, and what came is none: use https://{host}")
        if self._ending(host) is not None and rules.entry_for(host, TLS_PORT) is not None:
            raise Refused(
                f"there is a secret for {host}, which is put into HTTPS alone: use https://{host}"
            )

    async def _reached_plainly(self, host: str, port: int) -> Wire:
        """As `_reached`, for requests that anyone on the way can read."""
        self._check_plain(host, port)
        return await self._reached(host, port)

    async def _reached(self, host: str, port: int) -> Wire:
        """A connection to a place, if it is permitted. Raises Refused."""
        entry = self._entry_for(host, port)
        self._to("host")
        return self._wire(
            await self._dialer.connect(entry, host, port, self._listener.session.resolving)
        )

    def _entry_for(self, host: str, port: int) -> Entry:
        self._place, self._since = (host, port), self._loop.time()
        return self._listener.entry_for(host, port)

    def _wire(self, sock: socket.socket) -> Wire:
        return Wire(sock, self._listener.session.turns, self._watch)

    def _to(self, phase: str) -> None:
        self._phase = phase
        seconds, idle, _ = _LIMITS[phase]
        (self._watch.idle if idle else self._watch.within)(seconds)

    def _over(
        self,
        place: tuple[str, int],
        refusal: Refused | None,
        host: Stream | None,
        before: tuple[int, int],
    ) -> None:
        self._told = refusal or self._cut
        self._note(place, self._told, host, before)

    def _note(
        self,
        place: tuple[str, int],
        refusal: Refused | None,
        host: Stream | None,
        before: tuple[int, int],
    ) -> None:
        now = self._loop.time()
        up, down = (0, 0) if host is None else (host.sent - before[0], host.received - before[1])
        self._records.add(self._listener.number, place, refusal, Used(up, down, now - self._since))
        self._since = now

    async def _say(self, words: bytes) -> None:
        """Send the last words, and have them read: closing at once would take them back."""
        with contextlib.suppress(OSError, TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._said(words), _LINGER_S)

    async def _said(self, words: bytes) -> None:
        await self._front.write(words)
        await self._front.shut()
        most = self._client.received + _LINGER_BYTES
        while self._client.received < most and await self._client.read():
            pass
