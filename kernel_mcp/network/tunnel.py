"""Connections to checked addresses, and bytes between two sockets, in fair turns.

The asyncio streams are not used: theirs hold more memory, and a fast peer would keep the loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kernel_mcp.network.http import Refused
from kernel_mcp.network.rules import (
    NAMEABLE,
    OWN,
    Address,
    Entry,
    is_own,
    literal,
    why_not_public,
)

PIECE_BYTES = 64 * 1024
"""What is read at once, and the most that is held where the other side does not take it."""
_STEPS = 1
"""Pieces that the connections of one session pass in one round of the event loop."""


_ESTABLISHED = 1
"""<linux/tcp.h>, tcpi_state."""


class Turns:
    """Shares the loop among sessions: what goes beyond a session's steps of a round waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = _STEPS
        self._line: deque[Callable[[], None]] = deque()
        self._begun = False

    def take(self) -> bool:
        """Whether a step may be made now."""
        if not self._left or self._line:
            return False
        self._left -= 1
        self._begin()
        return True

    def wait(self, resume: Callable[[], None]) -> None:
        """Have `resume` called when it is its turn."""
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


class Watch:
    """Until when, by the loop's clock, something has to have happened."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._idle_s = 0.0
        self.until = loop.time()

    def within(self, seconds: float) -> None:
        """All of what comes next takes no longer."""
        self._idle_s = 0.0
        self.until = self._loop.time() + seconds

    def idle(self, seconds: float) -> None:
        """No longer without a byte."""
        self._idle_s = seconds
        self.touch()

    def idle_for(self, now: float) -> float:
        """Seconds since the last byte, where those count."""
        return now - (self.until - self._idle_s) if self._idle_s else 0.0

    def touch(self) -> None:
        """Bytes went by."""
        if self._idle_s:
            self.until = self._loop.time() + self._idle_s


class Wire:
    """A connected socket as a stream, closed by `close`; counts its bytes."""

    def __init__(self, sock: socket.socket, turns: Turns, watch: Watch) -> None:
        self.sock = sock
        self.turns = turns
        self.watch = watch
        self.received = 0
        self.sent = 0
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def read(self) -> bytes:
        """What has come, empty at the end. Raises OSError."""
        await self._turn()
        data = await self._loop.sock_recv(self.sock, PIECE_BYTES)
        self.received += len(data)
        self.watch.touch()
        return data

    async def write(self, data: bytes) -> None:
        """Send all of it. Raises OSError."""
        for start in range(0, len(data), PIECE_BYTES):
            await self._turn()
            piece = data[start : start + PIECE_BYTES]
            self.sent += len(piece)
            await self._loop.sock_sendall(self.sock, piece)
            self.watch.touch()

    @property
    def stale(self) -> bool:
        """Whether a connection at rest has ended, or holds what nobody has asked for."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    @property
    def ended(self) -> bool:
        """Whether the other side says nothing more: it has closed, or half of the connection."""
        return self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED

    async def _turn(self) -> None:
        if not self.turns.take():
            mine = self._loop.create_future()
            self.turns.wait(lambda: None if mine.done() else mine.set_result(None))
            await mine

    async def shut(self) -> None:
        """Say that nothing more is sent. Raises OSError."""
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket; nothing is lost that was sent."""
        self.sock.close()


class _Pump:
    """One direction: passes what `source` gives to `sink`, which holds one piece at most."""

    _buffer = memoryview(bytearray(PIECE_BYTES))
    """Of the process: what the sink does not take at once is copied."""

    def __init__(self, source: Wire, sink: Wire, done: Callable[[Exception | None], None]) -> None:
        self._source, self._sink = source, sink
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._ended = False

    def start(self) -> None:
        self._loop.add_reader(self._source.sock, self._on_readable)

    def stop(self) -> None:
        """Pass no more."""
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self._source.sock)
            self._loop.remove_writer(self._sink.sock)

    def _on_readable(self) -> None:
        if self._source.turns.take():
            self._step()
        else:
            self._loop.remove_reader(self._source.sock)
            self._source.turns.wait(self._resume)

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
        """Send; keep what is not taken and wait until it is. Raises OSError."""
        try:
            taken = self._sink.sock.send(data)
        except BlockingIOError:
            taken = 0
        self._sink.sent += taken
        self._source.watch.touch()
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


async def pass_both_ways(one: Wire, other: Wire) -> None:
    """Pass bytes until both sides have ended; each end is passed, too. Raises OSError."""
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
"""Seconds for all addresses of a name, and for a connection to one of them."""
_MOST_ADDRESSES = 4
"""Of a name, that are tried."""
_RESOLVERS, RESOLVERS_OF_ONE = 16, 4
"""Names that are looked up at a time, by all sessions and by one."""


class Dialer:
    """Connects to hosts that rules permit, at the address that was checked and no other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(_RESOLVERS, "resolver")

    async def connect(
        self, entry: Entry, host: str, port: int, resolving: asyncio.Semaphore
    ) -> socket.socket:
        """A connected socket. Raises Refused."""
        address = literal(host)
        if address is None:
            addresses = await self._resolved(host, port, resolving)
        else:
            addresses = [address]
        if address is None or not entry.exact:
            addresses = _checked(host, addresses)
        failure = "this machine has no way to its address"
        for each in addresses[:_MOST_ADDRESSES]:
            connected = await self._tried(each, port)
            if isinstance(connected, socket.socket):
                return connected
            failure = connected
        raise Refused(
            f"{host}:{port} cannot be reached: {failure}. See that the host serves this port, and "
            "try again later",
            *(502, "failed"),
        )

    async def _tried(self, address: Address, port: int) -> socket.socket | str:
        """A connected socket, or why there is none."""
        try:
            return await asyncio.wait_for(self._connected(address, port), CONNECT_S)
        except (TimeoutError, asyncio.TimeoutError):
            return f"no answer in {CONNECT_S:g} s"
        except OSError as reason:
            return reason.strerror or str(reason)

    async def _resolved(self, host: str, port: int, resolving: asyncio.Semaphore) -> list[Address]:
        """All addresses of a name. One that takes long keeps its place among `resolving`."""
        await resolving.acquire()
        try:
            answer = self._loop.run_in_executor(
                self._pool, socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM
            )
        except RuntimeError as reason:  # no thread can be started
            resolving.release()
            raise Refused(
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
            raise Refused(
                f"{host} could not be resolved in {RESOLVE_S:g} s: the resolver of the server's "
                "machine does not answer. Try again later",
                *(504, "failed"),
            )
        try:
            found = answer.result()
            return list(dict.fromkeys(ipaddress.ip_address(each[4][0]) for each in found))
        except (OSError, ValueError, UnicodeError) as reason:
            words = getattr(reason, "strerror", None) or reason
            raise Refused(
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
    """Those that there is a way to. Raises Refused when any is not public: all have to be."""
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
            raise Refused(
                f"{host} is at {address}, which is no public address ({reason}), and names lead "
                f"to public ones only. {_instead(reason)}"
            )
    return ways


def _instead(reason: str) -> str:
    if reason in NAMEABLE:
        return "The operator can name it by its address and port with --network: use that then"
    return "Use another host"
