"""Jupyter endpoints of a server's sessions, each opened at the first request for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import InputError
from kernel_mcp.sessions.session import Session

if TYPE_CHECKING:
    from kernel_mcp.endpoints.endpoint import KernelEndpoint


class KernelEndpoints:
    """Opens endpoints in `folder` while `running`; `sessions` returns those of the server."""

    def __init__(self, folder: Path, sessions: Callable[[], Sequence[Session]]) -> None:
        self._folder = folder
        self._sessions = sessions
        self._open: dict[tuple[str, bool], KernelEndpoint] = {}
        self._opening = anyio.Lock()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._context: Any = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve the endpoints that are requested inside this block."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                yield
                tasks.cancel_scope.cancel()
        finally:
            self._tasks = None
            if self._context is not None:
                self._context.destroy(linger=0)

    async def answer(self, question: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Open the endpoint of a session, and return its connection file; None for other questions.

        `join` in the question names a session, empty for the only one. With `plain` nothing that a
        web page could execute goes through the endpoint, and with `record` the answer has the
        session's cells. Raises InputError if there is no such session, and OSError or ZMQError if
        the endpoint cannot be opened.
        """
        if not isinstance(name := question.get("join"), str):
            return None
        session, only_plain = self._find(name), question.get("plain") is True
        async with self._opening:
            endpoint = self._open.get((session.handle, only_plain))
            if endpoint is None:
                endpoint = await self._opened(session, only_plain)
        record = await endpoint.record() if question.get("record") is True else {}
        return {
            "session": session.handle,
            "name": session.name,
            "file": str(endpoint.file),
            **record,
        }

    async def _opened(self, session: Session, only_plain: bool) -> KernelEndpoint:
        made: Any = await anyio.to_thread.run_sync(import_module, "kernel_mcp.endpoints.endpoint")
        if self._tasks is None:
            raise InputError("The server is ending.")
        if self._context is None:
            self._context = made.zmq.asyncio.Context()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        endpoint: KernelEndpoint = made.KernelEndpoint(
            session, self._folder, self._context, only_plain=only_plain
        )
        try:
            endpoint.open()
        except BaseException:
            endpoint.close()
            raise
        self._open[session.handle, only_plain] = endpoint
        session.events.note("join")
        self._tasks.start_soon(self._serve, endpoint, only_plain)
        return endpoint

    async def _serve(self, endpoint: KernelEndpoint, only_plain: bool) -> None:
        try:
            with Barrier("serving the front of a session", endpoint.session.handle):
                await endpoint.serve()
        finally:
            del self._open[endpoint.session.handle, only_plain]

    def _find(self, name: str) -> Session:
        """Return a session by its handle or name. Raises InputError."""
        sessions = self._sessions()
        found = [each for each in sessions if name in ("", each.handle)]
        found = found or [each for each in sessions if each.name == name]
        if len(found) == 1:
            return found[0]
        if found:
            several = ", ".join(each.handle for each in found)
            raise InputError(f"There are several sessions: name one by its handle, of {several}.")
        raise InputError(f"There is no session {name!r}." if name else "There is no session.")
