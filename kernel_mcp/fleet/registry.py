"""The one process of a fleet that knows its members: an actor on the head of the cluster.

It holds nothing that has to outlive it. Where it starts again nodes join it again, and leases that
it does not know of count as held for as long as one lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kernel_mcp.fleet.cluster import NAMESPACE, REGISTRY, FleetUnavailable
from kernel_mcp.fleet.members import MARGIN_S, RENEW_S, Member, Members
from kernel_mcp.fleet.watchdog import boottime

LONGEST_WAIT_S = 30.0
"""After which whoever waits for a change is answered and asks again."""
SILENT_S = 60.0
"""After which what a front has answered is forgotten."""
HEAD = "node:__internal_head__"
"""The resource that Ray gives its head: where the control store of the cluster is, too."""


class Registry:
    """`Members` for all machines; see there for what its methods do."""

    def __init__(self) -> None:
        self._members = Members(boottime)
        self._changed = asyncio.Event()
        self._version = 0
        self._spent: dict[str, tuple[float, dict[str, int]]] = {}
        """When each front has last said what calls of which principals it has answered."""
        self._expiring: asyncio.Task[None] | None = None

    async def join(self, row: Mapping[str, Any]) -> str:
        """Take a node in; why not, or nothing."""
        self._begin()
        refusal = self._members.join(Member.of(row))
        self._tell()
        return refusal

    async def renew(
        self, row: Mapping[str, Any], uses: Mapping[str, Mapping[str, int]]
    ) -> tuple[bool, dict[str, dict[str, int]]]:
        """Whether the lease of a node goes on, also one from before this process began.

        And what principals have elsewhere that have these `uses` of it; see `Members.others`.
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
        """See `Members`."""
        self._members.use(name, uses)

    async def claim(self, name: str, principal: str, kind: str, own: int, most: int) -> bool:
        """See `Members`; answers once all nodes have had time to say what they have."""
        young_s = RENEW_S + MARGIN_S - self._members.age_s
        if young_s > 0:
            await asyncio.sleep(young_s)
        return self._members.claim(name, principal, kind, own, most)

    async def gives_way(self, name: str, principal: str, use: Mapping[str, int], most: int) -> bool:
        """See `Members`."""
        return self._members.gives_way(name, principal, use, most)

    async def spent(self, front: str, calls: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Calls that other fronts have answered of these principals, by front and principal.

        Each counts from when it began, and tells of those alone who have called lately.
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
        """Nothing of a node runs any more."""
        self._members.end(name, life)
        self._tell()

    async def leave(self, name: str, life: str) -> None:
        """A node has given everything away, and will end."""
        self._members.leave(name, life)
        self._tell()

    async def drain(self, name: str, draining: bool = True) -> bool:
        """Have a node take no sessions; False where there is none."""
        done = self._members.drain(name, draining=draining)
        self._tell()
        return done

    async def until_over(self, name: str, life: str, most_s: float) -> bool:
        """Whether a life of a node is over for certain, once it is, at the latest after a time.

        Answers at once where it has a lease and `most_s` is 0.
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
        """All members, as plain values."""
        found = self._members.rows()
        self._tell()
        return found

    async def changes(self, seen: int) -> tuple[int, list[dict[str, Any]]]:
        """The members, once something has changed since a version was seen; and which it is now."""
        if seen == self._members.version:
            await self._change(LONGEST_WAIT_S)
        rows = self._members.rows()
        self._tell()
        return self._members.version, rows

    async def _expire(self) -> None:
        """Have leases end when nobody asks."""
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
        """Wake who waits for a change, if there was one."""
        if self._version != self._members.version:
            self._version = self._members.version
            self._changed.set()
            self._changed = asyncio.Event()


def registry_of(ray: Any, *, make: bool = False) -> Any:
    """The registry of the cluster, which the first node makes. Raises FleetUnavailable."""
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
