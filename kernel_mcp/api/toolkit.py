"""What all tools share: their arguments, annotations, and the way to the caller and back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ParamSpec, TypeVar

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from mcp_types import ToolAnnotations
from pydantic import Field

from kernel_mcp.barriers import explained, log_failure
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.sessions.manager import Caller
from kernel_mcp.sessions.narration import Report

P = ParamSpec("P")
R = TypeVar("R")
AnyContext = Context[Any, Any]

SessionArg = Annotated[str, Field(description="Session handle; empty for the default session")]
CodeArg = Annotated[str, Field(description="Python code, as in a notebook cell")]
PathArg = Annotated[str, Field(description="Path in the workspace, such as data/sales.csv")]
WaitArg = Annotated[float, Field(description="Seconds to wait before answering `running`")]

READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
CHANGES = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
DESTROYS = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)
ALWAYS_LOADED = {"anthropic/alwaysLoad": True}


def caller_of(ctx: AnyContext) -> Caller:
    """Who calls: on stdio one process is one client."""
    return Caller()


def reporter(ctx: AnyContext) -> Report | None:
    """Sends progress messages with a rising counter; None unless the client asked for them."""
    if "progress_token" not in (ctx.request_context.meta or {}):
        return None
    count = 0

    async def report(text: str) -> None:
        nonlocal count
        count += 1
        await ctx.report_progress(count, message=text)

    return report


def add_tool(
    mcp: MCPServer[Any],
    *,
    annotations: ToolAnnotations,
    meta: dict[str, Any] | None = None,
    structured_output: bool | None = None,
) -> Callable[[Callable[P, Awaitable[R]]], None]:
    """Registers the function it decorates, described by its docstring."""

    def add(function: Callable[P, Awaitable[R]]) -> None:
        mcp.add_tool(
            readable(function),
            description=inspect.getdoc(function),
            annotations=annotations,
            meta=meta,
            structured_output=structured_output,
        )

    return add


def readable(tool: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Hand the text of our own errors to the model unchanged, and put others into words."""

    @functools.wraps(tool)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await tool(*args, **kwargs)
        except KernelMcpError as error:
            raise ToolError(str(error)) from error
        except (ToolError, MCPError):
            raise
        except Exception as error:
            doing = f"answering {tool.__name__}"
            log_failure(error, doing, str(kwargs.get("session") or ""))
            raise ToolError(str(explained(error, doing))) from error

    return call
