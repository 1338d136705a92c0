"""The run of a script in a session of its own, which ends with it."""

from __future__ import annotations

import anyio
from mcp_types import CallToolResult, ResourceLink

from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.output.outputs import Position
from kernel_mcp.output.render import text_by_stream
from kernel_mcp.packages.requirements import SCRIPT_FILE, expect_script
from kernel_mcp.sessions.cell import Cell, Status
from kernel_mcp.sessions.history import KEPT_S
from kernel_mcp.sessions.session import Session
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools.asking import followed, may_ask
from kernel_mcp.tools.calls import Call
from kernel_mcp.tools.closing import next_step
from kernel_mcp.tools.results import CELL_KEY, answer, with_notices

MOST_FILES = 10


async def run_once(
    services: ToolContext,
    opened: Session,
    script: str,
    call: Call,
    report: ProgressCallback,
) -> CallToolResult:
    """Run a script in its session, close that and return the answer; the record stays a while.

    If the call is cancelled, the next answer of the caller's default session names the record.
    """
    try:
        with opened.needed():  # else it makes room for another session before its cell
            await expect_script(opened, report)
            cell = opened.submit(script, opened.timeout_s)
        may_ask(opened, cell, call, services.settings)
        with opened.queue.attending(cell):
            try:
                await followed(opened, cell, float("inf"), call)
            except anyio.get_cancelled_exc_class():
                if text := _given_up(opened, cell):
                    services.manager.directory.tell(call.caller, text)
                raise
        cell.state_as_of = None
        result = await answer(
            opened,
            cell,
            call.caller.response,
            since=Position(),
            settings=services.settings,
            closing=_script_end(opened, cell),
        )
        streams, _ = await anyio.to_thread.run_sync(text_by_stream, cell.log)
        files = await anyio.to_thread.run_sync(_files, opened)
    finally:
        with anyio.CancelScope(shield=True):
            await services.manager.close(opened, keep_record=True)
            services.manager.tombstones.mark_delivered(opened.handle)
    assert result.meta is not None
    outcome = {**result.meta[CELL_KEY], **streams}
    return _closed(result.model_copy(update={"meta": {CELL_KEY: outcome}}), files)


def _files(session: Session) -> list[str]:
    try:
        listing = session.workspace.list_files(session.workspace.path)
    except WorkspaceError:
        return []
    own = f"{session.workspace.path}/"  # paths begin so, if sessions begin in a mount
    names = [
        f"{entry.path} ({entry.size:,} bytes)"
        for entry in listing.entries
        if (path := entry.path.removeprefix(own)) != SCRIPT_FILE and not path.startswith(".")
    ]
    more = len(names) - MOST_FILES
    return [*names[:MOST_FILES], *([f"{more} more"] if more > 0 else [])]


def _given_up(session: Session, cell: Cell) -> str:
    """Return a notice of what a script has put out whose call was cancelled; empty for nothing."""
    if not cell.log.characters:
        return ""
    return (
        f"kernel://{session.handle}/cells/{cell.number} has what the script put out whose call was "
        f"cancelled, for {KEPT_S / 60:.0f} minutes: pass it to read_file as `path`"
    )


def _script_end(session: Session, cell: Cell) -> str:
    """Return a sentence on the end of a script, or advice on a missing module; may be empty."""
    if cell.outcome is None or cell.status in (Status.OK, Status.ERROR):
        return next_step(session, cell)
    return f"{cell.status.value}: {cell.outcome.cause or 'stopped'}"


def _closed(result: CallToolResult, files: list[str]) -> CallToolResult:
    """Return an answer with notices on its links and files, as its session was closed."""
    notes = []
    if any(isinstance(block, ResourceLink) for block in result.content):
        notes.append(f"the addresses in this answer can be read for {KEPT_S / 60:.0f} minutes")
    if files:
        notes.append(
            f"the script wrote {', '.join(files)}: gone with its session. Use execute to keep files"
        )
    return result.model_copy(update={"content": with_notices(result.content, notes)})
