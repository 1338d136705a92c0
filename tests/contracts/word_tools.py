"""Tools of a third party: one that counts the words of a file in the workspace."""

from __future__ import annotations

from functools import partial

import anyio
from pydantic import BaseModel

from kernel_mcp.errors import InputError
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import AnyContext, PathArg, SessionArg, Toolbox
from kernel_mcp.tools.hints import READS

MOST_CHARS = 1_000_000


class Words(BaseModel):
    """How many words a file has."""

    session: str
    path: str
    words: int


def register(box: Toolbox, context: ToolContext) -> None:
    """Add the tool to `box`."""

    @box.tool(READS, "Count words", computes=True)
    async def count_words(path: PathArg, ctx: AnyContext, session: SessionArg = "") -> Words:
        """Count the words of a text file in the workspace."""
        _, found = await box.resolve(ctx, session)
        read = partial(found.workspace.read_file, path, encoding="utf-8", characters=MOST_CHARS)
        content = await anyio.to_thread.run_sync(read)
        if content.page is None or content.page.next is not None:
            raise InputError(f"{path} has more than {MOST_CHARS:,} characters: count in a cell.")
        return Words(session=found.handle, path=path, words=len(content.page.text.split()))
