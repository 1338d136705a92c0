"""Nodes of a fleet in one process, without Ray: real sessions, and which nodes are lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from mcp_types import CallToolResult

from kernel_mcp.config.settings import Settings
from kernel_mcp.fleet.messages import caller_row
from kernel_mcp.fleet.persistence import FleetPersistence, factory_with
from kernel_mcp.fleet.session_registry import FleetSessionRegistry
from kernel_mcp.fleet.session_table import SessionTable
from kernel_mcp.fleet.sessions import NodeSessions
from kernel_mcp.fleet.shared_store import SharedStore
from kernel_mcp.fleet.signed import Signed
from kernel_mcp.fleet.storage import FolderStorage
from kernel_mcp.sandbox.select import proven_sandbox
from kernel_mcp.server import AppContext, app_context
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.tools.local import LocalCalls
from tests.integration.agent import Answer
from tests.integration.calls_contract import Person

KEY = b"the key of this fleet"
PATIENCE_S = 60


@dataclass
class FakeNode:
    """A node whose calls are made here."""

    name: str
    built: AppContext
    store: SharedStore
    sessions: NodeSessions
    asked: int = 0

    async def ask(
        self, caller: Caller, tool: str, *, told: bool = True, **arguments: Any
    ) -> Mapping[str, Any]:
        """Its reply to a call."""
        self.asked += 1
        number = f"{self.name}-{self.asked}"
        call = {
            "id": number,
            "tool": tool,
            "arguments": arguments,
            "caller": caller_row(caller),
            "request": "1",
            "patience_s": 0.0,
        }
        with anyio.fail_after(PATIENCE_S):
            reply = await self.sessions.call(call)
        if told:
            self.sessions.delivered(number)
        return reply

    async def call(self, person: Person, tool: str, **arguments: Any) -> Answer:
        """Its answer to a call, which has to be about a session that it has."""
        reply = await self.ask(person.caller, tool, **arguments)
        assert "answer" in reply, reply
        return Answer(CallToolResult.model_validate(reply["answer"]))

    async def run(self, person: Person, code: str, **arguments: Any) -> str:
        answer = await self.call(person, "execute", code=code, **arguments)
        assert answer.status == "ok", answer.text
        return answer.text

    async def saved(self, handle: str, cell: int) -> None:
        """Wait until other nodes could go on with a session as it was after a cell."""
        with anyio.fail_after(PATIENCE_S):
            while True:
                known = await anyio.to_thread.run_sync(self.store.table.find, handle)
                if known is not None and known.row.saved and known.row.saved["cell"] == cell:
                    return
                await anyio.sleep(0.02)


@dataclass
class Nodes:
    """Nodes of one fleet; `lost` are lives of nodes that are over."""

    folder: Path
    lost: set[str]

    def rows(self, name: str, life: str) -> SessionTable:
        return SessionTable(Signed(FolderStorage(self.folder / "store"), KEY), name, life)

    @asynccontextmanager
    async def node(self, name: str, **given: Any) -> AsyncIterator[FakeNode]:
        """One node, until the block ends."""
        settings = Settings(
            **{"warm": 0, "no_template": True, "state_dir": self.folder / name, **given},
            fleet_store=str(self.folder / "store"),
        )
        rows = self.rows(name, f"life of {name}")
        kept: list[FleetPersistence] = []

        def make(state: Path) -> SharedStore:
            return SharedStore(
                state / "fleet",
                rows,
                most_bytes=0,
                most_s=1e9,
                most_files_bytes=settings.limits.disk_bytes,
            )

        def let_go() -> None:
            for each in kept:
                each.store.close()

        async def until_over(node: str, life: str, most_s: float) -> bool:
            return life in self.lost

        async def is_over(node: str, life: str) -> bool:
            return life in self.lost

        registry = FleetSessionRegistry(name, is_over, lambda: kept[0])
        async with AsyncExitStack() as stack:
            stack.callback(let_go)
            built = await stack.enter_async_context(
                app_context(
                    settings,
                    proven_sandbox("auto"),
                    persistence_factory=factory_with(make, kept),
                    registry=registry,
                )
            )
            local = LocalCalls(built)
            sessions = NodeSessions(local, built.manager, kept[0], registry, until_over)
            kept[0].store.overtaken = sessions.overtaken
            yield FakeNode(name, built, kept[0].store, sessions)

    def lose(self, node: FakeNode) -> None:
        """The lease of a node is over: others may go on with what it has."""
        self.lost.add(f"life of {node.name}")
