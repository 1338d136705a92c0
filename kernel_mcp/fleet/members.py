"""Which nodes a fleet has: a node is a member while its lease lasts, and has sessions as long.

A node counts the time of its lease from when it asked for it, the list of members from when it was
asked: a node knows that its lease is over before anybody else goes on with its sessions. Both
measure durations, so that it takes no clocks that agree.
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
"""How long a node goes on without hearing that it may: what ends it takes no longer than an answer
may take (15 s)."""
RENEW_S = 2.0
MARGIN_S = 1.0
"""What the list waits longer than a node: for the watchdog, which has to wake and end kernels."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a node says of itself with each renewal.

    free_bytes    memory that programs could still have
    sessions      open ones, `busy` of which run cells
    most          sessions with a kernel that it has at once
    environments  keys of environments that it has ready, see `placement`
    """

    free_bytes: int = 0
    sessions: int = 0
    busy: int = 0
    most: int = 0
    environments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """A node. `life` tells it from earlier ones of its name, `place` is the machine's address.

    A `draining` one takes no session and gives its own away. One that has `left` has answered all
    calls that it had begun, and begins none. A `lost` one has no lease any more.
    """

    name: str
    life: str
    place: str = ""
    version: str = ""
    draining: bool = False
    left: bool = False
    lost: bool = False
    load: Load = field(default_factory=Load)

    def row(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Member:
        """What `row` has made."""
        load = dict(row["load"])
        load["environments"] = tuple(load["environments"])
        return cls(**{**row, "load": Load(**load)})


class Members:
    """The list of members; `clock` counts seconds, and does not stop with the machine."""

    def __init__(self, clock: Callable[[], float], *, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._lasts_s = lease_s + MARGIN_S
        self._began = clock()
        self._known: dict[str, Member] = {}
        self._until: dict[str, float] = {}
        self._uses: dict[str, dict[str, dict[str, int]]] = {}
        """What principals with quotas have, by node and principal; see `Use`."""
        self.version = 0
        """Counts changes in who is there, who drains and who is lost."""

    @property
    def age_s(self) -> float:
        """Seconds since this list began."""
        return self._clock() - self._began

    def join(self, member: Member) -> str:
        """Take a node in; why not, where one of its name has a lease. Empty for success."""
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
        """Take a node in that has a lease of an earlier list; whether that goes on.

        It does while nobody can have been told that it was over; see `is_over`.
        """
        if member.name in self._known or self.age_s > self._lasts_s:
            return False
        return self.join(member) == ""

    def renew(self, name: str, life: str, load: Load) -> bool:
        """Whether the lease of a node goes on: one that is over does not begin again."""
        there = self._known.get(name)
        if there is None or there.life != life or self._is_lost(there):
            return False
        self._until[name] = self._clock() + self._lasts_s
        self._known[name] = replace(there, load=load)
        return True

    def claim(self, name: str, principal: str, kind: str, own: int, most: int) -> bool:
        """Whether a principal may have so many of its own on a node, with those on the others.

        `kind` is a field of `Use`. What is granted counts from now on.
        """
        there = sum(int(use[kind]) for use in self._elsewhere(name, principal))
        if there + own > most or not self._has_lease(name):
            return False
        self._uses.setdefault(name, {}).setdefault(principal, dataclasses.asdict(NOTHING))
        self._uses[name][principal][kind] = own
        return True

    def use(self, name: str, uses: Mapping[str, Mapping[str, int]]) -> None:
        """A node says what principals have there, by principal: all of it."""
        if self._has_lease(name):
            self._uses[name] = {principal: dict(use) for principal, use in uses.items()}

    def gives_way(self, name: str, principal: str, use: Mapping[str, int], most: int) -> bool:
        """Whether the largest kernel of a principal on a node has to end, as all take too much.

        `use` has the memory there now. What is to end counts no more from now on.
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
        """What principals that a node knows of have on the others."""
        found = {}
        for principal in self._uses.get(name, {}):
            if uses := [Use(**use) for use in self._elsewhere(name, principal)]:
                found[principal] = dataclasses.asdict(functools.reduce(operator.add, uses))
        return found

    def holders(self, name: str, principal: str) -> list[str]:
        """The nodes but one where a principal has something."""
        return [each for each, uses in self._uses.items() if each != name and principal in uses]

    def _elsewhere(self, name: str, principal: str) -> list[dict[str, int]]:
        return [self._uses[each][principal] for each in self.holders(name, principal)]

    def end(self, name: str, life: str) -> None:
        """A node has ended, and nothing of it runs any more."""
        there = self._known.get(name)
        if there is not None and there.life == life and not there.lost:
            self._lose(there)

    def leave(self, name: str, life: str) -> None:
        """A node has given everything away, and will end."""
        there = self._known.get(name)
        if there is not None and there.life == life and not there.lost:
            self._known[name] = replace(there, draining=True, left=True)
            self.version += 1

    def drain(self, name: str, *, draining: bool = True) -> bool:
        """Have a node take no sessions; False where there is none."""
        there = self._known.get(name)
        if there is None or self._is_lost(there):
            return False
        self._known[name] = replace(there, draining=draining)
        self.version += 1
        return True

    def is_over(self, name: str, life: str) -> bool:
        """Whether a life of a node is over for certain: nothing of it runs, nor will.

        Of one that is not known here that is certain once a lease of before would be over.
        """
        there = self._known.get(name)
        if there is not None and there.life == life:
            return self._is_lost(there)
        return self.age_s > self._lasts_s

    def expire(self) -> float | None:
        """Note which leases are over; seconds until the next would be, None without any."""
        there = [each for each in list(self._known.values()) if not self._is_lost(each)]
        return min((self._until[each.name] - self._clock() for each in there), default=None)

    def rows(self) -> list[dict[str, Any]]:
        """All that are known, as plain values, by name."""
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
    """Those that have a lease."""
    return [each for each in members if not each.lost]
