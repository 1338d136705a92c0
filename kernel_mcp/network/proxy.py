"""`proxy FD UID [secrets]`: a process that connects for sessions.

It is started by `bare_program("kernel_mcp.network.proxy", FD, UID, packages=True)`.

Sessions have an empty network namespace. What listens there was made by the sandbox's init and is
accepted from here: the listener *is* the session. The process resolves names, checks every address
and connects to the one it has checked. It is one thread, has bounded memory and descriptors, and
runs as the user UID (-1: as it was started) without privileges. FD is a SOCK_SEQPACKET socket to
the server; at its end the process ends. Messages of the server, one packet each:

    {"listen": id, "rules": Rules.to_json(), "exact": null, "session": text}
        with one descriptor: a socket that listens (TCP, backlog 1024) in the namespace of a
        session. HTTP is spoken there: CONNECT, and requests with an absolute address. Listeners
        of the same session share its bounds and its turns; without `session` the id is one.
    {"listen": id, "rules": …, "exact": "db.example.com:5432", "session": text}
        the same for one host and port, whose bytes are passed as they are. The host has to be
        among the rules with this port, exactly. Ids are the server's; each is used once.
    {"secrets": [Secret.to_json(), …], "authority": null}
        before all others, once, with one descriptor: certificates of the authorities that hosts
        are verified by, as PEM. `authority` is what an earlier proxy has answered.
    {"close": id}
        stop listening and cut every connection of that listener; its last `end`s follow.

And the answers:

    {"certificate": PEM, "key": PEM}     what sessions have to trust for the hosts of secrets, and
                                         what the next proxy needs to go on with it
    {"ready": true}                      once: it accepts messages
    {"failed": id, "why": text}          a listener could not be taken
    {"end": id, "host": …, "port": …, "verdict": "ok" | "refused" | "failed", "why": text,
     "up": bytes, "down": bytes, "seconds": s, "count": n}
        one for each connection, or request of one, that has ended. From a flood several that are
        alike come as one: `count` > 1, `up` and `down` their sums, `host` "…" where they differ.

The server keeps its own copy of a listener. When this process dies, connections wait until the
next one has been given them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import encodings.idna  # noqa: F401  # getaddrinfo wants it, when it may be read no more
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
from kernel_mcp.network.connection import Connection, Listener, Session
from kernel_mcp.network.http import Refused
from kernel_mcp.network.records import Records, Used
from kernel_mcp.network.rules import Rules, plain_host, split_port
from kernel_mcp.network.secrets import Secret
from kernel_mcp.network.tunnel import PIECE_BYTES, Dialer
from kernel_specs.template import linux, packets

if TYPE_CHECKING:
    from kernel_mcp.network.termination import Termination, Terminations

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 1500
"""Of all sessions together; a session with few of them gets some beyond."""
MOST_OF_ONE, FEW = 128, 8
MOST_BYTES = 64 << 30
"""Both ways, by one session."""
MEMORY_BYTES = 768 << 20
"""Of addresses. Each connection may hold 64 KiB a way while the other side takes nothing."""
DESCRIPTORS = 8192
_STACK_BYTES = 512 * 1024

_SWEEP_S = 1.0

_ACCEPTED = 16
"""Connections that one listener may begin in one round of the event loop."""
_PAUSE_S = 0.02
"""How long a listener rests that has too many."""
_TOO_MANY = Refused(
    f"this session has {MOST_OF_ONE} connections open, or all sessions together have too many: "
    "close some, or use them again",
    503,
)
_TOO_MUCH = Refused(f"this session has passed {MOST_BYTES >> 30} GiB: reset it to go on", 403)


class Proxy:
    """Serves one server until that is gone."""

    def __init__(self, control: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._dialer = Dialer()
        self._terminations: Terminations | None = None
        self._records = Records(control, self._loop.time)
        self._listeners: dict[int, Listener] = {}
        self._sessions: dict[str, Session] = {}
        self._total = self._most = 0
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve; returns when the server has gone."""
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._on_control)
        self._tell({"ready": True})
        self._sweep()
        await self._over

    def _on_control(self) -> None:
        while not self._over.done():
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
                self._over.set_result(None)
                return
            with Barrier("doing what the server wants of the network"):
                self._on_message(*received)

    def _on_message(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        if "ping" in message:
            linux.close_all(fds)
            self._tell({"pong": message["ping"]})
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
        self._tell(self._terminations.authority)

    def _ending(self, host: str) -> Termination | None:
        return None if self._terminations is None else self._terminations.of(host)

    def _listener(self, message: Mapping[str, Any], fds: Sequence[int]) -> Listener:
        """What a message means; its descriptor is taken. Raises OSError, ValueError and such."""
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
        session = self._sessions.setdefault(key, Session(key, self._loop))
        return Listener(number, sock, rules, exact, session)

    def _on_accept(self, listener: Listener) -> None:
        session, turned_away = listener.session, False
        for _ in range(_ACCEPTED):
            try:
                sock, _ = listener.sock.accept()
            except BlockingIOError:
                break
            except OSError as reason:  # no descriptors, or the connection was gone again
                if reason.errno != errno.ECONNABORTED:
                    self._rest(listener)
                return
            refusal = self._full(session)
            if refusal is None:
                self._begin(listener, sock)
            else:
                self._turn_away(listener, sock, refusal)
                turned_away = True
        if turned_away:
            self._rest(listener)

    def _full(self, session: Session) -> Refused | None:
        """Why a session gets no more connections."""
        mine = len(session.connections)
        if mine >= MOST_OF_ONE or (self._total >= MOST_CONNECTIONS and mine >= FEW):
            return _TOO_MANY
        return _TOO_MUCH if session.used > MOST_BYTES else None

    def _begin(self, listener: Listener, sock: socket.socket) -> None:
        connection = Connection(listener, sock, self._dialer, self._records, self._ending)
        self._total += 1
        self._most = max(self._most, self._total)
        listener.connections.add(connection)
        listener.session.connections.add(connection)
        connection.task.add_done_callback(lambda _: self._ended(listener, connection))

    def _ended(self, listener: Listener, connection: Connection) -> None:
        self._total -= 1
        listener.connections.discard(connection)
        listener.session.forget(connection)

    def _turn_away(self, listener: Listener, sock: socket.socket, refusal: Refused) -> None:
        """Say no to a connection without keeping anything of it."""
        with sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            if listener.exact is None:
                sock.send(refusal.answer())
            sock.shutdown(socket.SHUT_WR)
            sock.recv(PIECE_BYTES)  # a request not read would take the answer back
        self._records.add(listener.number, listener.exact or ("", 0), refusal, Used(0, 0, 0.0))

    def _rest(self, listener: Listener) -> None:
        """Accept nothing for a moment: who floods waits, and the others go on."""
        self._loop.remove_reader(listener.sock)
        self._loop.call_later(_PAUSE_S, self._go_on, listener)

    def _go_on(self, listener: Listener) -> None:
        if self._listeners.get(listener.number) is listener:
            self._loop.add_reader(listener.sock, self._on_accept, listener)

    async def _close(self, listener: Listener) -> None:
        self._loop.remove_reader(listener.sock)
        listener.sock.close()
        tasks = [connection.task for connection in listener.connections]
        for connection in list(listener.connections):
            connection.cut(Refused("the session's kernel has ended", 503, "failed"))
        await asyncio.gather(*tasks, return_exceptions=True)
        self._records.flush(listener.number)
        listener.session.listeners -= 1
        if not listener.session.listeners:
            self._sessions.pop(listener.session.key, None)

    def _sweep(self) -> None:
        """Every second: end what takes too long or too much, and tell what was kept."""
        self._loop.call_later(_SWEEP_S, self._sweep)
        now = self._loop.time()
        for session in self._sessions.values():
            too_much = session.used > MOST_BYTES
            for connection in list(session.connections):
                if too_much:
                    connection.cut(_TOO_MUCH)
                else:
                    connection.look(now)
        self._records.flush()
        if self._most > MOST_OF_ONE and self._total < FEW:  # more than one session can have
            self._most = self._total
            trim()

    def _fail(self, number: object, why: str) -> None:
        self._tell({"failed": number, "why": why})

    def _tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            packets.send(self._control, message)


def _confine(uid: int) -> None:
    """Give up memory, descriptors, files, and where `uid` is a user what this one may."""
    bounds = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_NOFILE: DESCRIPTORS,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    if uid >= 0:
        bounds[resource.RLIMIT_NPROC] = 64  # of this user alone: threads that look up names
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
    await Proxy(control).run()


def main(argv: Sequence[str]) -> NoReturn:
    """Serve the server whose socket is the descriptor `argv[0]`, as the user `argv[1]`.

    A third word is for a server with secrets.
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
    os._exit(0)  # threads may still look up names
