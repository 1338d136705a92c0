"""From a cell to the tool result a model reads."""

from __future__ import annotations

from mcp_types import CallToolResult, TextContent

from kernel_mcp.output.outputs import Position
from kernel_mcp.output.render import Budget, render
from kernel_mcp.sessions.cell import Cell, Status, StopReason
from kernel_mcp.sessions.session import Session

META_KEY = "kernel-mcp/cell"


async def answer(
    session: Session,
    cell: Cell,
    budget: Budget,
    *,
    since: Position,
    closing: str | None = None,
) -> CallToolResult:
    """What `cell` has put out after `since`, and where it stands now: in the words of `closing`.

    Raises what kept the cell from running, when it could not be run at all.
    """
    cell.told = cell.told or cell.finished.is_set()
    if cell.error is not None:
        raise cell.error
    items, cell.reported = cell.log.since(since), cell.log.position()
    notices, cell.notices = cell.notices, []
    if closing is None:
        closing = closing_line(session, cell)
    notes = [f"[{note}]" for note in (*notices, closing) if note]
    rendered = await render(
        items, session=session.handle, cell=cell.number, budget=budget, notes=notes
    )
    meta = cell.meta(session.handle, omitted=rendered.omitted, outputs=rendered.mime_types)
    return CallToolResult(content=rendered.content, _meta={META_KEY: meta})


def say(text: str) -> CallToolResult:
    """A result that is one sentence."""
    return CallToolResult(content=[TextContent(text=text)])


def closing_line(session: Session, cell: Cell) -> str:
    """The sentence that says how things stand; empty when the output says it all."""
    match cell.status:
        case Status.QUEUED:
            before = session.place(cell)
            return (
                f"queued: cell {cell.number} begins after {before} other "
                f"{'cell' if before == 1 else 'cells'}. Call wait to follow, interrupt to stop "
                "the cell that is running"
            )
        case Status.RUNNING:
            return (
                f"running: cell {cell.number} goes on, variables are kept. Call wait for more "
                "output, interrupt to stop it"
            )
        case Status.INTERRUPTED:
            return f"interrupted: {_cause(cell)}. Variables are kept"
        case Status.TIMEOUT:
            return (
                f"timeout: {_cause(cell)} and was interrupted. Variables are kept; pass a larger "
                "timeout if it needs longer"
            )
        case Status.KILLED if cell.stop_reason in (StopReason.RESET, StopReason.CLOSE):
            return f"killed: {_cause(cell)}, and its variables, imports and definitions are lost"
        case Status.KILLED:
            fresh = "is ready" if session.kernel is not None else "starts with the next cell"
            return (
                f"killed: {_cause(cell)}. All variables, imports and definitions of this session "
                f"are lost; files in the workspace are kept. A fresh kernel {fresh}"
            )
        case _:
            return ""


def _cause(cell: Cell) -> str:
    return (cell.outcome.cause if cell.outcome else None) or "stopped"
