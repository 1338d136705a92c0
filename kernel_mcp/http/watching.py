"""What the gate of HTTP does, in the audit trail and the meters; a flood of it in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from kernel_mcp.telemetry import Meters

LINES = 30
"""Refusals in a window that have a line each: nobody can fill the disk with them."""
WINDOW_S = 60.0

Note = Callable[[str, Mapping[str, Any]], None]


class Watched:
    """A `Watch` that notes each refusal, and from the `LINES`th in a window how many there were."""

    def __init__(self, note: Note, meters: Meters) -> None:
        """`note` is that of an audit trail."""
        self._note = note
        self._meters = meters
        self._noted = 0
        self._more: Counter[str] = Counter()

    def refused(self, reason: str, peer: str, principal: str) -> None:
        """See `Watch`."""
        self._meters.refusal(reason)
        if self._noted >= LINES:
            self._more[reason] += 1
            return
        self._noted += 1
        self._note("refused", {"reason": reason, "peer": peer, "who": principal, "count": 1})

    def moved(self, received: int, sent: int) -> None:
        """See `Watch`."""
        self._meters.moved(received, sent)

    def tokens(self, text: str) -> None:
        """The tokens file was read again, or could not be. Threadsafe as the audit trail is."""
        self._note("tokens", {"text": text})

    def sum_up(self) -> None:
        """Note what had no line of its own, and begin anew."""
        for reason, count in self._more.items():
            self._note("refused", {"reason": reason, "peer": "", "who": "", "count": count})
        self._more.clear()
        self._noted = 0

    async def run(self) -> None:
        """Sum up at the end of each window, and at the end; has to be run as a task."""
        try:
            while True:
                await anyio.sleep(WINDOW_S)
                self.sum_up()
        finally:
            self.sum_up()
