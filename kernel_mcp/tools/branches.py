"""The tools that go back and try several ways: undo, branch, adopt."""

from __future__ import annotations

from typing import Annotated

from mcp_types import CallToolResult
from pydantic import Field

from kernel_mcp.errors import InputError
from kernel_mcp.sessions.losses import Rollback, cells_in_words
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import AnyContext, SessionArg, Toolbox, Whole
from kernel_mcp.tools.hints import CHANGES, DESTROYS
from kernel_mcp.tools.models import Adopted, Branched, BranchHandle, Undone
from kernel_mcp.tools.results import with_pending


def register(box: Toolbox, services: ToolContext) -> None:
    """Add these tools to `box`."""
    tool, manager = box.tool, services.manager

    @tool(DESTROYS, "Undo cells")
    async def undo(
        ctx: AnyContext,
        session: SessionArg = "",
        cells: Whole = 1,
    ) -> Undone:
        """Take back the last cells: variables are as at a checkpoint before them, files stay.

        The answer lists the cells that are gone; there may be more.
        """
        if cells < 1:
            raise InputError(f"cells={cells} is not usable: pass 1 or more.")
        _, found = await box.resolve(ctx, session)
        found.request.interpreter.require("undo")
        back = await found.undo(cells)
        tagged = await found.notebooks.undone(back.undone)
        return Undone(
            session=found.handle,
            state_as_of=back.as_of or None,
            gone=list(back.undone),
            lost=list(back.names),
            note=" ".join([_undone(back, cells), *tagged]),
        )

    @tool(CHANGES, "Branch a session")
    async def branch(
        ctx: AnyContext,
        session: SessionArg = "",
        n: Whole = 2,
    ) -> Branched:
        """Go on from here in `n` sessions with copies of all variables; then adopt one.

        They share the folder and the memory limit; os.environ['BRANCH_DIR'] is a private folder.
        """
        _, found = await box.resolve(ctx, session)
        found.request.interpreter.require("branch")
        made = await manager.branches.make(found, n)
        return Branched(
            session=found.handle,
            branches=[
                BranchHandle(session=each.handle, folder=each.workspace.own_name(path))
                for each, path in made
            ],
            note=(
                "Each has all variables as of now, and changes of one are not seen by the others; "
                "random generators differ. The session itself goes on, too. adopt makes one branch "
                "the session; close_session drops one."
            ),
        )

    @tool(DESTROYS, "Adopt a branch")
    async def adopt(
        ctx: AnyContext,
        branch: Annotated[str, Field(description="Its handle")],
    ) -> Annotated[CallToolResult, Adopted]:
        """Give the variables of a branch to its original session, and close all branches."""
        if not branch:
            raise InputError("Pass the handle of a branch, as branch has given it.")
        caller, found = await box.resolve(ctx, branch)
        handle = found.handle
        root, gone = await manager.branches.adopt(found)
        lost = f" What {cells_in_words(gone)} did there since then is gone." if gone else ""
        on = f"Session {root.handle} goes on with all that branch {handle} has"
        if root is found:
            on = (
                f"Branch {handle} goes on by itself, as the session that it came of was closed; "
                "its variables end with this server"
            )
        pending = root.notifications.pending
        caller.response.attach(root.notifications, pending)
        adopted = Adopted(
            session=root.handle,
            gone=gone,
            note=(
                f"{on}; the other branches are closed.{lost} Files are as they are: the branch's "
                f"own stay in .branches/{handle}."
            ),
        )
        return with_pending(adopted, root, pending)


def _undone(back: Rollback, cells: int) -> str:
    where = f"as after cell {back.as_of}" if back.as_of else "as before the first cell"
    gone = f"what {cells_in_words(back.undone)} did is gone" if back.undone else "nothing is gone"
    text = f"Variables are {where}: {gone}."
    if len(back.undone) > cells:
        text += " No checkpoint lay nearer: run again what is still wanted."
    return f"{text} Nothing was run again, and files were not rolled back."
