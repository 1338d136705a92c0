"""Texts for the models of clients that take tasks, where they differ from those of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext

from kernel_mcp.instructions import LONG_CELLS
from kernel_mcp.tools.jobs import declared

AFTER_WAIT = (
    "After `wait` seconds it answers `running` and the cell goes on: wait follows it, interrupt "
    "stops it."
)
"""Sentence in the description of `execute`."""
OTHERWISE = {
    LONG_CELLS: "they go on as tasks: do other work, the result comes by itself; interrupt stops "
    "one.",
    AFTER_WAIT: "A cell that takes over 5 s goes on as a task, whose result comes by itself: do "
    "other work meanwhile.",
}
"""The sentences for clients with tasks, by those that they replace."""


async def speak_of_tasks(ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
    """Replace sentences in instructions and definitions for a client that declares tasks."""
    result = await call_next(ctx)
    if ctx.method not in ("server/discover", "tools/list") or not declared(ctx):
        return result
    if not isinstance(result, Mapping):
        return result
    if ctx.method == "server/discover":
        return {**result, "instructions": _replaced(result.get("instructions") or "")}
    tools = [
        {**tool, "description": _replaced(tool.get("description") or "")}
        for tool in result.get("tools", ())
    ]
    return {**result, "tools": tools}


def _replaced(text: str) -> str:
    for plain, of_tasks in OTHERWISE.items():
        text = text.replace(plain, of_tasks)
    return text
