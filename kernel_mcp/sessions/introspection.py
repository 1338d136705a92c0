"""Requests to a session's kernel that run no cell: for its variables, for completions and so on."""

from __future__ import annotations

from typing import Any

import anyio

from kernel_mcp.errors import LaunchError
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.snapshot import counted, descriptions

VARIABLES_TIMEOUT_S = 5.0
INQUIRY_S = 2.0
"""Seconds after which a kernel that has not answered a front end's request is interrupted."""


async def variables_of(session: Session, match: str = "", offset: int = 0) -> dict[str, Any]:
    """Return descriptions of the user's variables, and in `omitted` the number of others.

    `match` and `offset` choose some of a live kernel's own. Others ignore them; `offset` of the
    result is the number of variables that were passed over. There are none without a kernel. Those
    of a hibernated session are described as saved. Raises LaunchError if the kernel cannot answer
    because the running cell blocks it.
    """
    if (saved := session.kernel_state.pending_restore) is not None:
        return {"variables": saved.variables, "omitted": 0, "offset": 0}
    kernel = session.kernel
    if kernel is None:
        return {"variables": [], "omitted": 0, "offset": 0}
    try:
        reply = await kernel.describe_variables(match, offset, VARIABLES_TIMEOUT_S)
    except LaunchError:
        if kernel.exit is None and session.kernel is kernel:
            raise
        async with session.turn:  # wait for the report of the running cell, if it died in one
            await session.recovery.note_death()
        if session.kernel is not kernel:
            return await variables_of(session, match, offset)
        return {"variables": [], "omitted": 0, "offset": 0}
    return {
        "variables": descriptions(reply.get("variables")),
        "omitted": counted(reply.get("omitted")) or 0,
        "offset": counted(reply.get("offset")) or 0,
    }


async def inquire(session: Session, kind: str, content: dict[str, Any]) -> dict[str, Any] | None:
    """Send the kernel a shell request, such as one for completions, and return the reply.

    A kernel that has not answered after `INQUIRY_S` seconds is interrupted. Returns None without an
    answer, without a kernel, or while the kernel is in use.
    """
    kernel = session.kernel
    if kernel is None or session.queue.busy or session.turn.locked():
        return None
    async with session.turn:
        if kernel is not session.kernel or kernel.exit is not None:
            return None
        with kernel.asking("shell", kind, content) as answer:
            for _ in range(2):
                with anyio.move_on_after(INQUIRY_S):
                    await answer.done.wait()
                if answer.done.is_set():
                    break
                kernel.interrupt(alone=True)
    return None if answer.message is None else answer.message.content
