"""Fair share of the server between principals: one that calls constantly does not delay others.

One thread answers all calls, at some 5 ms each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kernel_mcp.units import MIB

CALLS_S = 50.0
"""Calls a second of one principal while others call; its burst is `AT_ONCE_S` of that."""
BYTES_S = 8.0 * MIB
"""Bytes of messages a second of one principal while others call."""
AT_ONCE_S = 1.0
"""Burst, in seconds of a principal's share."""
LATELY_S = 60.0
"""Seconds after its last call for which a principal counts as active."""
MOST_S = 20.0
"""Longest wait in seconds; a call that would wait longer is refused."""


class TokenBucket:
    """The share that one principal has used: all of it up to the time `until`."""

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until = float("-inf")

    def read(self, count: int) -> None:
        """Charge `count` bytes of a message."""
        self.until += count / BYTES_S


class FairQueue:
    """Delays principals that exceed their share while others are active."""

    def __init__(
        self, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._last = ("", float("-inf"))
        self._before = float("-inf")
        """Time of the last call of a principal other than the last one."""

    async def wait(self, name: str, bucket: TokenBucket) -> float:
        """Wait for a principal's turn and return 0.

        If the wait would exceed `MOST_S`, return its seconds without waiting; the caller refuses
        the call.
        """
        now = self._clock()
        if self._last[0] != name:
            self._before = self._last[1]
        self._last = (name, now)
        bucket.until = max(bucket.until, now - AT_ONCE_S)
        if now - self._before > LATELY_S:  # alone: it starts with no debt when another comes
            bucket.until = now - AT_ONCE_S
            return 0.0
        if (wait_s := bucket.until - now) > MOST_S:
            return wait_s
        bucket.until += 1 / CALLS_S
        if wait_s > 0:
            await self._sleep(wait_s)
        return 0.0
