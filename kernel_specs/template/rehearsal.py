"""Go once through what a first cell does, so that no child has to fill the same caches again.

Lazy imports, defaults of traits, specialised bytecode, fonts: what is filled here is shared by all
children, and what is not costs each of them time and memory. Only the code below is run, nothing
is sent, and names and history are put back.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kernel_specs.restricted.forgetting import forgetting
from kernel_specs.restricted.sockets import Router, listen
from kernel_specs.restricted.zmtp import GREETING, encode, ready

CELLS = ("1", "print('text')", "import math\nmath.pi", "def f(): return [1]\nf()", "1/0")
LIBRARY_CELLS = {
    "numpy": "import numpy\nnumpy.linspace(0, 1, 9).reshape(3, 3) @ numpy.eye(3)",
    "pandas": (
        "import pandas\n"
        "frame = pandas.DataFrame({'a': [1, 1, 2], 'b': [0.5, 1.5, 2.5], 'c': list('xyz')})\n"
        "print(frame.groupby('a').b.mean(), frame[frame.b > 1].sort_values('c'))\n"
        "frame.describe()"
    ),
    "matplotlib": "import matplotlib.pyplot\nmatplotlib.pyplot.plot([1, 2])",
}
"""What nearly everybody does first with a library."""


class _Nobody:
    """A socket that takes everything and leads nowhere."""

    def send_multipart(self, *_: Any, **__: Any) -> None:
        """Forget a message."""


def rehearse(app: Any, modules: Sequence[str]) -> None:
    """Run cells in the shell of a kernel that is not connected yet, then undo what they did."""
    with tempfile.TemporaryDirectory() as folder:
        _use_sockets(f"{folder}/s")
    _use_loops()
    with forgetting(app.shell), _disconnected(app.shell):
        for cell in (*CELLS, *(LIBRARY_CELLS[name] for name in modules if name in LIBRARY_CELLS)):
            _run(app.shell, cell)


def _run(shell: Any, cell: str) -> None:
    coroutine = shell.run_request(cell, silent=False, store_history=False, cell_id=None)
    with contextlib.suppress(StopIteration):
        coroutine.send(None)


@contextlib.contextmanager
def _disconnected(shell: Any) -> Iterator[None]:
    """Let output go nowhere."""
    hook, publisher = shell.displayhook, shell.display_pub
    streams = sys.stdout, sys.stderr
    sockets = hook.pub_socket, publisher.pub_socket
    hook.pub_socket = publisher.pub_socket = _Nobody()
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        hook.pub_socket, publisher.pub_socket = sockets


def _use_sockets(prefix: str) -> None:
    """Listen, connect, and send a message each way, as a kernel and its client do; none is left."""
    listening, port = listen("ipc", prefix, 0)
    router = Router(listening)
    with contextlib.closing(router), socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{prefix}-{port}")
        client.send(GREETING + ready(b"DEALER") + encode([b"request", b""]))
        router.receive()
        message = router.receive()
        if message is not None:
            router.send(message)


def _use_loops() -> None:
    """Run event loops, one of them in a thread; none is left."""
    from tornado.ioloop import IOLoop

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(asyncio.sleep(0))
    background = IOLoop(make_current=False)
    thread = threading.Thread(target=background.start)
    thread.start()
    background.add_callback(background.stop)
    thread.join()
    background.close()
