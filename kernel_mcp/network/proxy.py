"""`proxy FD UID [secrets]`: the process that connects to the network for sessions.

It is started by `bare_program("kernel_mcp.network.proxy", FD, UID, packages=True)`.

Sessions have an empty network namespace. The sandbox's init creates listening sockets there, and
this process accepts their connections: a connection belongs to the session of its listener. It
resolves names, checks every address, and connects only to checked addresses. It has one main
thread, and limited memory and descriptors. It runs unprivileged as the user UID (-1: unchanged).
FD is a SOCK_SEQPACKET socket to the server; the process exits when it is closed. Messages of the
server, one packet each:

    {"listen": id, "rules": Rules.to_json(), "exact": null, "session": text}
        with one descriptor: a listening socket (TCP, backlog 1024) in a session's namespace. It
        serves an HTTP proxy: CONNECT, and requests with an absolute URL. Listeners of the same
        `session` share its limits and its step queue; without `session` a listener has its own.
    {"listen": id, "rules": …, "exact": "db.example.com:5432", "session": text}
        the same for one host and port, to which bytes are passed unchanged. The rules have to
        contain exactly this host and port. The server chooses ids; each is used once.
    {"secrets": [Secret.to_json(), …], "authority": null}
        before all others, once, with one descriptor: the CA bundle by which hosts are verified,
        as PEM. `authority` is the certificate and key of an earlier proxy.
    {"close": id}
        stop listening, and cut all connections of that listener; their `end` messages follow.

Messages to the server:

    {"certificate": PEM, "key": PEM}     the authority that sessions have to trust for the hosts of
                                         secrets, and its key, for a restarted proxy
    {"ready": true}                      once: it accepts messages
    {"failed": id, "why": text}          a listener is not valid
    {"end": id, "host": …, "port": …, "verdict": "ok" | "refused" | "failed", "why": text,
     "up": bytes, "down": bytes, "seconds": s, "count": n}
        for each connection, or request on one, that has ended. In a flood, similar ones are summed
        up: `count` > 1, `up`, `down` and `seconds` are sums, `host` is "…" if they differ.

The server has its own copy of each listener. If this process dies, connections wait until the next
one has received the listeners.
"""

from __future__ import annotations

import asyncio
import contextlib
import encodings.idna  # noqa: F401  # getaddrinfo imports it, when files cannot be read
import errno
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from kernel_mcp.barriers import Barrier
from kernel_mcp.linux.process import keep_small, trim
from kernel_mcp.network.connection import Listener, ProxiedConnection, SessionTraffic
from kernel_mcp.network.http import ProxyRefusal
from kernel_mcp.network.records import Records, Traffic
from kernel_mcp.network.rules import Rules, plain_host, split_port
from kernel_mcp.network.secrets import Secret
from kernel_mcp.network.tunnel import PIECE_BYTES, Dialer
from kernel_specs import linux
from kernel_specs.template import packets

if TYPE_CHECKING:
    from kernel_mcp.network.termination import Termination, Terminations

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 1500
"""Open connections of all sessions together. A session with fewer than FEW may exceed it."""
MOST_OF_ONE, FEW = 128, 8
MOST_BYTES = 64 << 30
"""Bytes that one session may pass, both directions together."""
MEMORY_BYTES = 768 << 20
"""Address-space limit. Each connection may buffer 64 KiB a direction while its peer stalls."""
DESCRIPTORS = 8192
_STACK_BYTES = 512 * 1024

_SWEEP_S = 1.0

_ACCEPTED = 16
"""Connections accepted from one listener in one iteration of the event loop."""
_PAUSE_S = 0.02
"""Pause before a listener with too many connections accepts again."""
_TOO_MANY = ProxyRefusal(
    f"this session has {MOST_OF_ONE} connections open, or all sessions together have too many: "
    "close some, or use them again",
    503,
)
_TOO_MUCH = ProxyRefusal(f"this session has passed {MOST_BYTES >> 30} GiB: reset it to go on", 403)


class ProxyServer:
    """The proxy of one server: accepts connections of sessions until the server exits."""

    def __init__(self, control: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._dialer = Dialer()
        self._terminations: Terminations | None = None
        self._records = Records(control, self._loop.time)
        self._listeners: dict[int, Listener] = {}
        self._sessions: dict[str, SessionTraffic] = {}
        self._total = self._most = 0
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the server closes the control socket."""
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._on_control)
        self._send({"ready": True})
        self._sweep()
        await self._stopped

    def _on_control(self) -> None:
        while not self._stopped.done():
            try:
                received = packets.receive(self._control, wait=False)
            except BlockingIOError:
                return
            except packets.DescriptorsLost as lost:
                self._fail(lost.message.get("listen"), str(lost))
                continue
            except (OSError, ValueError) as reason:
                logger.error("a message of the server could not be read: %s", reason)
                continue
            if received is None:
                self._loop.remove_reader(self._control)
                self._stopped.set_result(None)
                return
            with Barrier("doing what the server wants of the network"):
                self._on_message(*received)

    def _on_message(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        if "ping" in message:
            linux.close_all(fds)
            self._send({"pong": message["ping"]})
            return
        if "close" in message:
            linux.close_all(fds)
            if (listener := self._listeners.pop(message["close"], None)) is not None:
                task = self._loop.create_task(self._close(listener))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
            return
        if "secrets" in message:
            self._take_secrets(message["secrets"], message["authority"], fds)
            return
        number = message["listen"]
        try:
            listener = self._listener(message, fds)
        except (OSError, ValueError, KeyError, TypeError) as reason:
            linux.close_all(fds)
            self._fail(number, str(reason))
            return
        self._listeners[number] = listener
        listener.session.listeners += 1
        self._loop.add_reader(listener.sock, self._on_accept, listener)

    def _take_secrets(
        self,
        secrets: Sequence[Sequence[str]],
        authority: Mapping[str, str] | None,
        fds: Sequence[int],
    ) -> None:
        from kernel_mcp.network.termination import Terminations  # `main` has loaded it

        with open(fds[0], "rb") as file:
            trust = file.read().decode("ascii")  # a codec that is always loaded
        self._terminations = Terminations([Secret(*each) for each in secrets], trust, authority)
        self._send(self._terminations.authority.saved)

    def _termination_of(self, host: str) -> Termination | None:
        return None if self._terminations is None else self._terminations.of(host)

    def _listener(self, message: Mapping[str, Any], fds: Sequence[int]) -> Listener:
        """Return the listener that a message describes; it owns the message's descriptor.

        Raises OSError, ValueError, KeyError or TypeError if the message is not valid. The
        descriptor is then still the caller's.
        """
        number, exact = message["listen"], None
        if number in self._listeners or len(fds) != 1:
            raise ValueError("a listener takes an id of its own and one descriptor")
        if message.get("exact") is not None:
            host, port = split_port(message["exact"])
            if port is None:
                raise ValueError("an exact place has a port")
            exact = (plain_host(host), port)
        rules = Rules.from_json(message["rules"])
        sock = socket.socket(fileno=fds[0])
        if sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6):
            sock.detach()
            raise ValueError("it is no TCP socket")
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.detach()
            raise ValueError("it does not listen")
        sock.setblocking(False)
        key = str(message.get("session", number))
        session = self._sessions.setdefault(key, SessionTraffic(key, self._loop))
        return Listener(number, sock, rules, exact, session)

    def _on_accept(self, listener: Listener) -> None:
        session, turned_away = listener.session, False
        for _ in range(_ACCEPTED):
            try:
                sock, _ = listener.sock.accept()
            except BlockingIOError:
                break
            except OSError as reason:  # no descriptors left, or already aborted
                if reason.errno != errno.ECONNABORTED:
                    self._pause_accepting(listener)
                return
            refusal = self._limit_reached(session)
            if refusal is None:
                self._begin(listener, sock)
            else:
                self._refuse(listener, sock, refusal)
                turned_away = True
        if turned_away:
            self._pause_accepting(listener)

    def _limit_reached(self, session: SessionTraffic) -> ProxyRefusal | None:
        """Return why a session gets no further connection, or None if it gets one."""
        mine = len(session.connections)
        if mine >= MOST_OF_ONE or (self._total >= MOST_CONNECTIONS and mine >= FEW):
            return _TOO_MANY
        return _TOO_MUCH if session.used > MOST_BYTES else None

    def _begin(self, listener: Listener, sock: socket.socket) -> None:
        connection = ProxiedConnection(
            listener, sock, self._dialer, self._records, self._termination_of
        )
        self._total += 1
        self._most = max(self._most, self._total)
        listener.connections.add(connection)
        listener.session.connections.add(connection)
        connection.task.add_done_callback(lambda _: self._ended(listener, connection))

    def _ended(self, listener: Listener, connection: ProxiedConnection) -> None:
        self._total -= 1
        listener.connections.discard(connection)
        listener.session.forget(connection)

    def _refuse(self, listener: Listener, sock: socket.socket, refusal: ProxyRefusal) -> None:
        """Answer a connection with `refusal` and close it, without keeping any state."""
        with sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            if listener.exact is None:
                sock.send(refusal.answer())
            sock.shutdown(socket.SHUT_WR)
            sock.recv(PIECE_BYTES)  # an unread request would reset the connection
        self._records.add(listener.number, listener.exact or ("", 0), refusal, Traffic(0, 0, 0.0))

    def _pause_accepting(self, listener: Listener) -> None:
        """Stop accepting for a moment, so that one flooding session does not slow down others."""
        self._loop.remove_reader(listener.sock)
        self._loop.call_later(_PAUSE_S, self._resume_accepting, listener)

    def _resume_accepting(self, listener: Listener) -> None:
        if self._listeners.get(listener.number) is listener:
            self._loop.add_reader(listener.sock, self._on_accept, listener)

    async def _close(self, listener: Listener) -> None:
        self._loop.remove_reader(listener.sock)
        listener.sock.close()
        tasks = [connection.task for connection in listener.connections]
        for connection in list(listener.connections):
            connection.cut(ProxyRefusal("the session's kernel has ended", 503, "failed"))
        await asyncio.gather(*tasks, return_exceptions=True)
        self._records.flush(listener.number)
        listener.session.listeners -= 1
        if not listener.session.listeners:
            self._sessions.pop(listener.session.key, None)

    def _sweep(self) -> None:
        """End connections over their time or volume, and send collected records; every second."""
        self._loop.call_later(_SWEEP_S, self._sweep)
        now = self._loop.time()
        for session in self._sessions.values():
            too_much = session.used > MOST_BYTES
            for connection in list(session.connections):
                if too_much:
                    connection.cut(_TOO_MUCH)
                else:
                    connection.check_timeout(now)
        self._records.flush()
        if self._most > MOST_OF_ONE and self._total < FEW:  # a peak of many sessions is over
            self._most = self._total
            trim()

    def _fail(self, number: object, why: str) -> None:
        self._send({"failed": number, "why": why})

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            packets.send(self._control, message)


def _confine(uid: int) -> None:
    """Set resource limits and drop all capabilities; switch to the user `uid` unless it is -1.

    Memory and descriptors are limited, and no file can be written.
    """
    bounds = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_NOFILE: DESCRIPTORS,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    if uid >= 0:
        bounds[resource.RLIMIT_NPROC] = 64  # per user: threads that resolve names
    for kind, value in bounds.items():
        most = resource.getrlimit(kind)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))
    if uid >= 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    linux.clear_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)


async def _serve(control: socket.socket) -> None:
    await ProxyServer(control).run()


def main(argv: Sequence[str]) -> NoReturn:
    """Run the proxy for the server at descriptor `argv[0]`, as the user id `argv[1]`.

    A third argument is given if the server has secrets.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    linux.set_name("kernel-network")
    keep_small()
    threading.stack_size(_STACK_BYTES)
    control = socket.socket(fileno=int(argv[0]))
    control.set_inheritable(False)
    if argv[2:]:
        import_module("kernel_mcp.network.termination")
    _confine(int(argv[1]))
    asyncio.run(_serve(control))
    os._exit(0)  # threads may still resolve names
