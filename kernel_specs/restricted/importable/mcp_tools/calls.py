"""Connections of the gateway of tools, which calls this process: one for each request.

Children that are forked accept connections at the same socket. To close one cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import sys
from collections.abc import Callable, Generator
from typing import Any, cast

from mcp_tools.values import Answer, ToolUnavailable

HEADER_BYTES = 8 * 1024 * 1024
"""Bytes of the JSON of a frame at most."""
SIZE_BYTES = 4
"""Bytes of the number, big endian, that precedes that JSON."""
ASK_S = 1.0
"""Seconds without a connection after which the server is asked again."""
WAIT_S = 60.0
"""Seconds without a connection until a call fails, unless another one of this process is open."""
FD_NAME = "KERNEL_MCP_TOOLS_FD"
_GONE = (
    "the gateway of tools has ended the call: it was stopped, or the cell was interrupted; call "
    "again, which starts it anew"
)
_NO_GATEWAY = (
    f"the gateway of tools has not called within {WAIT_S:g} s: the server may be busy, or other "
    "processes of this session have too many calls open; try again later"
)
_NOT_HERE = (
    "this process cannot call tools: call them in the session, or in processes of multiprocessing; "
    "to a process of subprocess, pass_fds=[tools.fileno()] of the session gives them"
)
_ASK_FIRST = "import tools in the session itself before it starts processes that do"


class _UnreadError(Exception):
    """The gateway has ended before it has read the request, as Linux reports."""


ATTEMPTS = 2
"""How often a request is sent that was not read."""
Reading = Generator[memoryview, int, Answer]
Progress = Callable[[Any], object]


class Gateway:
    """The calling side of the gateway, for all threads and event loops of a process."""

    def __init__(self) -> None:
        self._open: set[socket.socket] = set()
        self._asked_by = 0
        """Process id of the kernel that has asked last; a copy of it asks for itself."""
        self._lost = True
        os.register_at_fork(after_in_child=self._leave)

    def fileno(self) -> int:
        """Return the descriptor of the socket that accepts calls; -1 if there is none."""
        kernel = _kernel()
        return int(os.environ.get(FD_NAME, -1) if kernel is None else kernel.tools_fd)

    def ask(self) -> None:
        """Ask the server that the gateway calls. Raises ToolUnavailable."""
        kernel = _kernel()
        if kernel is not None:
            if not kernel.ask_for_tools() and kernel._pid != self._asked_by:
                raise ToolUnavailable(_ASK_FIRST)
            self._asked_by = kernel._pid
        self._lost = False

    def call(self, request: dict[str, Any], progress: Progress) -> Answer:
        """Send a request; return header and blobs of the answer. Raises ToolError, TypeError."""
        frame = _frame(request)
        for _ in range(ATTEMPTS):
            with self._listening() as listening:
                connection = self._accept(listening)
            with contextlib.suppress(_UnreadError), self._own(connection):
                with _present():
                    connection.sendall(frame)
                reading = _reading(progress)
                space = next(reading)
                while True:
                    with _present():
                        size = connection.recv_into(space)
                    try:
                        space = reading.send(size)
                    except StopIteration as end:
                        return cast(Answer, end.value)
        raise ToolUnavailable(_GONE)

    async def call_async(self, request: dict[str, Any], progress: Progress) -> Answer:
        """See `call`; the event loop goes on meanwhile. Cancelling cancels the request."""
        frame, loop = _frame(request), asyncio.get_running_loop()
        for _ in range(ATTEMPTS):
            with self._listening() as listening:
                connection = await self._accept_async(loop, listening)
            with contextlib.suppress(_UnreadError), self._own(connection):
                connection.setblocking(False)
                with _present():
                    await loop.sock_sendall(connection, frame)
                reading = _reading(progress)
                space = next(reading)
                while True:
                    with _present():
                        size = await loop.sock_recv_into(connection, space)
                    try:
                        space = reading.send(size)
                    except StopIteration as end:
                        return cast(Answer, end.value)
        raise ToolUnavailable(_GONE)

    def _listening(self) -> socket.socket:
        """Return the socket that accepts calls, by a descriptor of its own: a loop waits for each.

        Raises ToolUnavailable.
        """
        try:
            found = socket.socket(fileno=os.dup(self.fileno()))
        except (OSError, OverflowError, ValueError):
            raise ToolUnavailable(_NOT_HERE) from None
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.close()
            raise ToolUnavailable(_NOT_HERE)
        found.setblocking(False)
        kernel = _kernel()
        if self._lost or (kernel is not None and kernel._pid != self._asked_by):
            self.ask()
        return found

    def _accept(self, listening: socket.socket) -> socket.socket:
        poll = select.poll()
        poll.register(listening, select.POLLIN)
        waited_s = 0.0
        while True:
            if not poll.poll(ASK_S * 1000):
                waited_s += ASK_S
                self._keep_asking(waited_s)
                continue
            with contextlib.suppress(BlockingIOError):  # another thread or process was faster
                connection, _ = listening.accept()
                if _lives(connection):
                    return connection

    async def _accept_async(
        self, loop: asyncio.AbstractEventLoop, listening: socket.socket
    ) -> socket.socket:
        waited_s = 0.0
        while True:
            try:
                connection, _ = await asyncio.wait_for(loop.sock_accept(listening), ASK_S)
            except asyncio.TimeoutError:
                waited_s += ASK_S
                self._keep_asking(waited_s)
                continue
            if _lives(connection):
                return connection

    def _keep_asking(self, waited_s: float) -> None:
        if waited_s >= WAIT_S and not self._open:
            raise ToolUnavailable(_NO_GATEWAY)
        self.ask()

    @contextlib.contextmanager
    def _own(self, connection: socket.socket) -> Generator[None, None, None]:
        """Close a connection at the end, in whatever way that comes."""
        self._open.add(connection)
        try:
            connection.settimeout(None)  # code of cells may have set another default
            yield
        except (ToolUnavailable, _UnreadError):
            self._lost = True
            raise
        finally:
            self._open.discard(connection)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # children may hold the descriptor, too
            connection.close()

    def _leave(self) -> None:
        """Close the connections of the parent in a forked child."""
        for connection in self._open:
            connection.close()
        self._open = set()


@contextlib.contextmanager
def _present() -> Generator[None, None, None]:
    """Raise ToolUnavailable or _UnreadError if the connection has ended."""
    try:
        yield
    except (BrokenPipeError, ConnectionResetError):
        raise _UnreadError from None
    except OSError:
        raise ToolUnavailable(_GONE) from None


def _lives(connection: socket.socket) -> bool:
    """Return True for a connection that its other end has not closed; else close it."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass  # reset
    connection.close()
    return False


def _kernel() -> Any:
    """Return the kernel whose process, or whose forked child, this is; None in other programs."""
    module = sys.modules.get("IPython.core.getipython")
    shell = None if module is None else module.get_ipython()
    kernel = getattr(shell, "kernel", None)
    return kernel if hasattr(kernel, "tools_fd") else None


def _frame(request: dict[str, Any]) -> bytes:
    """Return a request in the form in which it is sent. Raises TypeError, ValueError."""
    form = {"allow_nan": False, "ensure_ascii": False, "default": _plain}
    try:
        text = json.dumps(request, **form).encode()  # type: ignore[arg-type]
    except RecursionError:
        raise ValueError("the arguments of a tool are nested too deeply for JSON") from None
    except UnicodeEncodeError:
        raise ValueError("an argument of a tool has half of a surrogate pair, no text") from None
    if len(text) > HEADER_BYTES:
        raise ValueError(f"the arguments of a tool may have {HEADER_BYTES:,} bytes as JSON at most")
    return len(text).to_bytes(SIZE_BYTES, "big") + text


def _plain(value: Any) -> Any:
    """Return a date, a path, or a value of numpy or pandas as JSON has it. Raises TypeError."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for name in ("isoformat", "tolist"):
        if callable(convert := getattr(value, name, None)):
            return convert()
    raise TypeError(f"arguments of tools are JSON, which has no {type(value).__name__}")


def _reading(progress: Progress) -> Reading:
    """Yield space for what is received, and take its size; return header and blobs of an answer.

    Raises ToolUnavailable for what is no answer.
    """
    while True:
        size = int.from_bytes((yield from _filled(SIZE_BYTES)), "big")
        header: Any = None
        if 0 < size <= HEADER_BYTES:
            with contextlib.suppress(ValueError, RecursionError):
                header = json.loads((yield from _filled(size)))
        sizes = header.get("blobs", []) if isinstance(header, dict) else None
        if not isinstance(sizes, list) or not all(
            type(each) is int and each >= 0 for each in sizes
        ):
            raise ToolUnavailable("the gateway of tools sent no valid answer")
        blobs = []
        for each in sizes:
            blobs.append((yield from _filled(each)))  # noqa: PERF401  # it yields
        if "progress" not in header:
            return header, blobs
        progress(header["progress"])


def _filled(size: int) -> Generator[memoryview, int, bytearray]:
    """Yield space until `size` bytes have come; return them. Raises ToolUnavailable."""
    data = bytearray(size)
    left = memoryview(data)
    while left:
        if not (received := (yield left)):
            raise ToolUnavailable(_GONE)
        left = left[received:]
    return data
