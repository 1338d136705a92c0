"""Whole lives of kernels in the template, so that those it forks find their code in use.

Python writes to code that it has run a few times only, and to names whose methods it looks up; on
pages that each kernel would copy for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kernel_specs.restricted import config, confine
from kernel_specs.restricted.checkpoints.requests import Lifeline
from kernel_specs.restricted.console.tracebacks import forgetting
from kernel_specs.restricted.wire.zmtp import Decoder, encode, opening
from kernel_specs.template import immortal

LIVES = 10
"""Python 3.11 adapts code that has run eight times."""
CELL = "print(1)\n1"
LONGEST_REPLY = 1 << 20
_PORTS = {"shell": 1, "iopub": 2, "stdin": 3, "control": 4, "hb": 5}
_TYPES = {"shell": b"DEALER", "control": b"DEALER", "iopub": b"SUB"}
"""Of the other ends of `config.ENDS`."""
_REQUESTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("shell", "kernel_info_request", {}),
    *[
        (
            "shell",
            "kernel_mcp_prewarm_request",
            {
                "code": CELL,
                "silent": False,
                "store_history": False,
                "user_expressions": {},
                "allow_stdin": False,
                "stop_on_error": False,
                "cell_number": None,
            },
        )
    ]
    * 2,
)


def live(app: Any) -> None:
    """Start, use and end a kernel `LIVES` times, then keep what is there for ever.

    Nothing is left but what Python remembers of its code. Raises what goes wrong in it.
    """
    for _ in range(LIVES):
        once_more(app)
    immortal.keep()


def once_more(app: Any) -> None:
    """The same once: a process that waits to be a kernel has the pages then that one writes to."""
    with tempfile.TemporaryDirectory() as folder, _restored(app), forgetting(app.shell):
        _live(app, Path(folder))


def _live(app: Any, folder: Path) -> None:
    connection = folder / "connection.json"
    connection.write_text(json.dumps(_connection(folder)))
    host, guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with host, guest:
        connection.with_name("boot.json").write_text(json.dumps(_boot(guest.fileno())))
        boot = config.load(connection)
        confine.environment(boot)
        kernel = app.kernel
        kernel.boot, kernel.lifeline = boot, Lifeline(-1)
        clients = _clients(host)
        app.connect(boot, connection, lasting=False)
    kernel.start()
    main, control = kernel._tasks
    loop, beside = kernel.io_loop.asyncio_loop, app.service.io_loop
    thread = threading.Thread(target=beside.start, name=app.service.name)
    thread.start()
    try:
        loop.run_until_complete(_use(app, clients))
    finally:
        for client in clients.values():
            client.close()
        beside.add_callback(_end, control, beside.stop)
        thread.join()
        main.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(main)
        app.disconnect()


def _end(task: asyncio.Task[None], then: Callable[[], object]) -> None:
    task.add_done_callback(lambda _task: then())
    task.cancel()


def _connection(folder: Path) -> dict[str, Any]:
    ports = {f"{channel}_port": port for channel, port in _PORTS.items()}
    signed = {"key": os.urandom(32).hex(), "signature_scheme": "hmac-sha256"}
    return {"transport": "ipc", "ip": f"{folder}/k", "kernel_name": "restricted", **ports, **signed}


def _boot(ready_fd: int) -> dict[str, Any]:
    """A boot file that restricts nothing: what that takes cannot be undone."""
    return {
        "version": config.VERSION,
        "policy": {"allow_all": True, "modules": ["math"]},
        "limits": {"memory_bytes": 0, "cpus": 0, "pids": 0, "open_files": 0, "file_bytes": 0},
        "workspace": "/workspace",
        "tmp": tempfile.gettempdir(),
        "layers": [],
        "ready_fd": ready_fd,
        "connected": True,
        "variables": {"A": ""},
        "runtime": ["/usr"],
    }


@contextlib.contextmanager
def _restored(app: Any) -> Iterator[None]:
    """Put back what a connected kernel changes, of the process and of the application."""
    kernel, hook, publisher = app.kernel, app.shell.displayhook, app.shell.display_pub
    handlers, sockets = kernel.shell_handlers, (hook.pub_socket, publisher.pub_socket)
    streams, standard = (sys.stdout, sys.stderr), {fd: os.dup(fd) for fd in (1, 2)}
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        kernel.shell_handlers = handlers
        hook.pub_socket, publisher.pub_socket = sockets
        sys.stdout, sys.stderr = streams
        for fd, kept in standard.items():
            os.dup2(kept, fd)
            os.close(kept)
        signal.signal(signal.SIGINT, on_interrupt)
        app.shell.loops.close()
        asyncio.set_event_loop(None)


def _clients(host: socket.socket) -> dict[str, Client]:
    """Send a kernel what it is sent before it connects. Raises OSError."""
    pairs = {name: socket.socketpair() for name in config.ENDS}
    socket.send_fds(host, [b"sockets"], [guest.fileno() for _, guest in pairs.values()])
    for _, guest in pairs.values():
        guest.close()
    return {name: Client(ours, _TYPES[name]) for name, (ours, _) in pairs.items()}


async def _use(app: Any, clients: Mapping[str, Client]) -> None:
    """Ask what a server asks, and wait for the replies."""
    app.console.use()
    for name, kind, content in _REQUESTS:
        message = app.session.msg(kind, content)
        await clients[name].send(app.session.serialize(message, []))
        await clients[name].reply()


class Client:
    """The other end of a kernel's connection."""

    def __init__(self, connection: socket.socket, kind: bytes) -> None:
        """Greet. Raises OSError."""
        self._socket = connection
        self._socket.setblocking(False)
        self._socket.send(opening(kind))
        self._decoder = Decoder(LONGEST_REPLY)

    async def send(self, frames: list[bytes]) -> None:
        """Send a message."""
        await asyncio.get_running_loop().sock_sendall(self._socket, encode(frames))

    async def reply(self) -> list[bytes]:
        """The next message. Raises EOFError, ProtocolError."""
        while (message := self._decoder.message()) is None:
            data = await asyncio.get_running_loop().sock_recv(self._socket, LONGEST_REPLY)
            if not data:
                raise EOFError("the kernel has hung up")
            self._decoder.feed(data)
        return message

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
