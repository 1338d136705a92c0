"""Registry of a fleet's members: one actor, on the head of the cluster.

It has no state that has to survive it. If it restarts, nodes join again. Leases that are not in its
list yet count as valid for the length of one lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kernel_mcp.fleet.cluster import NAMESPACE, REGISTRY, FleetUnavailable
from kernel_mcp.fleet.members import MARGIN_S, RENEW_S, Member, Members
from kernel_mcp.fleet.watchdog import boottime

LONGEST_WAIT_S = 5.0
"""Longest poll for changes, in seconds. Who asks again after it sees that the head is there."""
SILENT_S = 60.0
"""Seconds without a report after which the counts of a front are dropped."""
HEAD = "node:__internal_head__"
"""Ray's resource for its head, which also has the control store of the cluster."""


class Registry:
    """`Members` as an actor for all machines; its methods are documented there."""

    def __init__(self) -> None:
        self._members = Members(boottime)
        self._changed = asyncio.Event()
        self._version = 0
        self._spent: dict[str, tuple[float, dict[str, int]]] = {}
        """For each front, the time of its last report, and its calls by principal."""
        self._expiring: asyncio.Task[None] | None = None

    async def join(self, row: Mapping[str, Any]) -> str:
        """Add a node. Return an empty text, or the reason for a refusal."""
        self._begin()
        refusal = self._members.join(Member.of(row))
        self._tell()
        return refusal

    async def renew(
        self, row: Mapping[str, Any], uses: Mapping[str, Mapping[str, int]]
    ) -> tuple[bool, dict[str, dict[str, int]]]:
        """Renew the lease of a node, also one from before this process started.

        Returns two values: False if the lease is over, and the usage on other nodes of the
        principals in `uses`; see `Members.others`.
        """
        self._begin()
        member = Member.of(row)
        done = self._members.renew(member.name, member.life, member.load)
        done = done or self._members.resume(member)
        self._tell()
        if done:
            self._members.use(member.name, uses)
        return done, self._members.others(member.name)

    async def use(self, name: str, uses: Mapping[str, Mapping[str, int]]) -> None:
        """Record what a node's principals use, by `Members.use`."""
        self._members.use(name, uses)

    async def claim(self, name: str, principal: str, kind: str, own: int, most: int) -> bool:
        """See `Members`. After a restart, wait first until all nodes could report their usage."""
        young_s = RENEW_S + MARGIN_S - self._members.age_s
        if young_s > 0:
            await asyncio.sleep(young_s)
        return self._members.claim(name, principal, kind, own, most)

    async def gives_way(self, name: str, principal: str, use: Mapping[str, int], most: int) -> bool:
        """See `Members`."""
        return self._members.gives_way(name, principal, use, most)

    async def spent(self, front: str, calls: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Store the calls of a front by principal, and return those of other fronts.

        They are by front and principal, for these principals only. Each front counts from its
        start, and reports only principals that have called recently.
        """
        now = boottime()
        self._spent[front] = now, dict(calls)
        for each, (then, _) in list(self._spent.items()):
            if then < now - SILENT_S:
                del self._spent[each]
        return {
            each: {name: spent[name] for name in calls if name in spent}
            for each, (_, spent) in self._spent.items()
            if each != front
        }

    async def holders(self, name: str, principal: str) -> list[str]:
        """See `Members`."""
        return self._members.holders(name, principal)

    def _begin(self) -> None:
        if self._expiring is None:
            self._expiring = asyncio.create_task(self._expire())

    async def end(self, name: str, life: str) -> None:
        """See `Members`."""
        self._members.end(name, life)
        self._tell()

    async def leave(self, name: str, life: str) -> None:
        """See `Members`."""
        self._members.leave(name, life)
        self._tell()

    async def drain(self, name: str, draining: bool = True) -> bool:
        """See `Members`."""
        done = self._members.drain(name, draining=draining)
        self._tell()
        return done

    async def until_over(self, name: str, life: str, most_s: float) -> bool:
        """Wait up to `most_s` seconds until it is certain that a node's incarnation is over.

        Returns True if it is, else False after the time; see `Members.is_over`. With 0 it returns
        at once.
        """
        until = boottime() + most_s
        while not (over := self._members.is_over(name, life)):
            left = until - boottime()
            if left <= 0:
                break
            await self._change(min(left, 0.5))
        self._tell()
        return over

    async def rows(self) -> list[dict[str, Any]]:
        """Return all members as plain values."""
        found = self._members.rows()
        self._tell()
        return found

    async def changes(self, seen: int) -> tuple[int, list[dict[str, Any]]]:
        """Wait until the version differs from `seen`; return the version and the members.

        After `LONGEST_WAIT_S` they are returned without a change.
        """
        if seen == self._members.version:
            await self._change(LONGEST_WAIT_S)
        rows = self._members.rows()
        self._tell()
        return self._members.version, rows

    async def _expire(self) -> None:
        """Expire leases in the background, until cancelled."""
        while True:
            left = self._members.expire()
            self._tell()
            await asyncio.sleep(0.25 if left is None else min(max(left, 0.05), 0.25))

    async def _change(self, most_s: float) -> None:
        changed = self._changed
        try:
            await asyncio.wait_for(changed.wait(), most_s)
        except asyncio.TimeoutError:
            return

    def _tell(self) -> None:
        """Wake tasks that wait for a change, if there was one."""
        if self._version != self._members.version:
            self._version = self._members.version
            self._changed.set()
            self._changed = asyncio.Event()


def registry_of(ray: Any, *, make: bool = False) -> Any:
    """Return the registry of the cluster; with `make` create it if there is none.

    Raises FleetUnavailable without one.
    """
    options = {"name": REGISTRY, "namespace": NAMESPACE}
    if make:
        return (
            ray.remote(Registry)
            .options(
                **options,
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=3,
                max_concurrency=10_000,
                num_cpus=0,
                resources={HEAD: 0.001},
            )
            .remote()
        )
    try:
        return ray.get_actor(REGISTRY, NAMESPACE)
    except ValueError:
        raise FleetUnavailable(
            "the cluster has no node of kernel-mcp: start one on each of its machines with "
            "kernel-mcp node --fleet ADDRESS"
        ) from None
