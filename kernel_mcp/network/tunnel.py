"""Connections to checked addresses, and copying between two sockets, scheduled fairly.

asyncio's streams are not used: they hold more memory, and one fast peer would occupy the loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kernel_mcp.network.http import ProxyRefusal
from kernel_mcp.network.rules import (
    NAMEABLE,
    OWN,
    Address,
    HostRule,
    is_own,
    literal,
    why_not_public,
)

PIECE_BYTES = 64 * 1024
"""Bytes read at once, which is also the most that is buffered while the other side stalls."""
_STEPS = 1
"""Pieces that the connections of one session pass in one iteration of the event loop."""


_ESTABLISHED = 1
"""TCP_ESTABLISHED, a value of tcpi_state (<linux/tcp.h>)."""


class StepQueue:
    """One session's share of the event loop: beyond `_STEPS` an iteration, its steps wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = _STEPS
        self._line: deque[Callable[[], None]] = deque()
        self._begun = False

    def take(self) -> bool:
        """Use one step of this iteration. Return False if none is left, or if others wait."""
        if not self._left or self._line:
            return False
        self._left -= 1
        self._begin()
        return True

    def wait(self, resume: Callable[[], None]) -> None:
        """Queue `resume`; it is called when its turn comes."""
        self._line.append(resume)
        self._begin()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._loop.call_soon(self._round)

    def _round(self) -> None:
        self._begun = False
        self._left = _STEPS
        while self._line and self._left:
            self._left -= 1
            self._line.popleft()()
        if self._line or self._left < _STEPS:
            self._begin()


class ConnectionDeadline:
    """Deadline of a connection, by the loop's clock: a fixed one, or one that each byte extends."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._idle_s = 0.0
        self.until = loop.time()

    def within(self, seconds: float) -> None:
        """Set a fixed deadline in `seconds`."""
        self._idle_s = 0.0
        self.until = self._loop.time() + seconds

    def idle(self, seconds: float) -> None:
        """Set an idle timeout: each byte moves the deadline to `seconds` from then."""
        self._idle_s = seconds
        self.touch()

    def idle_for(self, now: float) -> float:
        """Return the seconds since the last byte; 0 with a fixed deadline."""
        return now - (self.until - self._idle_s) if self._idle_s else 0.0

    def touch(self) -> None:
        """Extend the deadline, as bytes were passed; a fixed one stays."""
        if self._idle_s:
            self.until = self._loop.time() + self._idle_s


class SocketStream:
    """A connected socket as a stream that counts its bytes."""

    def __init__(self, sock: socket.socket, steps: StepQueue, deadline: ConnectionDeadline) -> None:
        self.sock = sock
        self.steps = steps
        self.deadline = deadline
        self.received = 0
        self.sent = 0
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def read(self) -> bytes:
        """Return the next bytes, as soon as there are any; empty at the end. Raises OSError."""
        await self._next_step()
        data = await self._loop.sock_recv(self.sock, PIECE_BYTES)
        self.received += len(data)
        self.deadline.touch()
        return data

    async def write(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError."""
        for start in range(0, len(data), PIECE_BYTES):
            await self._next_step()
            piece = data[start : start + PIECE_BYTES]
            self.sent += len(piece)
            await self._loop.sock_sendall(self.sock, piece)
            self.deadline.touch()

    @property
    def stale(self) -> bool:
        """True if an idle connection has ended, or has received data that was not requested."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    @property
    def ended(self) -> bool:
        """True if the peer has closed the connection, or its sending side."""
        return self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED

    async def _next_step(self) -> None:
        if not self.steps.take():
            mine = self._loop.create_future()
            self.steps.wait(lambda: None if mine.done() else mine.set_result(None))
            await mine

    async def shut(self) -> None:
        """Close the sending side only. Raises OSError."""
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket; data that was written is still delivered."""
        self.sock.close()


class _Pump:
    """Copies one direction, from `source` to `sink`; buffers at most one piece."""

    _buffer = memoryview(bytearray(PIECE_BYTES))
    """Shared by the whole process: what the sink does not accept at once is copied from it."""

    def __init__(
        self, source: SocketStream, sink: SocketStream, done: Callable[[Exception | None], None]
    ) -> None:
        self._source, self._sink = source, sink
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._ended = False

    def start(self) -> None:
        self._loop.add_reader(self._source.sock, self._on_readable)

    def stop(self) -> None:
        """Stop copying."""
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self._source.sock)
            self._loop.remove_writer(self._sink.sock)

    def _on_readable(self) -> None:
        if self._source.steps.take():
            self._step()
        else:
            self._loop.remove_reader(self._source.sock)
            self._source.steps.wait(self._resume)

    def _resume(self) -> None:
        if not self._ended:
            self._step()
            if not self._ended and not self._rest:
                self.start()

    def _step(self) -> None:
        try:
            count = self._source.sock.recv_into(self._buffer)
            if not count:
                self.stop()
                self._sink.sock.shutdown(socket.SHUT_WR)
                self._done(None)
                return
            self._source.received += count
            self._pass(self._buffer[:count])
        except BlockingIOError:
            return
        except OSError as reason:
            self._fail(reason)

    def _pass(self, data: memoryview) -> None:
        """Send; buffer what is not accepted until the sink is writable. Raises OSError."""
        try:
            taken = self._sink.sock.send(data)
        except BlockingIOError:
            taken = 0
        self._sink.sent += taken
        self._source.deadline.touch()
        self._rest = bytes(data[taken:])
        if self._rest:
            self._loop.remove_reader(self._source.sock)
            self._loop.add_writer(self._sink.sock, self._on_writable)

    def _on_writable(self) -> None:
        self._loop.remove_writer(self._sink.sock)
        try:
            self._pass(memoryview(self._rest))
        except OSError as reason:
            self._fail(reason)
            return
        if not self._rest:
            self.start()

    def _fail(self, reason: Exception) -> None:
        self.stop()
        self._done(reason)


async def pass_both_ways(one: SocketStream, other: SocketStream) -> None:
    """Copy bytes both ways until both sides have closed; each half-close is passed on, too.

    Raises OSError.
    """
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    directions = 2

    def done(failure: Exception | None) -> None:
        nonlocal directions
        directions -= 1
        if over.done():
            return
        if failure is not None:
            over.set_exception(failure)
        elif not directions:
            over.set_result(None)

    pumps = [_Pump(one, other, done), _Pump(other, one, done)]
    try:
        for pump in pumps:
            pump.start()
        await over
    finally:
        for pump in pumps:
            pump.stop()


RESOLVE_S, CONNECT_S = 10.0, 5.0
"""Timeouts for resolving a name, and for connecting to one of its addresses."""
_MOST_ADDRESSES = 4
"""Addresses of a name that are tried."""
_RESOLVERS, RESOLVERS_OF_ONE = 16, 4
"""Names resolved concurrently, by all sessions and by one."""


class Dialer:
    """Connects to permitted hosts, only at addresses that were checked."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(_RESOLVERS, "resolver")

    async def connect(
        self, rule: HostRule, host: str, port: int, resolving: asyncio.Semaphore
    ) -> socket.socket:
        """Return a connected, non-blocking socket.

        `resolving` bounds lookups. Raises ProxyRefusal.
        """
        address = literal(host)
        if address is None:
            addresses = await self._resolved(host, port, resolving)
        else:
            addresses = [address]
        if address is None or not rule.exact:
            addresses = _checked(host, addresses)
        failure = "this machine has no way to its address"
        for each in addresses[:_MOST_ADDRESSES]:
            connected = await self._tried(each, port)
            if isinstance(connected, socket.socket):
                return connected
            failure = connected
        raise ProxyRefusal(
            f"{host}:{port} cannot be reached: {failure}. See that the host serves this port, and "
            "try again later",
            *(502, "failed"),
        )

    async def _tried(self, address: Address, port: int) -> socket.socket | str:
        """Return a connected socket, or the reason for the failure as text."""
        try:
            return await asyncio.wait_for(self._connected(address, port), CONNECT_S)
        except (TimeoutError, asyncio.TimeoutError):
            return f"no answer in {CONNECT_S:g} s"
        except OSError as reason:
            return reason.strerror or str(reason)

    async def _resolved(self, host: str, port: int, resolving: asyncio.Semaphore) -> list[Address]:
        """Return all addresses of a name. Raises ProxyRefusal.

        A lookup that exceeds the timeout keeps its slot of `resolving` until it ends.
        """
        await resolving.acquire()
        try:
            answer = self._loop.run_in_executor(
                self._pool, socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM
            )
        except RuntimeError as reason:  # no thread can be started
            resolving.release()
            raise ProxyRefusal(
                f"{host} cannot be resolved now: {reason}. Try again in a few seconds",
                *(503, "failed"),
            ) from None

        def over(done: asyncio.Future[Any]) -> None:
            resolving.release()
            if not done.cancelled():
                done.exception()

        answer.add_done_callback(over)
        done, _ = await asyncio.wait({answer}, timeout=RESOLVE_S)
        if not done:
            raise ProxyRefusal(
                f"{host} could not be resolved in {RESOLVE_S:g} s: the resolver of the server's "
                "machine does not answer. Try again later",
                *(504, "failed"),
            )
        try:
            found = answer.result()
            return list(dict.fromkeys(ipaddress.ip_address(each[4][0]) for each in found))
        except (OSError, ValueError, UnicodeError) as reason:
            words = getattr(reason, "strerror", None) or reason
            raise ProxyRefusal(
                f"{host} cannot be resolved by the server's machine: {words}. See how it is "
                "spelled; if it is right, try again later or use another host",
                *(502, "failed"),
            ) from None

    async def _connected(self, address: Address, port: int) -> socket.socket:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await self._loop.sock_connect(sock, (str(address), port))
        except BaseException:
            sock.close()
            raise
        return sock


def _checked(host: str, addresses: list[Address]) -> list[Address]:
    """Return the addresses that have a route. Raises ProxyRefusal if any address is not public."""
    ways = []
    for address in addresses:
        reason = why_not_public(address)
        if not reason:
            try:
                reason = OWN if is_own(address) else ""
            except OSError:  # no route: nothing is sent there
                continue
            ways.append(address)
        if reason:
            raise ProxyRefusal(
                f"{host} is at {address}, which is no public address ({reason}), and names lead "
                f"to public ones only. {_instead(reason)}"
            )
    return ways


def _instead(reason: str) -> str:
    if reason in NAMEABLE:
        return "The operator can name it by its address and port with --network: use that then"
    return "Use another host"
