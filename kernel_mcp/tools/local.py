"""Calls on the sessions of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from mcp_types import CallToolResult
from mcp_types import Tool as Definition

from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.output.terminal import clean
from kernel_mcp.output.text import Masks, escaped, escaped_lines
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notebook_export import NOTEBOOK_MIME
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import ListedTool, Toolbox
from kernel_mcp.tools.arguments import no_such_tool
from kernel_mcp.tools.calls import Call
from kernel_mcp.tools.resources import Documents, is_own
from kernel_mcp.tools.results import masked, masked_document, refusal, with_remarks

MOST_REMARKED = 10_000
"""Maximum number of sessions for which remarks are remembered."""


class LocalCalls:
    """Implements `SessionCalls`; `links` as in `Toolbox`. Tools are made at their first use.

    The first answer of each session has the remarks of the kernels' factory. Values that the
    settings hide are masked in answers, resources and progress.
    """

    def __init__(self, services: ToolContext, links: Callable[[str], str] | None = None) -> None:
        self._services = services
        self._links = links
        self._masks = Masks(services.settings.masked_values)
        self._made: dict[str, ListedTool] = {}
        self._remarked: dict[str, tuple[str, ...]] = {}
        """Remarks by the session of the answer that had them."""
        files = "files" in services.settings.tools
        self._documents = Documents(services.manager, files=files)

    @property
    def _tools(self) -> dict[str, ListedTool]:
        if not self._made:
            from kernel_mcp.tools.topics import register  # they take a tenth of a start

            services = self._services
            box = Toolbox(
                services.manager, services.shared.events.meters, services.settings, self._links
            )
            register(box, services)
            self._made = {tool.definition.name: tool for tool in box.tools}
        return self._made

    async def definitions(self) -> Sequence[Definition]:
        """See `SessionCalls`."""
        return [tool.definition for tool in self._tools.values()]

    async def call(self, tool: str, arguments: Mapping[str, Any], call: Call) -> CallToolResult:
        """See `SessionCalls`."""
        if (known := self._tools.get(tool)) is None:
            answer = refusal(no_such_tool(tool, tuple(self._tools)))
        else:
            call = replace(call, progress=self._masked_progress(call.progress))
            # what the SDK calls a context is whatever the tool is to be given besides
            checked = known.checked()
            answer = await checked.run(dict(arguments), cast(Any, call), convert_result=True)
        answer = with_remarks(answer, self._remarks(arguments, call))
        return masked(answer, self._masks) if self._masks else answer

    def _remarks(self, arguments: Mapping[str, Any], call: Call) -> Sequence[str]:
        """Return the remarks that no answer of the call's session has had, but lost ones."""
        remarks = tuple(self._services.factory.remarks)
        if not remarks or call.of_view:
            return ()
        named = arguments.get("session")
        named = named if isinstance(named, str) else ""
        found = self._services.manager.directory.find(call.caller, named)
        key = found.handle if found is not None else f"of {call.caller.principal}"
        if self._remarked.get(key) == remarks:
            return ()
        if len(self._remarked) >= MOST_REMARKED:
            self._remarked.clear()
        self._remarked[key] = remarks  # not every transport confirms an answer
        forget = partial(self._remarked.pop, key, None)
        call.caller.response.receipt.then(lambda: None, forget)
        return remarks

    async def read(self, uri: str, caller: Caller) -> tuple[str | bytes, str]:
        """See `SessionCalls`."""
        async with self._services.manager.principals.call_limiter(caller.principal):
            content, mime = await self._documents.read(caller, uri)
        if isinstance(content, str) and mime != NOTEBOOK_MIME:
            content = escaped_lines(content)
        if isinstance(content, str):
            hide = masked_document if is_own(uri) else Masks.masked
            content = hide(self._masks, content)
        return content, mime

    def _masked_progress(self, progress: ProgressCallback | None) -> ProgressCallback | None:
        """Return a callback that masks hidden values in progress reports; None for None."""
        if progress is None:
            return None
        tell, masks = progress, self._masks

        async def report(text: str) -> None:
            await tell(masks.masked(escaped(clean(text))))

        return report
