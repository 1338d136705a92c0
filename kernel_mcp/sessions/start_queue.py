"""A fair queue: cells of many busy sessions begin in the order of their arrival, a few at a time.

Without it the operating system decides which kernel gets a processor. Of 64 sessions with quick
cells, the busiest then ran an eighth more cells than the least busy.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

MOST = os.cpu_count() or 1
"""Maximum number of cells that began less than `HOLD_S` ago and still run: one per processor."""
HOLD_S = 0.005
"""Seconds after which a running cell no longer counts, and the next may begin."""


class CellStartQueue:
    """The fair queue of a server, for use in its event loop only."""

    def __init__(self, most: int = MOST, hold_s: float = HOLD_S) -> None:
        self._free = most
        self._hold_s = hold_s
        self._waiting: deque[anyio.Event] = deque()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
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
