"""Calls that are answered with an error once the server stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
from mcp_types import CallToolResult
from mcp_types import Tool as Definition

from kernel_mcp.errors import ServerStops
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.tools.calls import Call, SessionCalls
from kernel_mcp.tools.results import refusal

STOPS = (
    "The server is stopping, so this call was given up before its end. Call again when the server "
    "is back; what it keeps of the session is there then (see info)."
)


class StoppableCalls:
    """Implements `SessionCalls` by others, whose running calls `end` cancels."""

    def __init__(self, calls: SessionCalls) -> None:
        self._calls = calls
        self._running: set[anyio.CancelScope] = set()
        self._over = anyio.Event()
        """Set once `end` was called and no call is running."""
        self._ends = False

    async def definitions(self) -> Sequence[Definition]:
        """See `SessionCalls`."""
        return await self._calls.definitions()

    async def call(self, tool: str, arguments: Mapping[str, Any], call: Call) -> CallToolResult:
        """See `SessionCalls`. The answer is an error that says so if the server stops."""
        answer: CallToolResult | None = None
        with anyio.CancelScope() as scope:
            self._running.add(scope)
            try:
                answer = await self._calls.call(tool, arguments, call)
            finally:
                self._running.discard(scope)
                self._note_end()
        return refusal(ServerStops(STOPS)) if answer is None else answer

    async def read(self, uri: str, caller: Caller) -> tuple[str | bytes, str]:
        """See `SessionCalls`."""
        return await self._calls.read(uri, caller)

    def end(self) -> int:
        """Cancel all running calls; return their number. To be called when the server stops."""
        self._ends = True
        for scope in self._running:
            scope.cancel()
        self._note_end()
        return len(self._running)

    async def aclose(self) -> None:
        """Cancel all running calls and wait for their end."""
        self.end()
        await self._over.wait()

    def _note_end(self) -> None:
        if self._ends and not self._running:
            self._over.set()
