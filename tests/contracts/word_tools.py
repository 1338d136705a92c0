"""Tools of a third party: they count and list the words of a file in the workspace."""

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


class WordList(BaseModel):
    """The words of a file."""

    words: list[str]


def register(box: Toolbox, context: ToolContext) -> None:
    """Add the tools to `box`."""

    async def words_in(ctx: AnyContext, session: str, path: str) -> tuple[str, list[str]]:
        """Return the handle of a session, and the words of a file in it."""
        _, found = await box.resolve(ctx, session)
        read = partial(found.workspace.read_file, path, encoding="utf-8", characters=MOST_CHARS)
        content = await anyio.to_thread.run_sync(read)
        if content.page is None or content.page.next is not None:
            raise InputError(f"{path} has more than {MOST_CHARS:,} characters: read it in a cell.")
        return found.handle, content.page.text.split()

    @box.tool(READS, "Count words", computes=True)
    async def count_words(path: PathArg, ctx: AnyContext, session: SessionArg = "") -> Words:
        """Count the words of a text file in the workspace."""
        handle, words = await words_in(ctx, session, path)
        return Words(session=handle, path=path, words=len(words))

    @box.tool(READS, "List words", computes=True)
    async def list_words(path: PathArg, ctx: AnyContext, session: SessionArg = "") -> WordList:
        """List the words of a text file in the workspace."""
        return WordList(words=(await words_in(ctx, session, path))[1])
