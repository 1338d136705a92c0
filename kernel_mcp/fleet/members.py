"""Membership of a fleet: a node is a member, and may run sessions, while its lease lasts.

A node measures its lease from when it sent the request; the list of members measures from when it
received it. So a lease ends on the node before another node can continue its sessions.
Both measure durations, so clocks need not agree.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import Any

from kernel_mcp.records import dataclass
from kernel_mcp.sessions.principals import NOTHING, Use

LEASE_S = 10.0
"""Seconds that a node runs without a renewal.

A failover then takes no longer than an answer may (15 s).
"""
RENEW_S = 2.0
MARGIN_S = 1.0
"""Seconds by which the list extends a lease, in which the watchdog wakes and kills kernels."""


STATES = ("ready", "draining", "lost")


@dataclass(frozen=True, slots=True)
class Load:
    """Load that a node reports with each renewal.

    free_bytes    memory that is available
    sessions      open sessions, of which `busy` run cells
    most          limit on sessions with a kernel
    environments  keys of environments that are ready, see `placement`
    """

    free_bytes: int = 0
    sessions: int = 0
    busy: int = 0
    most: int = 0
    environments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """A node.

    life      random id of this incarnation, different from those of earlier nodes of this name
    place     IP address of its machine
    draining  True if it accepts no sessions and gives its own to other nodes
    left      True if it has answered all calls that it had begun, and will begin none
    lost      True if its lease is over
    """

    name: str
    life: str
    place: str = ""
    version: str = ""
    draining: bool = False
    left: bool = False
    lost: bool = False
    load: Load = field(default_factory=Load)

    @property
    def state(self) -> str:
        """One of STATES."""
        return "lost" if self.lost else "draining" if self.draining else "ready"

    def row(self) -> dict[str, Any]:
        """Return the member as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Member:
        """Return the member from the output of `row`."""
        load = dict(row["load"])
        load["environments"] = tuple(load["environments"])
        return cls(**{**row, "load": Load(**load)})


class Members:
    """The list of members. `clock` returns seconds, and counts on during suspend."""

    def __init__(self, clock: Callable[[], float], *, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._lasts_s = lease_s + MARGIN_S
        self._began = clock()
        self._known: dict[str, Member] = {}
        self._until: dict[str, float] = {}
        self._uses: dict[str, dict[str, dict[str, int]]] = {}
        """Usage of principals with quotas, by node and principal; see `Use`."""
        self.version = 0
        """Number of changes in membership, draining and losses so far."""

    @property
    def age_s(self) -> float:
        """Seconds since this list was created."""
        return self._clock() - self._began

    def join(self, member: Member) -> str:
        """Add a node. Return an empty text, or the reason for a refusal.

        A node is refused while another one of this name has a lease.
        """
        there = self._known.get(member.name)
        if there is not None and there.life != member.life and not self._is_lost(there):
            return (
                f"a node named {member.name!r} is there already, at {there.place}. Give this one "
                f"another name (--name), or wait {self._lasts_s:g} s if that one was killed"
            )
        self._known[member.name] = member
        self._until[member.name] = self._clock() + self._lasts_s
        self.version += 1
        return ""

    def resume(self, member: Member) -> bool:
        """Add a node with a lease of an earlier list. Return True if the lease continues.

        It does as long as `is_over` of this list cannot have returned True for the node.
        """
        if member.name in self._known or self.age_s > self._lasts_s:
            return False
        return self.join(member) == ""

    def renew(self, name: str, life: str, load: Load) -> bool:
        """Renew the lease of a node. Return False if it is over; it cannot begin again."""
        there = self._known.get(name)
        if there is None or there.life != life or self._is_lost(there):
            return False
        self._until[name] = self._clock() + self._lasts_s
        self._known[name] = replace(there, load=load)
        return True

    def claim(self, name: str, principal: str, kind: str, own: int, most: int) -> bool:
        """Return True if a principal may have `own` on a node, by the limit `most` on all nodes.

        `kind` is a field of `Use`. A granted claim is counted from now on.
        """
        there = sum(int(use[kind]) for use in self._elsewhere(name, principal))
        if there + own > most or not self._has_lease(name):
            return False
        self._uses.setdefault(name, {}).setdefault(principal, dataclasses.asdict(NOTHING))
        self._uses[name][principal][kind] = own
        return True

    def use(self, name: str, uses: Mapping[str, Mapping[str, int]]) -> None:
        """Replace the usage that a node reports, by principal."""
        if self._has_lease(name):
            self._uses[name] = {principal: dict(use) for principal, use in uses.items()}

    def gives_way(self, name: str, principal: str, use: Mapping[str, int], most: int) -> bool:
        """Return True if a principal's largest kernel on a node has to be killed.

        That is so if all its kernels use more than `most` bytes, and no other node has a larger
        one. `use` has the memory on this node. That kernel is no longer counted from now on.
        """
        if not self._has_lease(name):
            return False
        there = [Use(**each) for each in self._elsewhere(name, principal)]
        all_of_them = functools.reduce(operator.add, there, NOTHING)
        memory, largest = use["memory"], use["largest"]
        ends = memory + all_of_them.memory > most and largest >= all_of_them.largest
        if ends:
            memory, largest = memory - largest, 0
        known = self._uses.setdefault(name, {}).get(principal, dataclasses.asdict(NOTHING))
        self._uses[name][principal] = {**known, "memory": memory, "largest": largest}
        return ends

    def others(self, name: str) -> dict[str, dict[str, int]]:
        """Return the usage on all other nodes of each principal that a node has reported."""
        found = {}
        for principal in self._uses.get(name, {}):
            if uses := [Use(**use) for use in self._elsewhere(name, principal)]:
                found[principal] = dataclasses.asdict(functools.reduce(operator.add, uses))
        return found

    def holders(self, name: str, principal: str) -> list[str]:
        """Return the nodes, except `name`, on which a principal has any usage."""
        return [each for each, uses in self._uses.items() if each != name and principal in uses]

    def _elsewhere(self, name: str, principal: str) -> list[dict[str, int]]:
        return [self._uses[each][principal] for each in self.holders(name, principal)]

    def end(self, name: str, life: str) -> None:
        """Note that a node has ended and none of its processes runs any more."""
        there = self._known.get(name)
        if there is not None and there.life == life and not there.lost:
            self._lose(there)

    def leave(self, name: str, life: str) -> None:
        """Note that a node has given all its sessions away and will end."""
        there = self._known.get(name)
        if there is not None and there.life == life and not there.lost:
            self._known[name] = replace(there, draining=True, left=True)
            self.version += 1

    def drain(self, name: str, *, draining: bool = True) -> bool:
        """Mark a node as draining, or undo that. Return False if there is no such node."""
        there = self._known.get(name)
        if there is None or self._is_lost(there):
            return False
        self._known[name] = replace(there, draining=draining)
        self.version += 1
        return True

    def is_over(self, name: str, life: str) -> bool:
        """Return True if it is certain that no process of a node's incarnation `life` runs.

        For an unknown one this is certain once any lease of an earlier list would be over.
        """
        there = self._known.get(name)
        if there is not None and there.life == life:
            return self._is_lost(there)
        return self.age_s > self._lasts_s

    def expire(self) -> float | None:
        """Mark nodes whose lease is over as lost.

        Returns the seconds until the next lease ends, or None without leases.
        """
        there = [each for each in list(self._known.values()) if not self._is_lost(each)]
        return min((self._until[each.name] - self._clock() for each in there), default=None)

    def rows(self) -> list[dict[str, Any]]:
        """Return all known members as plain values, sorted by name."""
        self.expire()
        return [each.row() for _, each in sorted(self._known.items())]

    def _has_lease(self, name: str) -> bool:
        there = self._known.get(name)
        return there is not None and not self._is_lost(there)

    def _is_lost(self, member: Member) -> bool:
        if not member.lost and self._clock() > self._until[member.name]:
            self._lose(member)
        return self._known[member.name].lost

    def _lose(self, member: Member) -> None:
        self._known[member.name] = replace(member, lost=True)
        self._uses.pop(member.name, None)
        self.version += 1


def alive(members: Iterable[Member]) -> list[Member]:
    """Return the members that have a lease."""
    return [each for each in members if not each.lost]
