"""Sessions that hibernate, as the tests bring them to it."""

from __future__ import annotations

from typing import Any

import anyio

from tests.integration.agent import Agent, Answer

IDLE = ("--idle-timeout", "1")


async def state_of(notebook: Agent, session: str = "") -> dict[str, Any]:
    """Return the entry of a session in `list_sessions`, the only one by default."""
    found = (await notebook.call("list_sessions")).data["sessions"]
    return next(item for item in found if session in ("", item["session"]))


async def asleep(notebook: Agent, session: str = "") -> None:
    """Wait until a session has been hibernated."""
    with anyio.fail_after(60):
        while (await state_of(notebook, session))["state"] != "hibernated":
            await anyio.sleep(0.02)


async def has_file(notebook: Agent, path: str) -> None:
    """Wait until the workspace holds a file."""
    with anyio.fail_after(60):
        while (await notebook.call("read_file", path=path)).failed:
            await anyio.sleep(0.02)


async def woken(notebook: Agent, code: str) -> Answer:
    """The answer of the cell that wakes the session."""
    await asleep(notebook)
    return await notebook.run(code)
