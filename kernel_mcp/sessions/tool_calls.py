"""The calls of tools that a session's code makes: approval, audit, notices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.launch.tool_gateway import ToolGateway
from kernel_mcp.sessions.events import SessionEvents
from kernel_mcp.sessions.questions import MOST_QUESTIONS, Questions, Wish

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.sessions.runner import CellQueue

ONCE, ALWAYS, NO = "once", "always in this session", "no"
CHOICES = (ONCE, ALWAYS, NO)
_DECLINED = "the person has declined the call of {}; do not try it again by other means"
_NOBODY = (
    "{0} needs a person's approval, and {1}. The operator can allow it: the server is started with "
    "--allow-tool {0}"
)
_UNDECIDED = {
    "cancel": "the client asked nobody",
    "late": "the person gave no answer in time",
    "withdraw": "its cell has ended",
}
OUTSIDE = "programs that run as the server's user, outside the sandbox"
AGAIN_S = 0.5
"""Seconds before the gateway is asked again to connect to a kernel."""
NAME_CHARS = 100
"""Characters of a tool's name in a question."""
MOST_SERVERS = 8
"""Servers that one notice names."""


class CallingSession(Protocol):
    """The part of a session that its calls use."""

    events: SessionEvents
    queue: CellQueue
    request: KernelRequest

    def needed(self) -> AbstractContextManager[None]:
        """Prevent hibernation inside this block."""


class SessionTools:
    """The calls of one session; see `ToolCaller`.

    Its open calls prevent hibernation. What a person has allowed holds until the session's end.
    """

    def __init__(self, session: CallingSession, gateway: ToolGateway, principal: str) -> None:
        """Tool servers are not shared between principals; an empty `principal` stands for all."""
        self._session = session
        self._gateway = gateway
        self._principal = principal
        self._kernels: WeakKeyDictionary[Kernel, int] = WeakKeyDictionary()
        self._connected: WeakKeyDictionary[Kernel, float] = WeakKeyDictionary()
        self._always: set[str] = set()
        self._open: dict[int, tuple[str, str, int]] = {}
        """Tool, digest and cell of each call that has begun, or asks; cell 0 is none."""
        self._asking: dict[int, tuple[Questions, Wish]] = {}
        self._counts: Counter[str] = Counter()
        self._needed = ExitStack()

    @property
    def servers(self) -> list[str]:
        """Names of the servers that the session may use."""
        names, wanted = [each.name for each in self._gateway.servers], self._session.request.tools
        return [each for each in names if wanted is None or each in wanted]

    @property
    def about(self) -> str:
        """The servers, and which of them are programs outside the sandbox, in words."""
        found = [each for each in self._gateway.servers if each.name in self.servers]
        if not found:
            return "none"
        programs = [each.name for each in found if each.command]
        outside = f" ({', '.join(programs)}: {OUTSIDE})" if programs else ""
        return f"reaches: {', '.join(self.servers)}{outside}"

    def connect(self, kernel: Kernel) -> None:
        """Connect the gateway to a kernel whose code asks for it."""
        path = kernel.handle.sockets.connection.tools
        if not path or not self._gateway or kernel.exit is not None:
            return
        now, before = time.monotonic(), self._connected.get(kernel, -AGAIN_S)
        if now - before < AGAIN_S:  # code may ask in a flood, and asks again after a second
            return
        self._connected[kernel] = now
        if kernel in self._kernels:
            self._gateway.connect_again(self._kernels[kernel])
            return
        number = self._gateway.connect(
            path, self._principal, self.servers, sorted(self._always), self
        )
        self._kernels[kernel] = number
        kernel.handle.on_close(partial(self._disconnect, number))

    async def _disconnect(self, number: int) -> None:
        self._gateway.disconnect(number)

    def interrupt(self, kernel: Kernel) -> None:
        """Cancel the calls of a kernel that is being interrupted: its threads cannot be."""
        if kernel in self._kernels:
            self._gateway.cut(self._kernels[kernel])

    def begin_cell(self, kernel: Kernel) -> None:
        """Note that a cell begins in a kernel."""
        if kernel in self._kernels:
            self._gateway.begin_cell(self._kernels[kernel])

    def words(self) -> list[str]:
        """Return a notice of the calls since the last one; none for none."""
        counts, self._counts = self._counts, Counter()
        shown = [f"{name} {count:,} times" for name, count in counts.most_common(MOST_SERVERS)]
        more = [f"{len(counts) - MOST_SERVERS} more"] if len(counts) > MOST_SERVERS else []
        return [f"The code called tools: {', '.join([*shown, *more])}"] if shown else []

    def asks(self, call: int, tool: str, digest: str, shown: str) -> None:
        """See `ToolCaller`."""
        self._begin(call, tool, digest)
        cell = self._session.queue.current
        questions = None if cell is None else cell.questions
        reply = partial(self._decided, call, tool)
        prompt = f"call the tool {_quoted(tool)} with {shown}?"
        wish = None if questions is None else questions.decide(prompt, CHOICES, reply)
        if questions is None or wish is None:
            why = "no cell is running" if cell is None else "the client cannot ask a person"
            if questions is not None and questions.used_up:
                why = f"one cell may ask {MOST_QUESTIONS} times; go on in another cell"
            self._gateway.decide(call, "no", _NOBODY.format(tool, why))
        else:
            self._asking[call] = questions, wish

    def _decided(self, call: int, tool: str, end: str, answer: str) -> None:
        """Pass on the answer of a person to the question about a call."""
        self._asking.pop(call, None)
        if end == "accept" and answer in (ONCE, ALWAYS):
            if answer == ALWAYS:
                self._always.add(tool)
            self._end(call)
            self._gateway.decide(call, "always" if answer == ALWAYS else "once")
            return
        why = _UNDECIDED.get(end)
        text = _DECLINED if why is None else _NOBODY
        self._gateway.decide(call, "no", text.format(tool, why))

    def begins(self, call: int, tool: str, digest: str) -> None:
        """See `ToolCaller`."""
        self._begin(call, tool, digest)
        self._counts[tool.partition(".")[0]] += 1

    def ends(self, call: int, facts: Mapping[str, Any]) -> None:
        """See `ToolCaller`."""
        if call in self._asking:
            questions, wish = self._asking.pop(call)
            questions.drop(wish)
        if (found := self._end(call)) is not None:
            tool, digest, cell = found
            self._session.events.note("tool", tool=tool, arguments=digest, cell=cell, **facts)

    def _begin(self, call: int, tool: str, digest: str) -> None:
        if not self._open:
            self._needed.enter_context(self._session.needed())
        cell = self._session.queue.current
        self._open[call] = tool, digest, 0 if cell is None else cell.number

    def _end(self, call: int) -> tuple[str, str, int] | None:
        found = self._open.pop(call, None)
        if not self._open:
            self._needed.close()
        return found

    def lost(self) -> None:
        """See `ToolCaller`."""
        for call in list(self._open):
            self.ends(call, {"end": "unavailable", "seconds": 0.0, "bytes": 0})


def _quoted(tool: str) -> str:
    """Return a name for a person: short, and in quotes if it could be taken for words."""
    name = tool if len(tool) <= NAME_CHARS else f"{tool[:NAME_CHARS]}…"
    return name if all(each.isalnum() or each in "._-/…" for each in name) else f'"{name}"'
