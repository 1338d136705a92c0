"""Our server, in each of the ways in which it can be reached."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from mcp.client import Client

from benchmarks.connection import Era, answer, call, connected
from benchmarks.notebooks import Answer
from benchmarks.places import PACKAGES
from benchmarks.processes import children
from benchmarks.results import BenchmarkError
from kernel_mcp.config.settings import Settings
from kernel_mcp.protocol import StdioCallers, build_mcp
from kernel_mcp.sandbox.select import proven_sandbox
from kernel_mcp.server import AppContext, app_context
from kernel_mcp.sessions.cell import Status
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import DeliveryTracker
from kernel_mcp.sessions.session import Session

ALLOW = ",".join(PACKAGES)
MAX_SESSIONS = 512
CELL_S = 120.0
BEGUN_S = 0.2
"""After so long a cell that was started is taken to be running."""
_CELL = "kernel-mcp/cell"
_UNGROUPED = ("unshare", "--mount", "sh", "-c", 'umount -R /sys/fs/cgroup && exec "$@"', "sh")
"""Runs a command where no control groups are mounted, as most users have it; requires root."""


class McpNotebook:
    """A session behind an MCP client."""

    def __init__(self, client: Client, handle: str) -> None:
        self._client = client
        self._handle = handle

    async def run(self, code: str) -> Answer:
        """Run a cell to its end."""
        return answer(await self._execute(code, "ok", wait=CELL_S))

    async def begin(self, code: str) -> None:
        """Start a cell that does not end, and return while it is running."""
        await self._execute(code, "running", wait=BEGUN_S)

    async def interrupt(self) -> None:
        """Stop the cell and return once it has ended."""
        result = await call(self._client, "interrupt", session=self._handle)
        _check(result.meta, "interrupted")

    async def close(self) -> None:
        """End the session."""
        await call(self._client, "close_session", session=self._handle)

    async def _execute(self, code: str, status: str, *, wait: float) -> Any:
        arguments = {"code": code, "session": self._handle, "wait": wait}
        if wait == CELL_S:
            del arguments["wait"]  # as a client calls it
        result = await call(self._client, "execute", **arguments)
        _check(result.meta, status)
        return result


def _check(meta: dict[str, Any] | None, status: str) -> None:
    found = (meta or {}).get(_CELL, {}).get("status")
    if found != status:
        raise BenchmarkError(f"the cell is {found!r} instead of {status!r}")


class McpServer:
    """Our server behind an MCP client. `pid` is 0 where it has no process of its own."""

    def __init__(self, client: Client, pid: int = 0) -> None:
        self.client = client
        self.pid = pid

    async def open(self) -> McpNotebook:
        """A new session."""
        result = await call(self.client, "create_session")
        return McpNotebook(self.client, str((result.structured_content or {})["session"]))

    async def default(self) -> McpNotebook:
        """The default session."""
        return McpNotebook(self.client, "")


class DirectNotebook:
    """A session in this process."""

    def __init__(self, built: AppContext, session: Session) -> None:
        self._built = built
        self._session = session

    async def run(self, code: str) -> Answer:
        """Run a cell to its end."""
        cell = self._session.submit(code, CELL_S)
        await self._session.scheduler.follow(cell, CELL_S, None)
        if cell.error is not None:
            raise cell.error
        if cell.outcome is None or cell.outcome.status is not Status.OK:
            raise BenchmarkError(f"the cell {code[:60]!r} ended with {cell.outcome}")
        return Answer("".join(cell.log.text()))

    async def begin(self, code: str) -> None:
        """Start a cell that does not end, and return while it is running."""
        cell = self._session.submit(code, CELL_S)
        await self._session.scheduler.follow(cell, BEGUN_S, None)

    async def interrupt(self) -> None:
        """Stop the cell and return once it has ended."""
        await self._session.scheduler.interrupt()

    async def hibernate(self) -> None:
        """Save the variables and end the kernel."""
        if not await self._session.hibernate():
            raise BenchmarkError("the session was not hibernated")

    async def close(self) -> None:
        """End the session."""
        await self._built.manager.close(self._session)


class DirectServer:
    """The parts of our server in this process, without MCP."""

    def __init__(self, built: AppContext) -> None:
        self.built = built

    async def open(self) -> DirectNotebook:
        """A new session."""
        return DirectNotebook(self.built, await self.built.manager.create(Caller()))


def command(*flags: str, allow: str = ALLOW) -> list[str]:
    """How our server is started."""
    return [sys.executable, "-m", "kernel_mcp", "--allow", allow,
            "--max-sessions", str(MAX_SESSIONS), *flags]  # fmt: skip


@asynccontextmanager
async def over_stdio(
    folder: Path, *flags: str, era: Era = "auto", grouped: bool = True
) -> AsyncIterator[McpServer]:
    """Our server as a process of its own; unless `grouped`, one without control groups."""
    before = children(os.getpid())
    words = command(*flags) if grouped else [*_UNGROUPED, *command(*flags)]
    async with connected(words, folder, era) as client:
        (started,) = children(os.getpid()) - before
        yield McpServer(client, started)


@asynccontextmanager
async def in_process(
    folder: Path,
    *,
    warm: int = 0,
    no_template: bool = False,
    profile: str = "default",
) -> AsyncIterator[DirectServer]:
    """The parts of our server, with what they keep ready being kept ready."""
    settings = Settings(
        allow=PACKAGES,
        warm=warm,
        no_template=no_template,
        profile=profile,
        max_sessions=MAX_SESSIONS,
        state_dir=folder,
    )
    sandbox = await anyio.to_thread.run_sync(proven_sandbox, *settings.sandbox)
    async with app_context(settings, sandbox) as built, anyio.create_task_group() as tasks:
        await built.factory.warm_up()
        tasks.start_soon(built.pool.fill)
        yield DirectServer(built)
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def in_memory(server: DirectServer) -> AsyncIterator[McpServer]:
    """An MCP client of parts in this process, without any transport."""
    async with Client(build_mcp(server.built, StdioCallers(DeliveryTracker()))) as client:
        yield McpServer(client)
