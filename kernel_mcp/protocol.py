"""Build the MCP server of all tools, and serve its client on stdin and stdout.

This module imports the MCP SDK, which takes longer than the rest of a start.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from mcp.server.context import CallNext, HandlerResult, ServerMiddleware, ServerRequestContext
from mcp.server.mcpserver import Context

from kernel_mcp import __version__
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import DeliveryTracker, ResponseContext
from kernel_mcp.stdio import Answers, Requests
from kernel_mcp.stdio_lines import StdioLines
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools.app import MIME, VIEW, Views, page
from kernel_mcp.tools.asking import Putter
from kernel_mcp.tools.calls import SessionCalls, program_of
from kernel_mcp.tools.elicitation import Elicitation, state_security
from kernel_mcp.tools.jobs import Jobs
from kernel_mcp.tools.local import LocalCalls
from kernel_mcp.tools.resources import Page, ResourceServer
from kernel_mcp.tools.skills import Skills
from kernel_mcp.tools.stopping import StoppableCalls
from kernel_mcp.tools.task_words import speak_of_tasks
from kernel_mcp.tools.tasks import Tasks

if TYPE_CHECKING:
    from kernel_mcp.tools.answer_pages import Pages

NAME = "kernel-mcp"


class StdioCallers:
    """The only client on stdin and stdout; `default` is the key of its default session."""

    def __init__(self, deliveries: DeliveryTracker, default: str = "default") -> None:
        self._deliveries = deliveries
        self._default = default

    def of(self, context: Context[Any, Any]) -> Caller:
        """See `Callers`."""
        response = ResponseContext(self._deliveries.expect(context.request_id))
        return Caller(default=self._default, program=program_of(context), response=response)


class Callers(Protocol):
    """A transport's source of callers and of the delivery of answers."""

    def of(self, context: Context[Any, Any]) -> Caller:
        """Return the caller of the call with this context; its `response` tracks the delivery."""


def build_mcp(
    services: ToolContext,
    callers: Callers,
    links: Callable[[str], str] | None = None,
    pages: Callable[[], Pages] | None = None,
) -> ResourceServer:
    """Return the MCP server of all tools, for `callers`.

    See `Toolbox` for `links`, and `Putter` for `pages`.
    """
    files = "files" in services.settings.tools
    calls, words, key = LocalCalls(services, links), services.instructions(), services.task_key
    return mcp_over(calls, callers, words, files=files, key=key, pages=pages)


def mcp_over(
    calls: SessionCalls,
    callers: Callers,
    words: str,
    *,
    files: bool = True,
    key: Callable[[], bytes],
    alone: bool = True,
    pages: Callable[[], Pages] | None = None,
) -> ResourceServer:
    """Return the MCP server of sessions on any machine; `words` are its instructions.

    `key` is that of `Jobs`, `alone` that of `Tasks`, `pages` that of `Putter`.
    """
    stoppable, skills = StoppableCalls(calls), Skills(calls, words)
    jobs, putter = Jobs(stoppable, key), Putter(pages)
    server = ResourceServer(
        NAME,
        calls=stoppable,
        elicitation=Elicitation(jobs, putter, alone=alone),
        request_state_security=state_security(key),
        caller=callers.of,
        files=files,
        pages={VIEW: Page(MIME, page, "cell.html"), **skills.pages()},
        extensions=[Views(), skills, Tasks(jobs, callers.of, putter, alone=alone)],
        title=NAME,
        version=__version__,
        instructions=words,
        log_level="WARNING",
    )
    server.middleware.append(speak_of_tasks)
    return server


def _tell_when_given_up(deliveries: DeliveryTracker) -> ServerMiddleware[Any]:
    async def pass_on(ctx: ServerRequestContext[Any], call_next: CallNext) -> HandlerResult:
        if ctx.method == "notifications/cancelled":
            request = (ctx.params or {}).get("requestId")
            if isinstance(request, (str, int)):
                deliveries.cancelled(request)
        return await call_next(ctx)

    return pass_on


def loopback_pages() -> Pages:
    """Return the pages of a client on stdio."""
    from kernel_mcp.tools.loopback_pages import LoopbackPages  # few sessions have a page

    return LoopbackPages()


async def serve_stdio(services: ToolContext, wire: StdioLines, on_end: Callable[[], None]) -> None:
    """Serve the client of `wire` until it closes its pipes, and call `on_end` then."""
    await serve_wire(partial(build_mcp, services, pages=loopback_pages), wire, on_end)


async def serve_wire(
    build: Callable[[Callers], ResourceServer],
    wire: StdioLines,
    on_end: Callable[[], None],
    default: str = "default",
) -> None:
    """Serve the client of `wire` with the server that `build` returns; see `serve_stdio`."""
    deliveries = DeliveryTracker()
    mcp = build(StdioCallers(deliveries, default))
    mcp.middleware.append(_tell_when_given_up(deliveries))
    read, write = Requests(wire, on_end), Answers(wire, deliveries.written)
    lowlevel = mcp._lowlevel_server
    try:
        await lowlevel.run(read, write, lowlevel.create_initialization_options())
    finally:
        await mcp.aclose()
