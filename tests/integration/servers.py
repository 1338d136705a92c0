"""Servers that tests of a module share: one for each set of flags, as users start it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup, TaskStatus
from mcp import StdioServerParameters
from mcp.client import Client

from tests.integration.agent import Agent, command


class Servers:
    """Starts servers that stay until the module's last test has ended."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._clients: dict[tuple[object, ...], Client] = {}
        self._ended = anyio.Event()

    @asynccontextmanager
    async def agent(
        self, *flags: str, era: str = "auto", pauses: bool = True
    ) -> AsyncIterator[Agent]:
        """A client of the server with these flags, which has no session; `pauses`: see `command`.

        All sessions are closed behind the block. A test that stops the server, counts what it does
        or looks at what it has left starts one of its own.
        """
        client = self._clients.get(key := (era, pauses, *flags))
        if client is None:
            started = command(*flags, pauses=pauses)
            client = await self._tasks.start(self._run, era, started)
            self._clients[key] = client
        agent = Agent(client)
        try:
            yield agent
        finally:
            with anyio.CancelScope(shield=True):
                for session in (await agent.call("list_sessions")).data["sessions"]:
                    await agent.call("close_session", session=session["session"])

    def close(self) -> None:
        """End all of them."""
        self._ended.set()

    async def _run(
        self, era: str, started: StdioServerParameters, *, task_status: TaskStatus[Client]
    ) -> None:
        """Enter and leave a client in one task, whichever test wants it first."""
        async with Client(started, mode=era) as client:
            task_status.started(client)
            await self._ended.wait()


@asynccontextmanager
async def shared_servers() -> AsyncIterator[Servers]:
    """Servers for as long as the block lasts."""
    async with anyio.create_task_group() as tasks:
        servers = Servers(tasks)
        try:
            yield servers
        finally:
            servers.close()
