"""The interface between the server of a client and the sessions, which takes plain values.

That server uses only `SessionCalls`: the sessions are in its own process (`local`), or on another
machine of a fleet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

from mcp_types import CallToolResult
from mcp_types import Tool as Definition

from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.output.text import one_line
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.questions import Answer, Mode, Question

OF_VIEW = "kernel-mcp/view"
"""Key in the `_meta` of a call that a view makes."""
LASTING_KEY = "kernel-mcp/lasting"
"""Key in the `_meta` of an answer to a call of a task: the name of the session for later servers,
empty for none."""
QUESTION_KEY = "kernel-mcp/question"
"""Key in the `_meta` of an answer to a call that `asks`: the fields of the open `Question`."""
PROGRAM_CHARS = 80


ANSWERED_KEY = "kernel-mcp/answered"
"""Key in the `_meta` of an answer to a call with an `answer`: True if a question took it."""

CONVERTED = "kernel-mcp-converted"
"""Header of a request whose response is converted: its client sees nothing before the end."""


@dataclass(frozen=True, slots=True)
class Call:
    """The context of a tool call: its caller, and a callback for progress, None for no reports.

    `request_id` is that of its request. No model reads the answer to a call `of_view`: notices in
    it do not count as delivered. With `task` the client follows a running cell by a task.

    asks    modes of questions to a person that the client declares. If the code of a cell asks one,
            `execute` and `wait` return it (`QUESTION_KEY`); it is answered by `wait` with `answer`
    ask     asks the person while the call goes on, instead of that; returns the answer
    repeats True for a `wait` that repeats the call which began its cell: cancelled, it stops it
    """

    caller: Caller = field(default_factory=Caller)
    progress: ProgressCallback | None = None
    request_id: str = ""
    of_view: bool = False
    task: bool = False
    asks: frozenset[Mode] = frozenset()
    answer: Answer | None = None
    ask: Callable[[Question], Awaitable[Answer]] | None = None
    repeats: bool = False


def program_of(context: Any) -> str:
    """Return name and version of the client in a context of the SDK; empty if it gives none."""
    about = context.request_context.session.client_params
    if about is None:
        return ""
    return one_line(f"{about.client_info.name} {about.client_info.version}")[:PROGRAM_CHARS]


class SessionCalls(Protocol):
    """Answers calls on sessions, in this process or elsewhere.

    A cancelled call interrupts the cell that it has started.
    """

    async def definitions(self) -> Sequence[Definition]:
        """Return the definitions of tools, in the order in which clients list them."""

    async def call(self, tool: str, arguments: Mapping[str, Any], call: Call) -> CallToolResult:
        """Call a tool and return its answer; unknown tools and wrong arguments are answered, too.

        Its delivery receipt is that of `call.caller.reply`.
        """

    async def read(self, uri: str, caller: Caller) -> tuple[str | bytes, str]:
        """Return a resource of a session and its MIME type.

        Raises SessionNotFound, InputError for an address without a resource, KernelMcpError.
        """
