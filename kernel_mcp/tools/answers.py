"""From a cell to the tool result a model reads."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from mcp_types import CallToolResult, TextContent

from kernel_mcp.output.outputs import Position
from kernel_mcp.output.render import Budget, Rendered, render
from kernel_mcp.sessions.cell import Cell, Status, StopReason
from kernel_mcp.sessions.lifecycle import FILES_KEPT, lost_names
from kernel_mcp.sessions.losses import Reply
from kernel_mcp.sessions.session import Session
from kernel_mcp.tools.telling import CELL_KEY, with_notices


async def answer(
    session: Session,
    cell: Cell,
    budget: Budget,
    reply: Reply,
    *,
    since: Position,
    closing: str | None = None,
) -> CallToolResult:
    """What `cell` has put out after `since`, and where it stands now: in the words of `closing`.

    All that counts as told when `reply` is delivered. An error when the cell could not be run.
    """
    ended, unsaid = cell.finished.is_set(), cell.unsaid
    items, position = cell.log.since(since), cell.log.position()
    if closing is None:
        closing = closing_line(session, cell)
    remarks = len(cell.notices)
    notices = [*(each.text for each in unsaid), *cell.notices, *([closing] if closing else [])]
    said = [*unsaid, *([cell.own] if cell.own is not None and cell.error is None else [])]
    if cell.error is not None:
        rendered = Rendered([TextContent(text=str(cell.error))], 0, [])
    else:
        rendered = await render(items, session=session.handle, cell=cell.number, budget=budget)
    reply.carry(session.ledger, said)
    if (own := cell.own) is not None and own in said:
        reply.receipt.then(lambda: session.ledger.told_by_its_cell(own))
    reply.receipt.then(
        lambda: cell.delivered(ended=ended, to=position, notices=remarks, said=unsaid)
    )
    meta = cell.meta(session.handle, omitted=rendered.omitted, outputs=rendered.mime_types)
    anew = _made_anew(session, cell)
    meta["lost"] = [name for name in meta["lost"] if name not in anew]
    return CallToolResult(
        content=with_notices(rendered.content, notices),
        is_error=cell.error is not None,
        _meta={CELL_KEY: meta},
    )


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
                f"running: cell {cell.number} goes on. Call wait for more output, interrupt to "
                "stop it"
            )
        case Status.INTERRUPTED:
            return f"interrupted: {_cause(cell)}.{_kept(cell)}"
        case Status.TIMEOUT:
            return (
                f"timeout: {_cause(cell)} and was interrupted.{_kept(cell)} Pass a larger timeout "
                "if it needs longer"
            )
        case Status.KILLED if cell.stop_reason in (StopReason.RESET, StopReason.CLOSE):
            return f"killed: {_cause(cell)}, and its variables, imports and definitions are lost"
        case Status.KILLED if _run_since(session, cell):
            return (
                f"killed: {_cause(cell)}. All variables, imports and definitions made before are "
                f"lost; {FILES_KEPT}. Later cells have run on a fresh kernel."
                f"{_names(cell, _made_anew(session, cell))}"
            )
        case Status.KILLED:
            fresh = "is ready" if session.kernel is not None else "starts with the next cell"
            return (
                f"killed: {_cause(cell)}. All variables, imports and definitions of this session "
                f"are lost; {FILES_KEPT}. A fresh kernel {fresh}.{_names(cell)}"
            )
        case _:
            return ""


def _cause(cell: Cell) -> str:
    return (cell.outcome.cause if cell.outcome else None) or "stopped"


def _kept(cell: Cell) -> str:
    return "" if cell.losses else " Variables are kept."


def _names(cell: Cell, but: Container[str] = ()) -> str:
    if cell.own is None or cell.own.loss is None:
        return ""
    loss = cell.own.loss
    return lost_names(replace(loss, names=tuple(name for name in loss.names if name not in but)))


def _run_since(session: Session, cell: Cell) -> bool:
    """Whether this is old news: a later cell has begun."""
    last = session.cells[-1]
    return last.number > cell.number and last.status is not Status.QUEUED


def _made_anew(session: Session, cell: Cell) -> frozenset[str]:
    """Names that later cells have made, which are no longer lost."""
    if session.kernel is None or not cell.losses or not _run_since(session, cell):
        return frozenset()
    return frozenset(session.kernel.names)
