"""The cells of closed sessions that stay readable for a while, as those of a script do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.barriers import Barrier, surely
from kernel_mcp.config.values import MIB
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.sessions.history import History

KEPT_S = 600.0
MOST_KEPT = 50
KEPT_BYTES = 512 * MIB
"""All kept outputs on disk; the oldest go first."""


@dataclass(frozen=True, slots=True)
class _Kept:
    owner: str
    cells: History
    until: float


class ClosedRecords:
    """Records in `folder`, each under its session's handle; `clock` is the sessions'."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float],
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._spawn = spawn
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def find(self, owner: str, handle: str) -> History | None:
        """The cells of a closed session of this owner's, while they are kept."""
        kept = self._kept.get(handle)
        if kept is None or kept.owner != owner or kept.until <= self._clock():
            return None
        return kept.cells

    async def keep(self, owner: str, handle: str, cells: History) -> None:
        """Keep them for `KEPT_S`, and remove what is too much."""
        cells.settle(kernel_gone=True)
        if not self._kept:
            self._spawn(self._expire)
        self._kept[handle] = _Kept(owner, cells, self._clock() + KEPT_S)
        while len(self._kept) > MOST_KEPT or self._bytes() > KEPT_BYTES:
            await self._remove_oldest()

    async def _expire(self) -> None:
        while self._kept:
            await anyio.sleep(max(0.0, next(iter(self._kept.values())).until - self._clock()))
            while self._kept and next(iter(self._kept.values())).until <= self._clock():
                await self._remove_oldest()

    async def _remove_oldest(self) -> None:
        handle, _ = self._kept.popitem(last=False)
        with Barrier("removing the record of a closed session", handle):
            await surely(remove_tree, self._folder / handle)

    def _bytes(self) -> int:
        return sum(kept.cells.disk_bytes for kept in self._kept.values())
