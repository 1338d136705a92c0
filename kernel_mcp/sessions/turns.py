"""Cells of many busy sessions begin in the order in which they came, a few at a time.

Kernels that are all handed their cells at once get processors in an order of the operating
system's: of 64 sessions with quick cells, the busiest ran an eighth more than the least busy.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

MOST = os.cpu_count() or 1
"""Cells that have just begun: one for each processor."""
HOLD_S = 0.005
"""After which a cell that still runs is no quick one, and the next may begin."""


class Turns:
    """One for a server; for its event loop alone."""

    def __init__(self, most: int = MOST, hold_s: float = HOLD_S) -> None:
        self._free = most
        self._hold_s = hold_s
        self._waiting: deque[anyio.Event] = deque()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until the cell of this block may begin."""
        await self._take()
        held = True

        def give() -> None:
            nonlocal held
            if held:
                held = False
                self._give()

        timer = asyncio.get_running_loop().call_later(self._hold_s, give)
        try:
            yield
        finally:
            timer.cancel()
            give()

    async def _take(self) -> None:
        if self._free:
            self._free -= 1
            return
        mine = anyio.Event()
        self._waiting.append(mine)
        try:
            await mine.wait()
        except BaseException:
            if mine.is_set():
                self._give()
            else:
                self._waiting.remove(mine)
            raise

    def _give(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._free += 1
