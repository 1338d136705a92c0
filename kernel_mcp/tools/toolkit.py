"""What all tools share: their arguments, annotations, and the way to the caller and back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, ParamSpec, cast

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.shared.exceptions import MCPError
from mcp_types import ToolAnnotations
from pydantic import BaseModel, Field

from kernel_mcp.barriers import explained, log_failure
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import guarded
from kernel_mcp.sessions.cell import Report
from kernel_mcp.sessions.manager import Caller
from kernel_mcp.tools.telling import Teller

P = ParamSpec("P")
AnyContext = Context[Any, Any]

SessionArg = Annotated[str, Field(description="Session handle; empty for the default session")]
CodeArg = Annotated[str, Field(description="Python code, as in a notebook cell")]
PathArg = Annotated[str, Field(description="Path in the workspace, such as data/sales.csv")]
WaitArg = Annotated[float, Field(description="Seconds to wait before answering `running`")]

READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
CHANGES = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
DESTROYS = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)
ALWAYS_LOADED = {"anthropic/alwaysLoad": True}


def reporter(ctx: AnyContext) -> Report | None:
    """Sends progress messages with a rising counter; None unless the client asked for them."""
    if "progress_token" not in (ctx.request_context.meta or {}):
        return None
    count = 0

    async def report(text: str) -> None:
        nonlocal count
        count += 1
        await ctx.report_progress(count, message=guarded(clean(text)))

    return report


class Toolbox:
    """Registers tools with `mcp` and hands their answers to `teller`, who finishes them."""

    def __init__(self, mcp: MCPServer[Any], teller: Teller) -> None:
        self._mcp = mcp
        self._teller = teller
        self._callers: dict[int, Caller] = {}

    def caller(self, ctx: AnyContext) -> Caller:
        """Who makes the call that a tool is working on."""
        return self._callers[id(ctx)]

    def tool(
        self,
        *,
        annotations: ToolAnnotations,
        meta: dict[str, Any] | None = None,
        structured_output: bool | None = None,
    ) -> Callable[[Callable[P, Awaitable[BaseModel]]], None]:
        """Registers the function it decorates, described by its docstring."""

        def add(function: Callable[P, Awaitable[BaseModel]]) -> None:
            self._mcp.add_tool(
                self._finished(function),
                description=inspect.getdoc(function),
                annotations=annotations,
                meta=meta,
                structured_output=structured_output,
            )

        return add

    def _finished(
        self, tool: Callable[P, Awaitable[BaseModel]]
    ) -> Callable[P, Awaitable[BaseModel]]:
        """The tool with whole answers, be they errors: our own in their words, others explained."""
        about = "session" in inspect.signature(tool).parameters

        @functools.wraps(tool)
        async def call(*args: P.args, **kwargs: P.kwargs) -> BaseModel:
            ctx, handle = cast(AnyContext, kwargs["ctx"]), str(kwargs.get("session", ""))
            caller = self._callers[id(ctx)] = self._teller.caller(ctx.request_id)
            try:
                result = await tool(*args, **kwargs)
            except KernelMcpError as error:
                return self._teller.refusal(caller, handle, error, about=about)
            except MCPError:
                raise
            except Exception as error:  # noqa: BLE001  # logged, and told to the caller
                doing = f"answering {tool.__name__}"
                log_failure(error, doing, handle)
                error = explained(error, doing)
                return self._teller.refusal(caller, handle, error, about=about)
            finally:
                del self._callers[id(ctx)]
            return self._teller.finish(caller, handle, result, about=about)

        return call
