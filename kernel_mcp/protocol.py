"""The MCP server over the parts of this one, and its client on stdin and stdout.

Here begins what imports the MCP SDK, which takes longer than all the rest of a start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mcp.server.context import CallNext, HandlerResult, ServerMiddleware, ServerRequestContext
from mcp.server.mcpserver.tools import Tool

from kernel_mcp import __version__
from kernel_mcp.greeting import NAME
from kernel_mcp.linux.process import end_soon
from kernel_mcp.output.text import Masks
from kernel_mcp.services import Services
from kernel_mcp.sessions.losses import Outbox, Reply
from kernel_mcp.sessions.manager import Caller
from kernel_mcp.stdio import stdio_streams
from kernel_mcp.tools import AnyContext, Callers, Toolbox
from kernel_mcp.tools.app import MIME, VIEW, Views, page
from kernel_mcp.tools.resources import ResourceServer
from kernel_mcp.wire import Wire


class StdioCallers:
    """The one client of stdin and stdout."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def of(self, context: AnyContext) -> Caller:
        """See `Callers`."""
        return Caller(reply=Reply(self._outbox.expect(context.request_id)))


def build_mcp(
    services: Services,
    callers: Callers,
    links: Callable[[str], str] | None = None,
    *,
    words: str | None = None,
) -> ResourceServer:
    """The MCP server with all tools and resources, for `callers`; see `Toolbox` for `links`.

    `words` are its instructions where a client may have had them already.
    """
    factory = services.factory

    def tools() -> Sequence[Tool]:
        from kernel_mcp.tools.topics import register  # they take a tenth of a start

        box = Toolbox(services.manager, callers, services.meters, links)
        register(box, services)
        return box.tools

    return ResourceServer(
        NAME,
        manager=services.manager,
        caller=callers.of,
        tools=tools,
        files="files" in services.settings.tools,
        remarks=lambda: factory.remarks,
        masks=Masks(services.settings.hidden),
        pages={VIEW: (MIME, page)},
        extensions=[Views()],
        title=NAME,
        version=__version__,
        instructions=services.instructions() if words is None else words,
        log_level="WARNING",
    )


def _tell_when_given_up(outbox: Outbox) -> ServerMiddleware[Any]:
    async def pass_on(ctx: ServerRequestContext[Any], call_next: CallNext) -> HandlerResult:
        if ctx.method == "notifications/cancelled":
            request = (ctx.params or {}).get("requestId")
            if isinstance(request, (str, int)):
                outbox.given_up(request)
        return await call_next(ctx)

    return pass_on


async def serve_stdio(services: Services, wire: Wire, words: str) -> None:
    """Serve the client of `wire`, who may have had the instructions, until it closes its pipes."""
    outbox = Outbox()
    mcp = build_mcp(services, StdioCallers(outbox), words=words)
    mcp.middleware.append(_tell_when_given_up(outbox))
    async with stdio_streams(wire, outbox.written, end_soon) as (read, write):
        lowlevel = mcp._lowlevel_server
        await lowlevel.run(read, write, lowlevel.create_initialization_options())
