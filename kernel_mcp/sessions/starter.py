"""Starts of a session's kernels, which are recorded and connected to the session's notices."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernel_mcp.environments.layer import Layer
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.kernels.factory import KernelRequest, KernelSource
from kernel_mcp.linux.safe_tree import make_private
from kernel_mcp.output.text import one_line
from kernel_mcp.sessions.events import NO_START, START, SessionEvents
from kernel_mcp.sessions.notifications import Notice, NotificationQueue
from kernel_mcp.telemetry.spans import Span

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel, ToolAccess

REMOVED = "The workspace folder of this session has been removed from outside"
SHOWN_FOREIGN = 5
FOREIGN_CHARS = 120
MOST_READ = 10 * FOREIGN_CHARS
"""Characters of other clients' code that are read to find its first line."""


def restore(request: KernelRequest) -> list[str]:
    """Create missing folders of a session again; return a sentence for each. Raises OSError."""
    lost = []
    if not request.workspace.exists():
        make_private(request.workspace)
        lost.append(f"{REMOVED}: its files are gone, and it has a new, empty one")
    if request.layer is not None and not request.layer.exists():
        Layer(request.layer).make()
        lost.append(
            "The folder of this session's own packages has been removed from outside: any packages "
            "that were installed have to be installed again"
        )
    return lost


class ForeignCells:
    """Reports code that other clients of an attached kernel have run, in one notice for all."""

    def __init__(self, notifications: NotificationQueue) -> None:
        self._notifications = notifications
        self._notice: Notice | None = None
        self._count = 0
        self._last: deque[str] = deque(maxlen=SHOWN_FOREIGN)

    def ran(self, code: str) -> None:
        """Report code that another client has run."""
        if self._notice not in self._notifications.pending:
            self._count = 0
            self._last.clear()
        self._count += 1
        self._last.append(one_line(code.strip()[:MOST_READ].partition("\n")[0])[:FOREIGN_CHARS])
        more = self._count - len(self._last)
        parts = [f"{more} other cell{'s' if more > 1 else ''}"] if more else []
        self._notifications.withdraw(self._notice)
        self._notice = self._notifications.add(
            f"another client of this kernel ran: {'; '.join([*parts, *self._last])}"
        )


class KernelStarter:
    """Starts kernels of one session."""

    def __init__(
        self,
        source: KernelSource,
        notifications: NotificationQueue,
        events: SessionEvents,
        tools: ToolAccess | None = None,
    ) -> None:
        self._source = source
        self._notifications = notifications
        self._events = events
        self._tools = tools
        self._foreign_cells = ForeignCells(notifications)

    async def start(
        self, request: KernelRequest, progress: ProgressCallback, folder: str = ""
    ) -> Kernel:
        """Start a kernel; `folder` is the own folder of a branch, empty for other sessions.

        Raises KernelMcpError.
        """
        kernel = await self._launch(request, progress)
        if self._tools is not None:
            kernel.tools = self._tools
        kernel.tell, kernel.overheard = self._notifications.add, self._foreign_cells.ran
        kernel.handle.egress.open(request.network, self._note_connection)
        if folder:
            try:
                await kernel.become_branch(folder)
            except BaseException:
                await kernel.aclose()
                raise
        return kernel

    def _note_connection(self, facts: Mapping[str, Any]) -> None:
        """Record one connection to another machine, or several alike, that ended or was refused."""
        self._events.note("connection", **facts)

    async def _launch(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        began = time.monotonic()
        with Span("launch", session=request.session) as span:
            try:
                kernel = await self._source.start(request, progress)
            except Exception:
                self._events.note(NO_START)
                raise
            kind = kernel.handle.report.kind
            span.note(kind=kind)
        self._events.note(START, kind=kind, seconds=time.monotonic() - began)
        return kernel
