"""The interface for clients: tools, resources, and the texts of their answers.

This file has what all tools share: types of arguments, the context of a call, and the completion of
answers. The tools themselves are in `cells`, `sessions`, `files`, `packages`, `branches`,
`notebooks` and `views`; their names and arguments are the public contract of the server.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeAlias, cast

from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult
from mcp_types import Tool as Definition
from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from kernel_mcp.barriers import explained, log_failure
from kernel_mcp.config.settings import Settings
from kernel_mcp.config.values import hosts, memory
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import KernelMcpError, SessionLimitReached, WorkspaceError
from kernel_mcp.packages.requirements import listed
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session
from kernel_mcp.telemetry import Meters
from kernel_mcp.telemetry.origin import in_session, of_call
from kernel_mcp.telemetry.spans import OriginContext
from kernel_mcp.tools.arguments import CheckedTool, Share, share
from kernel_mcp.tools.calls import Call
from kernel_mcp.tools.hints import Effect, hints
from kernel_mcp.tools.results import bounded, finished, linked, refusal
from kernel_mcp.units import duration, limit_duration


def _one_each_host(given: object) -> object:
    """Return the hosts of an argument as a list, also of a comma list; None for None."""
    return None if given is None else list(hosts(given))


P = ParamSpec("P")
AnyContext: TypeAlias = Call
"""Type of the parameter `ctx` of tools, by which they are given their call."""

SessionArg: TypeAlias = str
"""Handle or name of a session; empty for the default one."""
PathArg: TypeAlias = str
"""Path of a file in the workspace or a mounted folder."""
TimeoutArg = Annotated[
    float | None,
    BeforeValidator(duration),
    WithJsonSchema({"type": "number"}),
    Field(description="Seconds until it is stopped"),
]
LimitArg = Annotated[
    float | None,
    BeforeValidator(duration),
    WithJsonSchema({"type": "string"}),
]
MemoryArg = Annotated[
    int | None,
    BeforeValidator(memory),
    WithJsonSchema({"type": "string"}),
]
CpuArg = Annotated[
    Share | None,
    BeforeValidator(share),
    WithJsonSchema({"type": "string"}),
]
NetworkArg = Annotated[
    list[str] | None,
    BeforeValidator(_one_each_host),
    WithJsonSchema({"type": "array", "items": {"type": "string"}}),
    Field(description="Fewer hosts than info names"),
]
ToolsArg = Annotated[
    list[str] | None,
    WithJsonSchema({"type": "array", "items": {"type": "string"}}),
    Field(description="Fewer tool servers"),
]


def _version(given: object) -> object:
    """Return a version as text, also one written as a number; other types are left as they are."""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        return given
    return "3.10" if given == 3.1 else str(given)  # how JSON writes 3.10


PythonArg = Annotated[str, BeforeValidator(_version), WithJsonSchema({"type": "string"})]
WaitArg = Annotated[
    float,
    BeforeValidator(limit_duration),
    WithJsonSchema({"type": "number"}),
]


def _one_each(given: object) -> object:
    """Return a list with one entry per package; an argument of another type is left as it is."""
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, list) and all(isinstance(each, str) for each in texts):
        return listed(texts)
    return given


def _no_truth(given: object) -> object:
    """Return the argument as it is. Raises ValueError for a boolean, which counts as 0 or 1."""
    if isinstance(given, bool):
        raise ValueError("expected a whole number")
    return given


Whole = Annotated[int, BeforeValidator(_no_truth)]
PackagesArg = Annotated[list[str], BeforeValidator(_one_each)]

SCHEMAS = Path(__file__).with_name("schemas.json")
ALWAYS_LOADED = {"anthropic/alwaysLoad": True}


def progress_of(ctx: AnyContext) -> ProgressCallback | None:
    """Return the callback that reports progress to the client; None unless it asked for that."""
    return ctx.progress


def _bounded(error: KernelMcpError) -> bool:
    """Return True if the error says that a quota of a session, principal or server is used up."""
    full = isinstance(error, WorkspaceError) and error.code == errno.EDQUOT
    return full or isinstance(error, SessionLimitReached)


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool as clients are shown it, and `checked`, which checks its arguments and calls it.

    That is made at the first call: pydantic takes 1.5 ms for each tool, and clients wait for the
    list of all of them.
    """

    definition: Definition
    checked: Callable[[], CheckedTool]


@functools.cache
def own_schemas() -> Mapping[str, dict[str, Any]]:
    """Return the schemas of the arguments of this server's tools; `make reference` writes them."""
    return cast(Mapping[str, dict[str, Any]], json.loads(SCHEMAS.read_bytes()))


class Toolbox:
    """Collects `tools` and completes their answers.

    While it is `bounded`, tools that are added have answers cut to `--max-output`. Tools of this
    server need not be: they show what fits, and say how to read on.
    """

    def __init__(
        self,
        manager: SessionManager,
        meters: Meters,
        settings: Settings,
        links: Callable[[str], str] | None = None,
    ) -> None:
        """`links` returns the HTTP address of a session by its handle; None without HTTP."""
        self._settings = settings
        self.tools: list[ListedTool] = []
        self.bounded = False
        self._links = links
        self._meters = meters
        self._manager = manager

    def caller(self, ctx: AnyContext) -> Caller:
        """Return the caller of the call that a tool is working on."""
        return ctx.caller

    async def resolve(self, ctx: AnyContext, handle: str) -> tuple[Caller, Session]:
        """Return the caller and the session that the call is about. Raises SessionNotFound."""
        session = await self._manager.resolve(ctx.caller, handle)
        in_session(session.handle)
        return ctx.caller, session

    def tool(
        self,
        effect: Effect,
        title: str,
        *,
        meta: dict[str, Any] | None = None,
        computes: bool = False,
    ) -> Callable[[Callable[P, Awaitable[BaseModel]]], None]:
        """Return a decorator that adds a function as a tool, described by its docstring.

        `title` is shown to people. No schema of results is published: clients show the same
        without one. A tool that `computes` uses the server's own processor time:
        such calls of one principal take turns.
        """

        def add(function: Callable[P, Awaitable[BaseModel]]) -> None:
            call = self._finished(function, computes=computes)

            @functools.cache
            def checked() -> CheckedTool:
                made = CheckedTool.from_function(call, context_kwarg="ctx", structured_output=False)
                return cast(CheckedTool, made.model_copy(update={"finish": self._not_called}))

            schema = None if self.bounded else own_schemas().get(function.__name__)
            definition = Definition(
                name=function.__name__,
                description=" ".join((inspect.getdoc(function) or "").split()),
                input_schema=schema or checked().parameters,
                title=title,
                annotations=hints(effect, title, self._settings),
                _meta=meta,
            )
            self.tools.append(ListedTool(definition, checked))

        return add

    def _not_called(self, result: CallToolResult, ctx: AnyContext, handle: str) -> CallToolResult:
        """Complete the answer of a call whose arguments were refused."""
        session = self._manager.directory.find(ctx.caller, handle)
        return finished(result, session, ctx.caller.response, about=False)

    def _finished(
        self, tool: Callable[P, Awaitable[BaseModel]], *, computes: bool
    ) -> Callable[P, Awaitable[CallToolResult]]:
        """Wrap a tool, so that its answers are complete and its errors become answers.

        KernelMcpErrors keep their text, others are logged and explained.
        """
        about = "session" in inspect.signature(tool).parameters
        most = self._settings.max_output if self.bounded else 0

        @functools.wraps(tool)
        async def call(*args: P.args, **kwargs: P.kwargs) -> CallToolResult:
            ctx, handle = cast(AnyContext, kwargs["ctx"]), str(kwargs.get("session", ""))
            caller = ctx.caller
            began = time.perf_counter()
            within, program, peer = caller.request, caller.program, caller.peer
            origin = of_call(ctx.request_id, caller.principal, within, program, peer)
            try:
                async with AsyncExitStack() as stack:
                    if computes:
                        limiter = self._manager.principals.call_limiter(caller.principal)
                        await stack.enter_async_context(limiter)
                    with OriginContext(origin):
                        result: BaseModel = await tool(*args, **kwargs)
            except KernelMcpError as error:
                if _bounded(error):
                    self._meters.refusal("quota")
                result = refusal(error)
            except MCPError:
                raise
            except Exception as error:  # noqa: BLE001  # logged, and told to the caller
                doing = f"answering {tool.__name__}"
                log_failure(error, doing, handle)
                result = refusal(explained(error, doing))
            finally:
                self._meters.call(tool.__name__, time.perf_counter() - began)
            session = self._manager.directory.find(caller, handle)
            if session is not None:
                session.queue.tell_unfollowed()
            done = finished(result, session, caller.response, about=about)
            done = bounded(done, most) if most else done
            if self._links is not None and session is not None:
                done = linked(done, session.handle, self._links(session.handle))
            return done

        return call
