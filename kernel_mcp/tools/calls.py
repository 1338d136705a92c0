"""The seam between clients and sessions: who calls what with which plain values, and who answers.

The server of a client knows `SessionCalls` alone: whether the sessions are in its own process
(`local`) or on another machine of a fleet makes no difference to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

from mcp_types import CallToolResult
from mcp_types import Tool as Definition

from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.manager import Caller

OF_VIEW = "kernel-mcp/view"
"""In the `_meta` of a call that a view makes."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a tool is given of its call: who makes it, and what hears of its progress, if anybody.

    `request_id` is that of its request. One `of_view` has an answer that no model reads: what that
    carries is still to be told.
    """

    caller: Caller = field(default_factory=Caller)
    progress: ProgressCallback | None = None
    request_id: str = ""
    of_view: bool = False


class SessionCalls(Protocol):
    """Answers calls on sessions, wherever those are.

    A cancelled call ends as the tool says: the cell that it had begun is interrupted.
    """

    async def definitions(self) -> Sequence[Definition]:
        """The tools, in the order in which clients list them."""

    async def call(self, tool: str, arguments: Mapping[str, Any], call: Call) -> CallToolResult:
        """The answer of a tool, also to arguments that are not its own, and for one unknown.

        Its receipt is that of `call.caller.reply`.
        """

    async def read(self, uri: str, caller: Caller) -> tuple[str | bytes, str]:
        """A resource of a session and its MIME type.

        Raises SessionNotFound, and InputError for an address that names nothing; KernelMcpError.
        """
