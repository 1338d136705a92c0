"""MCP servers on stdio, ours and others', driven by one and the same client."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import CallToolResult, ImageContent, TextContent

from benchmarks.notebooks import Answer
from benchmarks.places import clean_environ
from benchmarks.results import BenchmarkError, failure

Era: TypeAlias = Literal["auto", "legacy"]
"""How the client says hello: by server/discover, or by initialize."""

ANEW = {"KERNEL_MCP_PERSIST": "off"}
"""So that no server goes on where the one before it in the same folder has ended."""
ANSWER_S = 150.0
"""How long a server may take to answer anything."""


@asynccontextmanager
async def connected(
    argv: Sequence[str], folder: Path, era: Era = "auto", environ: Mapping[str, str] | None = None
) -> AsyncIterator[Client]:
    """A client of a server process of its own, once the server has answered for the first time.

    It runs in `folder`, where what it says on stderr is kept. Raises BenchmarkError with the end
    of that when it does not answer.
    """
    server = StdioServerParameters(
        command=argv[0],
        args=list(argv[1:]),
        env={**clean_environ(), **ANEW, **(environ or {})},
        cwd=folder,
    )
    log = folder / f"{secrets.token_hex(4)}.log"
    with open(log, "w", encoding="utf-8") as errors:
        client = Client(stdio_client(server, errors), mode=era, read_timeout_seconds=ANSWER_S)
        async with AsyncExitStack() as stack:
            if why := await failure(lambda: stack.enter_async_context(client)):
                said = log.read_text(encoding="utf-8", errors="replace")[-300:]
                raise BenchmarkError(f"{why}: {said}")
            yield client


async def call(client: Client, tool: str, **arguments: Any) -> CallToolResult:
    """Call a tool. Raises BenchmarkError when it fails; how a cell ended is not looked at."""
    result = await client.call_tool(tool, arguments)
    if result.is_error and "kernel-mcp/cell" not in (result.meta or {}):
        raise BenchmarkError(f"the tool {tool} failed: {answer(result).text[-300:]}")
    return result


def answer(result: CallToolResult) -> Answer:
    """The text and the pictures of a result."""
    texts = [block.text for block in result.content if isinstance(block, TextContent)]
    pictures = sum(isinstance(block, ImageContent) for block in result.content)
    return Answer("\n".join(texts), pictures)
