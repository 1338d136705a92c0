"""One connection of a session, from its accept to its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, TypeAlias

from kernel_mcp.barriers import Barrier
from kernel_mcp.network.http import ByteStream, Head, ProxyRefusal, TunnelHost
from kernel_mcp.network.records import Records, Traffic
from kernel_mcp.network.relay import HostFilter, IncompleteResponse, Relay
from kernel_mcp.network.rules import HostRule, Rules, join_port, literal, why_never
from kernel_mcp.network.tls import UNRECOGNIZED_NAME, BadHello, Hello, Tls
from kernel_mcp.network.tunnel import (
    RESOLVERS_OF_ONE,
    ConnectionDeadline,
    Dialer,
    SocketStream,
    StepQueue,
    pass_both_ways,
)
from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from kernel_mcp.network.termination import Termination

TerminationLookup: TypeAlias = "Callable[[str], Termination | None]"
"""Function that returns the TLS termination of a host, or None for a host without secrets."""

TLS_PORT, TLS_HANDSHAKE = 443, 22
HEAD_S, HELLO_S, HOST_S = 10.0, 10.0, 40.0
"""Timeouts for the rest of a request head, a ClientHello, and resolving and connecting."""
IDLE_S, EXACT_IDLE_S, REQUEST_S = 600.0, 24 * 3600.0, 120.0
"""Idle timeouts of a response or tunnel, of an exact `HOST:PORT`, and between two requests."""
ENDED_IDLE_S = 10.0
"""Idle timeout of a response whose client has closed its side: most have given up then."""
_LINGER_S, _LINGER_BYTES = 2.0, 1 << 20
"""Limits on what is read and discarded after a refusal, so that the client receives it."""


class SessionTraffic:
    """State that the listeners of one session share: connections, step queue, and bytes passed."""

    def __init__(self, key: str, loop: asyncio.AbstractEventLoop) -> None:
        self.key = key
        self.steps = StepQueue(loop)
        self.resolving = asyncio.Semaphore(RESOLVERS_OF_ONE)
        self.connections: set[ProxiedConnection] = set()
        self.listeners = 0
        self._bytes = 0

    @property
    def used(self) -> int:
        """Bytes passed in both directions, by connections that have ended, too."""
        return self._bytes + sum(each.passed for each in self.connections)

    def forget(self, connection: ProxiedConnection) -> None:
        """Remove a connection that has ended, and keep the count of its bytes."""
        self.connections.discard(connection)
        self._bytes += connection.passed


@dataclass(slots=True, eq=False)
class Listener:
    """A listening socket in a session's network namespace, and the rules for its connections.

    exact  host and port that all bytes are passed to unchanged; None for an HTTP proxy listener
    """

    number: int
    sock: socket.socket
    rules: Rules
    exact: tuple[str, int] | None
    session: SessionTraffic
    connections: set[ProxiedConnection] = field(default_factory=set)

    def rule_for(self, host: str, port: int) -> HostRule:
        """Return the rule that permits `host` and `port`. Raises ProxyRefusal if there is none."""
        rule = self.rules.rule_for(host, port)
        if rule is None or (self.exact is not None and not rule.exact):
            never = why_never(host)
            step = f", nor can it: {never}" if never else ": use what it permits, or have it named"
            raise ProxyRefusal(
                f"the operator's --network does not permit {join_port(host, port)} here{step}. It "
                f"permits: {self.rules}"
            )
        return rule


_REPLY_PHASES = ("head", "host")
"""Phases in which a refusal can still be sent as an HTTP response."""
_LIMITS: Mapping[str, tuple[float, bool, str]] = {
    "request": (REQUEST_S, True, ""),
    "head": (HEAD_S, False, "the request was not whole"),
    "host": (HOST_S, False, "the host could not be found and reached"),
    "answer": (IDLE_S, True, "nothing was passed"),
    "hello": (HELLO_S, False, "the first TLS message was not whole"),
    "tunnel": (IDLE_S, True, "nothing was passed"),
    "exact": (EXACT_IDLE_S, True, "nothing was passed"),
}
"""Per phase: seconds, True if each byte restarts them, and the words of the timeout error."""


class ProxiedConnection:
    """One connection of a session, from its accept to its end."""

    def __init__(
        self,
        listener: Listener,
        sock: socket.socket,
        dialer: Dialer,
        records: Records,
        termination_of: TerminationLookup = lambda _: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._termination_of = termination_of
        self._listener, self._dialer, self._records = listener, dialer, records
        self._deadline = ConnectionDeadline(self._loop)
        self._client = self._stream(sock)
        self._reply_stream: ByteStream = self._client
        """Stream on which the session is answered: its connection, or TLS over that."""
        self._phase = "request"
        self._since = self._loop.time()
        self._target = ("", 0)
        self._host: SocketStream | None = None
        self._reported: ProxyRefusal | None = None
        self._cut: ProxyRefusal | None = None
        self._enter_phase("request")
        self.task = self._loop.create_task(self._run())

    @property
    def passed(self) -> int:
        """Bytes received from and sent to the session."""
        return self._client.sent + self._client.received

    def check_timeout(self, now: float) -> None:
        """End the connection if its phase has exceeded its timeout; `now` is the loop's time."""
        if (
            self._phase == "answer"
            and self._deadline.idle_for(now) > ENDED_IDLE_S
            and self._client.ended
        ):
            words = f"the session had closed, and nothing came for {ENDED_IDLE_S:g} s"
            self.cut(ProxyRefusal(words, 504, "failed"))
        elif now > self._deadline.until:
            seconds, _, words = _LIMITS[self._phase]
            self.cut(ProxyRefusal(f"{words} in {seconds:g} s: try again", 504, "failed"))
            self._deadline.within(2 * _LINGER_S)  # wait_for of Python 3.10 can lose cancellation

    def cut(self, refusal: ProxyRefusal) -> None:
        """Cancel the connection. The first `refusal` is the one that is reported."""
        self._cut = self._cut or refusal
        self.task.cancel()

    async def _run(self) -> None:
        refusal: ProxyRefusal | None = None
        try:
            with Barrier("connecting for a session", str(self._listener.number)):
                refusal = await self._serve()
        finally:
            refusal = refusal or self._cut
            self._client.close()
            if self._host is not None:
                self._host.close()
            told = refusal is not None and refusal is self._reported
            if not told and (self._host or (refusal and self._phase != "request")):
                self._report(self._target, refusal, self._host, (0, 0))

    async def _serve(self) -> ProxyRefusal | None:
        """Serve the connection. Return why it ended early, or None if it ended in order."""
        try:
            if self._listener.exact is None:
                await self._requests(self._relay(self._client, self._connect_plain))
            else:
                await self._raw_tunnel(*self._listener.exact)
        except ProxyRefusal as reason:
            await self._reply_and_linger(b"" if self._listener.exact else reason.answer())
            return reason
        except BadHello as reason:
            await self._reply_and_linger(reason.alert)
            return ProxyRefusal(f"{self._target[0]}: {reason}")
        except IncompleteResponse as reason:
            return reason.refusal
        except OSError as reason:
            return ProxyRefusal(f"the connection broke: {reason}", 502, "failed")
        except asyncio.CancelledError:
            if self._cut is None:
                raise
            if self._phase in _REPLY_PHASES and self._listener.exact is None:
                await self._reply_and_linger(self._cut.answer())
            return self._cut
        return None

    async def _requests(self, relay: Relay) -> None:
        """Relay requests. A CONNECT or websocket upgrade turns the connection into a tunnel."""
        try:
            head = await relay.run()
            if head is not None and head.connect:
                await self._tunnel(head, relay.rest)
            elif head is not None:
                await self._websocket(relay, head)
            else:
                await self._reply_and_linger(b"")
        finally:
            relay.close_host()

    async def _raw_tunnel(self, host: str, port: int) -> None:
        self._enter_phase("host")
        self._host = await self._connect(host, port)
        self._enter_phase("exact")
        await pass_both_ways(self._client, self._host)

    async def _tunnel(self, head: Head, rest: bytes) -> None:
        """Serve a CONNECT, of which `rest` has been read: TLS or plain HTTP to the named host.

        An exact `HOST:PORT` accepts any protocol. TLS to a host with secrets is terminated here.
        """
        host, port = head.host, head.port
        exact = self._rule_for(host, port).exact
        termination = self._termination_of(host) if exact or port == TLS_PORT else None
        self._host = await self._connect(host, port)
        await self._client.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        self._enter_phase("hello")
        if not exact or termination is not None:
            rest = rest or await self._client.read()
            if not rest:
                return
        if rest and rest[0] != TLS_HANDSHAKE and not exact:
            await self._plain_tunnel(host, port, rest)
            return
        if not exact or (termination is not None and rest[0] == TLS_HANDSHAKE):
            rest = await self._hello(host, rest)
            if not rest:
                return
            if termination is not None:
                await self._terminate_tls(termination, host, port, rest)
                return
        self._enter_phase("exact" if exact else "tunnel")
        await self._host.write(rest)
        await pass_both_ways(self._client, self._host)

    async def _hello(self, host: str, rest: bytes) -> bytes:
        """Read a ClientHello for `host` and return its bytes; empty if the client has closed.

        Raises BadHello if it names another server, or none. For an IP address there has to be
        none (RFC 6066, 3).
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
        """Relay plain HTTP inside a CONNECT, which some clients use for websockets."""
        self._check_plain(host, port)
        stream, self._host = self._host, None
        tunnel = TunnelHost(host, port, 80)
        await self._requests(
            self._relay(self._client, self._connect_plain, tunnel=tunnel, rest=rest, host=stream)
        )

    async def _terminate_tls(
        self, termination: Termination, host: str, port: int, rest: bytes
    ) -> None:
        """Terminate the client's TLS; relay its requests over a new TLS connection to the host."""
        self._reply_stream = tls = Tls(self._client, termination.server_context, first=rest)
        try:
            await tls.begin()
        except OSError as reason:
            raise termination.handshake_error(reason) from None

        async def reached(host: str, port: int) -> ByteStream:
            stream, self._host = self._host, None
            if stream is None or stream.stale:
                if stream is not None:
                    stream.close()
                stream = await self._connect(host, port)
            try:
                return await termination.connect_tls(stream)
            except BaseException:
                stream.close()
                raise

        tunnel = TunnelHost(host, port, TLS_PORT)
        await self._requests(self._relay(tls, reached, tunnel=tunnel, host_filter=termination))

    async def _websocket(self, relay: Relay, head: Head) -> None:
        """Pass bytes both ways on a connection that has been upgraded to a websocket."""
        host, exchange = relay.host, relay.exchange
        assert isinstance(host, SocketStream)
        assert exchange is not None
        relay.host, self._host, self._target = None, host, (head.host, head.port)
        self._enter_phase("tunnel")
        await host.write(exchange.rest)
        await self._client.write(exchange.host_rest)
        await pass_both_ways(self._client, host)

    def _relay(
        self,
        client: ByteStream,
        connect: Callable[[str, int], Awaitable[ByteStream]],
        *,
        tunnel: TunnelHost | None = None,
        rest: bytes = b"",
        host: SocketStream | None = None,
        host_filter: HostFilter | None = None,
    ) -> Relay:
        return Relay(
            client,
            connect,
            on_phase=self._enter_phase,
            on_exchange=self._on_exchange,
            tunnel=tunnel,
            rest=rest,
            host=host,
            host_filter=host_filter or HostFilter(),
        )

    def _check_plain(self, host: str, port: int) -> None:
        """Raise ProxyRefusal for plain HTTP to port 443 or to a host with a secret.

        An entry for exactly this host and port permits it.
        """
        rules = self._listener.rules
        rule = rules.rule_for(host, port)
        if rule is not None and rule.exact:
            return
        if port == TLS_PORT:
            raise ProxyRefusal(
                f"{host}:{port} is for TLS, and what came is none: use https://{host}"
            )
        if self._termination_of(host) is not None and rules.rule_for(host, TLS_PORT) is not None:
            raise ProxyRefusal(
                f"there is a secret for {host}, which is put into HTTPS alone: use https://{host}"
            )

    async def _connect_plain(self, host: str, port: int) -> SocketStream:
        """Connect as `_connect` does, for plain HTTP. Raises ProxyRefusal."""
        self._check_plain(host, port)
        return await self._connect(host, port)

    async def _connect(self, host: str, port: int) -> SocketStream:
        """Connect to `host` and `port` if a rule permits it. Raises ProxyRefusal."""
        rule = self._rule_for(host, port)
        self._enter_phase("host")
        return self._stream(
            await self._dialer.connect(rule, host, port, self._listener.session.resolving)
        )

    def _rule_for(self, host: str, port: int) -> HostRule:
        self._target, self._since = (host, port), self._loop.time()
        return self._listener.rule_for(host, port)

    def _stream(self, sock: socket.socket) -> SocketStream:
        return SocketStream(sock, self._listener.session.steps, self._deadline)

    def _enter_phase(self, phase: str) -> None:
        self._phase = phase
        seconds, idle, _ = _LIMITS[phase]
        (self._deadline.idle if idle else self._deadline.within)(seconds)

    def _on_exchange(
        self,
        target: tuple[str, int],
        refusal: ProxyRefusal | None,
        host: ByteStream | None,
        before: tuple[int, int],
    ) -> None:
        self._reported = refusal or self._cut
        self._report(target, self._reported, host, before)

    def _report(
        self,
        target: tuple[str, int],
        refusal: ProxyRefusal | None,
        host: ByteStream | None,
        before: tuple[int, int],
    ) -> None:
        now = self._loop.time()
        up, down = (0, 0) if host is None else (host.sent - before[0], host.received - before[1])
        self._records.add(
            self._listener.number, target, refusal, Traffic(up, down, now - self._since)
        )
        self._since = now

    async def _reply_and_linger(self, words: bytes) -> None:
        """Send the last bytes, then read for a moment until the client closes.

        An immediate close could reset the connection before the client has read them.
        """
        with contextlib.suppress(OSError, TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._write_and_drain(words), _LINGER_S)

    async def _write_and_drain(self, words: bytes) -> None:
        await self._reply_stream.write(words)
        await self._reply_stream.shut()
        most = self._client.received + _LINGER_BYTES
        while self._client.received < most and await self._client.read():
            pass
