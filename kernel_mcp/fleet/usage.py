"""Quotas of principals over all nodes of a fleet, counted by the registry.

Sessions are claimed before they begin, so a quota is never exceeded. Nodes report other usage with
each renewal, and the reply has that of the other nodes. It is `members.RENEW_S` seconds old.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import anyio

from kernel_mcp.fleet.cluster import FleetUnavailable, awaited
from kernel_mcp.sessions.principals import NOTHING, Others, Use

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
"""Timeout in seconds for the registry, and for a node that is asked for idle sessions."""
GIVING_S = 30.0
"""Timeout in seconds for a node that is to hibernate a session."""


class FleetUsage(Others):
    """See `Others`, for one node. `find` returns another node's actor by name, or None."""

    def __init__(self, node: str, registry: Any, ray: Any, find: Callable[[str], Any]) -> None:
        self._node = node
        self._registry = registry
        self._ray = ray
        self._find = find
        self._uses: dict[str, Use] = {}

    def update(self, uses: Mapping[str, Mapping[str, int]]) -> None:
        """Store the usage of principals on other nodes, from the reply to a renewal."""
        self._uses = {principal: Use(**use) for principal, use in uses.items()}

    def use(self, principal: str) -> Use:
        """See `Others`."""
        return self._uses.get(principal, NOTHING)

    async def claim(self, principal: str, kind: str, own: int, most: int) -> bool:
        """See `Others`. Raises FleetUnavailable."""
        claimed = self._registry.claim.remote(self._node, principal, kind, own, most)
        return bool(await self._asked(claimed))

    async def idlest(
        self, principal: str, kind: str, without: Collection[str]
    ) -> tuple[str, float] | None:
        """See `Others`. The nodes that are asked also report their usage to the registry."""
        holders = await self._asked(self._registry.holders.remote(self._node, principal))
        found: dict[str, float] = {}

        async def ask(node: str) -> None:
            idle_s = await self._of(node, "idle_s", principal, kind, within_s=ANSWER_S)
            if idle_s is not None and node not in without:
                found[node] = float(idle_s)

        await asyncio.gather(*map(ask, holders))
        return max(found.items(), key=lambda each: each[1], default=None)

    async def evict_one(self, where: str, principal: str, kind: str) -> bool:
        """See `Others`."""
        return bool(await self._of(where, "evict_one", principal, kind, within_s=GIVING_S))

    async def gives_way(self, principal: str, use: Use, most: int) -> bool:
        """See `Others`. Raises FleetUnavailable."""
        row = dataclasses.asdict(use)
        return bool(
            await self._asked(self._registry.gives_way.remote(self._node, principal, row, most))
        )

    async def _asked(self, reference: Any) -> Any:
        """Await a reply of the registry. Raises FleetUnavailable."""
        try:
            return await asyncio.wait_for(awaited(reference), ANSWER_S)
        except (asyncio.TimeoutError, self._ray.exceptions.RayError) as error:
            raise FleetUnavailable(
                "The head of the fleet does not answer, which counts what is of your quota. "
                "Call again in some seconds."
            ) from error

    async def _of(self, node: str, method: str, *words: str, within_s: float) -> Any:
        """Call a method of another node and return its reply; None if it does not answer."""
        try:
            actor = await anyio.to_thread.run_sync(self._find, node)
            if actor is None:
                return None
            asked = getattr(actor, method).remote(*words)
            return await asyncio.wait_for(awaited(asked), within_s)
        except (asyncio.TimeoutError, self._ray.exceptions.RayError) as error:
            logger.warning("node %s does not answer: %s", node, type(error).__name__)
            return None


def rows_of(uses: Mapping[str, Use]) -> dict[str, dict[str, int]]:
    """Return usage by principal as plain values."""
    return {principal: dataclasses.asdict(use) for principal, use in uses.items()}
