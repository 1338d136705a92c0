"""Link of a front to its cluster: Ray runs in a child process, which the front outlives.

Ray ends a process at once when Ray's own process on the machine ends, and after a minute without
the head. `Link` has as much of Ray's interface as a front uses; `driver` is the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
import subprocess
import sys
from itertools import count
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc

from kernel_mcp.errors import ConfigError, KernelMcpError
from kernel_mcp.fleet.cluster import (
    NAMESPACE,
    REGISTRY,
    FleetUnavailable,
    check_head,
    secret_of,
)
from kernel_mcp.fleet.driver import HEADER_BYTES, frame, read_frame
from kernel_mcp.fleet.front import FleetCalls

logger = logging.getLogger(__name__)

DRIVER = "kernel_mcp.fleet.driver"
CONNECT_S = 60.0
"""Timeout in seconds for Ray to connect."""
RETRY_S = 1.0
_WHY = "its head, or Ray on the machine of this front, has stopped"
_DOWN = f"The fleet cannot be reached: {_WHY}. The front tries again. Call again in some seconds."
_CUT = (
    f"The fleet was lost while it answered this call: {_WHY}. What the call asked for may have "
    "been done in part, and is not done again by itself. The front tries to reach the fleet again."
)


class RayError(Exception):
    """A failed call, as Ray's exception of this name."""


class RayActorError(RayError):
    """The actor of a call is lost."""


_KINDS: dict[str, type[Exception]] = {
    "config": ConfigError,
    "lost": RayActorError,
    "missing": ValueError,
    "refused": FleetUnavailable,
}


class _Reply:
    """Replies to one request. Awaited, it is the next one; iterated, it yields all of them."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def __await__(self) -> Any:
        return self._next().__await__()

    async def __anext__(self) -> _Reply:
        kind, value = await self.arrived.get()
        if kind == "end":
            raise StopAsyncIteration
        found = _Reply()
        found.arrived.put_nowait((kind, value))
        return found

    async def _next(self) -> Any:
        kind, value = await self.arrived.get()
        if kind != "value":
            raise _KINDS.get(kind, RayError)(value)
        return value


class _Method:
    """A method of an actor; see Ray."""

    def __init__(self, link: Link, actor: str, name: str, *, streams: bool = False) -> None:
        self._link = link
        self._names = actor, name
        self._streams = streams

    def options(self, **_: object) -> _Method:
        """Return the method, as one whose calls yield replies."""
        return _Method(self._link, *self._names, streams=True)

    def remote(self, *arguments: Any) -> _Reply:
        """Call the method."""
        return self._link.ask((*self._names, arguments, self._streams))


class _Actor:
    """An actor, which is looked up by its name; see Ray."""

    def __init__(self, link: Link, name: str) -> None:
        self._named = link, name

    def __getattr__(self, name: str) -> _Method:
        return _Method(*self._named, name)


class Link:
    """The cluster as a front sees it. `run` must run as a task while calls are made."""

    exceptions = SimpleNamespace(
        RayError=RayError, RayActorError=RayActorError, ObjectLostError=RayActorError
    )

    def __init__(self, address: str, place: str) -> None:
        """`place` is this machine's IP address in the cluster; if empty, Ray chooses it."""
        self._where = address, place
        self._numbers = count()
        self._pending: dict[int, _Reply] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None

    def get_actor(self, name: str, _namespace: str = NAMESPACE) -> _Actor:
        """Look up an actor. Blocking, in a worker thread. Raises ValueError without one."""
        anyio.from_thread.run(self._find, name)
        return _Actor(self, name)

    @property
    def registry(self) -> Any:
        """The registry of the cluster."""
        return _Actor(self, REGISTRY)

    def calls(self) -> FleetCalls:
        """Return the calls of a front by this link."""
        return FleetCalls(self, self.registry, restart=self.restart)

    async def _find(self, name: str) -> None:
        await self.ask((name, "", (), False))

    def ask(self, request: tuple[Any, ...]) -> _Reply:
        """Send a request to the driver, and return the reply, which arrives later."""
        reply = _Reply()
        if self._writer is None:
            reply.arrived.put_nowait(("refused", _DOWN))
            return reply
        number = next(self._numbers)
        self._pending[number] = reply
        self._writer.write(frame((number, *request)))
        return reply

    def connect(self) -> None:
        """Start the driver, and wait until it has connected. Blocking.

        Raises ConfigError, FleetUnavailable.
        """
        address, place = self._where
        secret_of(address)
        check_head(address)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", DRIVER, str(theirs.fileno()), address, place],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=[theirs.fileno()],
                cwd="/",  # else Ray would import modules from the current folder
                start_new_session=True,
            )
        self._socket.settimeout(CONNECT_S)
        kind, text = "refused", f"Ray has given up connecting to {address}; see above"
        try:
            with self._socket.makefile("rb") as file:
                kind, text = pickle.loads(file.read(int.from_bytes(file.read(HEADER_BYTES), "big")))
        except TimeoutError:
            text = f"Ray has not connected to {address} within {CONNECT_S:g} s"
        except (OSError, EOFError) as error:
            logger.debug("%s: %s", text, error)
        if kind != "value":
            self.end()
            raise _KINDS[kind](text)
        self._socket.setblocking(False)

    def restart(self) -> None:
        """End a driver that has connected; `run` starts another one."""
        if self._writer is not None:
            self.end()

    def end(self) -> None:
        """End the driver."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Receive replies, and connect again whenever the driver has ended; until cancelled."""
        try:
            reader, self._writer = await asyncio.open_connection(sock=self._socket)
            task_status.started()
            while True:
                with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                    while True:
                        number, kind, value = await read_frame(reader)
                        self._arrived(number, kind, value)
                self._writer.close()
                self._writer = None
                logger.error("the fleet at %s cannot be reached: %s", self._where[0], _WHY)
                for number in list(self._pending):
                    self._arrived(number, "refused", _CUT)
                await self._connect_again()
                reader, self._writer = await asyncio.open_connection(sock=self._socket)
                logger.warning("the fleet at %s is reached again", self._where[0])
        finally:
            self.end()

    def _arrived(self, number: int, kind: str, value: Any) -> None:
        reply = self._pending.pop(number) if kind != "item" else self._pending[number]
        reply.arrived.put_nowait(("value" if kind == "item" else kind, value))

    async def _connect_again(self) -> None:
        before = ""
        while True:
            await anyio.sleep(RETRY_S)
            try:
                return await anyio.to_thread.run_sync(self.connect, abandon_on_cancel=True)
            except KernelMcpError as error:
                if str(error) != before:
                    logger.warning("%s", error)
                before = str(error)
