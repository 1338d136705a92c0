"""Garbage collection in the store of a fleet, by one node at a time.

An ended session leaves its last version in the store, so that a node which knows an earlier version
cannot continue it. This is needed as long as such a node may run: for a lease at most.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.fleet.members import LEASE_S
from kernel_mcp.fleet.session_table import (
    DATA,
    NAMES,
    SESSIONS,
    SessionRow,
    SessionTable,
    VersionedRow,
    data_of,
)
from kernel_mcp.fleet.signed import NOTHING, NotOurs, Overtaken, StoredVersion
from kernel_mcp.sessions.shared_context import Clock

logger = logging.getLogger(__name__)

PASS_S = 1800.0
"""Seconds between two passes."""
SETTLED_S = 60 * LEASE_S
"""Seconds after which nothing is written any more to an ended session."""

IsOver = Callable[[str, str], Awaitable[bool]]
"""Function that returns True if an incarnation (`life`) of a node is certainly over."""
Seen = dict[str, tuple[int, float]]
"""For each name, the version in which it was seen, and since when."""
Look = Callable[[str, Seen], Awaitable[bool]]


class Collector:
    """Garbage collector of the store.

    `most_s` is the retention in seconds from when the last node released a session. If its node was
    lost, the time begins when a pass first notices that, and is recorded in the row.
    """

    def __init__(
        self,
        table: SessionTable,
        is_over: IsOver,
        *,
        most_s: float,
        clock: Clock = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._table = table
        self._is_over = is_over
        self._most_s = most_s
        self._clock = clock
        self._now = now
        self._seen: Seen = {}

    async def run(self, is_first: Callable[[], Awaitable[bool]]) -> None:
        """Run passes until cancelled, as long as `is_first` is True for this node."""
        while True:
            await anyio.sleep(PASS_S)
            with Barrier("removing what nobody needs from the store of the fleet"):
                if await is_first():
                    await self.collect()

    async def collect(self) -> int:
        """Run one pass; return the number of removed entries. Raises OSError."""
        before, self._seen = self._seen, {}
        removed = 0
        looks = {SESSIONS: self._session, NAMES: self._name, DATA: self._data}
        for folder, look in looks.items():
            for name in await self._names(folder):
                removed += await self._collect_one(look, f"{folder}/{name}", before)
        if removed:
            logger.info("removed %d things that nobody needs from the store", removed)
        return removed

    async def _collect_one(self, look: Look, place: str, before: Seen) -> bool:
        try:
            return await look(place, before)
        except (NotOurs, Overtaken, ValueError) as reason:
            logger.warning("%s stays in the store: %s", place, reason)
            return False

    async def _session(self, place: str, before: Seen) -> bool:
        version = await self._latest(place)
        if version.value is None:
            return await self._ended(place, version, before)
        known = VersionedRow(version, row := SessionRow.of(version.value))
        if row.node:
            if await self._is_over(row.node, row.life):
                left = VersionedRow(version, row.left(self._now(), ended=False))
                await anyio.to_thread.run_sync(self._table.write, left)
            return False
        if self._now() - row.since < self._most_s:
            return await self._sign_again(place, version)
        await anyio.to_thread.run_sync(self._table.forget, known)
        await anyio.to_thread.run_sync(self._clear, data_of(row.handle))
        logger.info("session %s was kept for long enough", row.handle)
        return True

    async def _name(self, place: str, before: Seen) -> bool:
        version = await self._latest(place)
        if version.value is None:
            return await self._ended(place, version, before)
        return await self._sign_again(place, version)

    async def _sign_again(self, place: str, version: StoredVersion) -> bool:
        """Sign a value with the first key of the fleet, if it is another. Return False."""
        if version.old:
            signed = self._table.signed
            await anyio.to_thread.run_sync(signed.advance, place, version, version.value)
        return False

    async def _data(self, place: str, before: Seen) -> bool:
        """Remove the saved data of a session whose row is gone. Return True if it was removed."""
        version = await self._latest(f"{SESSIONS}/{place.rpartition('/')[2]}")
        if version.value is not None or self._age_s(place, NOTHING, before) < SETTLED_S:
            return False
        await anyio.to_thread.run_sync(self._clear, place)
        return True

    async def _ended(self, place: str, version: StoredVersion, before: Seen) -> bool:
        if self._age_s(place, version, before) < SETTLED_S:
            return False
        await anyio.to_thread.run_sync(self._table.signed.remove, place, version)
        return True

    def _age_s(self, place: str, version: StoredVersion, before: Seen) -> float:
        """Return the seconds for which a name has been seen in this version."""
        now = self._clock()
        number, since = before.get(place, (version.number, now))
        if number != version.number:
            since = now
        self._seen[place] = version.number, since
        return now - since

    async def _latest(self, place: str) -> StoredVersion:
        return await anyio.to_thread.run_sync(self._table.signed.latest, place)

    async def _names(self, folder: str) -> list[str]:
        return await anyio.to_thread.run_sync(self._table.signed.place.names, folder)

    def _clear(self, folder: str) -> None:
        place = self._table.signed.place
        for name in place.names(folder):
            place.remove(f"{folder}/{name}")
