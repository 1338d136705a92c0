"""Audit records and metrics of the HTTP gate; a flood of refusals is summed up in a few lines."""

from __future__ import annotations

from collections import Counter

import anyio

from kernel_mcp.sessions.events import Events

LINES = 30
"""Most refusals of a window that are recorded one by one: a flood must not fill the disk."""
WINDOW_S = 60.0


class AuditObserver:
    """A `GateObserver` that records each refusal; beyond `LINES` in a window only their number."""

    def __init__(self, events: Events) -> None:
        self._note = events.note
        self._meters = events.meters
        self._noted = 0
        self._more: Counter[str] = Counter()

    def refused(self, reason: str, peer: str, principal: str) -> None:
        """See `GateObserver`."""
        self._meters.refusal(reason)
        if self._noted >= LINES:
            self._more[reason] += 1
            return
        self._noted += 1
        self._note("refused", {"reason": reason, "peer": peer, "who": principal, "count": 1})

    def moved(self, received: int, sent: int) -> None:
        """See `GateObserver`."""
        self._meters.moved(received, sent)

    def tokens(self, text: str) -> None:
        """Record that the tokens file was read again, or could not be. As thread-safe as `note`."""
        self._note("tokens", {"text": text})

    def sum_up(self) -> None:
        """Record the number of refusals without a line of their own, and begin a new window."""
        for reason, count in self._more.items():
            self._note("refused", {"reason": reason, "peer": "", "who": "", "count": count})
        self._more.clear()
        self._noted = 0

    async def run(self) -> None:
        """Sum up at the end of each window and when cancelled. Run it as a task."""
        try:
            while True:
                await anyio.sleep(WINDOW_S)
                self.sum_up()
        finally:
            self.sum_up()
