"""Which calls of tools run, and how many: the operator's list, trust, and budgets."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from kernel_mcp.config.tool_servers import READ_ONLY, ToolServer

Verdict: TypeAlias = Literal["runs", "asks"]

CALLS = 2000
"""Calls of one cell, and of a kernel between two cells."""


def verdict(server: ToolServer, tool: Mapping[str, Any], allowed: Sequence[str]) -> Verdict:
    """Return what becomes of a call of a tool, as its server lists it.

    The hint of a tool is a claim of its server: it counts where the operator trusts the server.
    """
    name = f"{server.name}.{tool.get('name', '')}"
    if any(fnmatchcase(name, each) for each in allowed):
        return "runs"
    hints = tool.get("annotations")
    claims = isinstance(hints, dict) and hints.get("readOnlyHint") is True
    return "runs" if claims and server.trust == READ_ONLY else "asks"


class Rate:
    """The rate of calls of one server: a call that would exceed it waits."""

    def __init__(self, calls: int, per_s: float) -> None:
        """At most `calls` begin in `per_s` seconds; 0 is no limit."""
        self._calls, self._per_s = calls, per_s
        self._begun: deque[float] = deque(maxlen=calls or 1)
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Wait until the next call may begin, one after the other."""
        if not self._calls:
            return
        async with self._turn:
            if len(self._begun) == self._calls:
                await asyncio.sleep(self._begun[0] + self._per_s - time.monotonic())
            self._begun.append(time.monotonic())
