"""Telling whoever waits for a cell what is new, while it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from kernel_mcp.sessions.cell import Cell

Report = Callable[[str], Awaitable[None]]

EVERY_S = 0.1
CHARS = 2000


async def silence(_text: str) -> None:
    """The report to nobody."""


async def narrate(cell: Cell, report: Report) -> None:
    """Report the steps before the cell and its new output, at most ten times a second."""
    told = cell.reported
    steps = changes = 0
    ended = False
    while not ended:
        changes = await cell.heard(changes)
        ended = cell.finished.is_set()
        for step in cell.steps[steps:]:
            await report(step)
        steps = len(cell.steps)
        text = cell.log.news(told, CHARS).strip("\n")
        told = cell.log.position()
        if text:
            await report(text)
        if not ended:
            with anyio.move_on_after(EVERY_S):
                await cell.finished.wait()
