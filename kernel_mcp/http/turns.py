"""Whose call is next: one principal that calls all the time keeps no other waiting.

One thread answers all calls, and takes some 5 ms for each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kernel_mcp.config.values import MIB

CALLS_S = 50.0
"""Calls a second of one principal while others call; so many more may come at once."""
BYTES_S = 8.0 * MIB
"""Bytes a second of its messages, which are parsed."""
AT_ONCE_S = 1.0
"""Seconds of its part that one may use at once."""
LATELY_S = 60.0
"""Seconds for which one that has called counts as calling."""
MOST_S = 20.0
"""The longest wait: a call that had to wait longer is refused."""


class Taken:
    """What one principal has had: its part up to a moment."""

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until = float("-inf")

    def read(self, count: int) -> None:
        """So many bytes of a message were taken."""
        self.until += count / BYTES_S


class Turns:
    """Slows principals down that take more than their part, while there are others."""

    def __init__(
        self, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._last = ("", float("-inf"))
        self._before = float("-inf")
        """When one that is not the last had called."""

    async def wait(self, name: str, taken: Taken) -> float:
        """Wait for a principal's turn; 0, or the seconds after which a refused call may come."""
        now = self._clock()
        if self._last[0] != name:
            self._before = self._last[1]
        self._last = (name, now)
        taken.until = max(taken.until, now - AT_ONCE_S)
        if now - self._before > LATELY_S:  # alone, and owes nothing when another comes
            taken.until = now - AT_ONCE_S
            return 0.0
        if (wait_s := taken.until - now) > MOST_S:
            return wait_s
        taken.until += 1 / CALLS_S
        if wait_s > 0:
            await self._sleep(wait_s)
        return 0.0
