"""`proxy FD UID`: a process that connects for sessions.

It is started by `bare_program("kernel_mcp.network.proxy", FD, UID, packages=True)`.

Sessions have an empty network namespace. What listens there was made by the sandbox's init and is
accepted from here: the listener *is* the session. The process resolves names, checks every address
and connects to the one it has checked. It is one thread, has bounded memory and descriptors, and
runs as the user UID (-1: as it was started) without privileges. FD is a SOCK_SEQPACKET socket to
the server; at its end the process ends. Messages of the server, one packet each:

    {"listen": id, "rules": Rules.to_json(), "exact": null}
        with one descriptor: a socket that listens (TCP, backlog 1024) in the namespace of a
        session. HTTP is spoken there: CONNECT, and requests with an absolute address.
    {"listen": id, "rules": …, "exact": "db.example.com:5432"}
        the same for one host and port, whose bytes are passed as they are. The host has to be
        among the rules with this port, exactly. Ids are the server's; each is used once.
    {"close": id}
        stop listening and cut every connection of that listener; its last `end`s follow.

And the answers:

    {"ready": true}                      once: it accepts messages
    {"failed": id, "why": text}          a listener could not be taken
    {"end": id, "host": …, "port": …, "verdict": "ok" | "refused" | "failed", "why": text,
     "up": bytes, "down": bytes, "seconds": s, "count": n}
        one for each connection, or request of one, that has ended. From a flood several that are
        alike come as one: `count` > 1, `up` and `down` their sums, `host` "…" where they differ.

The server closes its own copy of a listener after it was sent. When this process dies, what it
listened at refuses connections: new sessions get a new one.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_CONNECTIONS = 1000
"""Of all sessions together."""
MOST_OF_ONE = 200
"""Connections of one listener."""


def main(argv: Sequence[str]) -> int:
    """Serve the server whose socket is the descriptor `argv[0]`, as the user `argv[1]`."""
    raise NotImplementedError
