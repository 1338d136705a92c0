"""Placement of new sessions: the better of two nodes chosen at random.

Two choices keep the fullest node near the average, without exact knowledge of all nodes. Fronts do
not all choose the emptiest one, either ("the power of two choices", Mitzenmacher 2001).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from kernel_mcp.fleet.members import Member
from kernel_mcp.records import dataclass

SPARE_BYTES = 512 * 1024 * 1024
"""Free memory below which a node gets a session only if no other candidate has more."""


def environment_of(arguments: Mapping[str, Any]) -> str:
    """Return the key of the environment that a `create_session` or `run_script` call needs.

    Empty for the default environment, which every node has.
    """
    names = arguments.get("packages") or arguments.get("dependencies") or []
    python = arguments.get("python") or ""
    if isinstance(names, str):
        names = names.split(",")
    if not (isinstance(names, list) and (names or python)):
        return ""
    return json.dumps([sorted(str(each).strip().lower() for each in names), str(python)])


@dataclass(frozen=True, slots=True)
class _Merit:
    roomy: bool
    prepared: bool
    slots: int
    free: int

    @property
    def order(self) -> tuple[bool, bool, int, int]:
        return self.roomy, self.prepared, self.slots, self.free


def _merit(member: Member, environment: str, ahead: Mapping[str, int]) -> _Merit:
    load = member.load
    taken = load.sessions + ahead.get(member.name, 0)
    room = load.most - taken
    return _Merit(
        roomy=load.free_bytes > SPARE_BYTES and room > 0,
        prepared=not environment or environment in load.environments,
        slots=min(0, room),  # of full nodes, prefer the least full one
        free=load.free_bytes // max(1, taken + 1),
    )


def choose(
    members: Iterable[Member],
    environment: str,
    draw: Random,
    *,
    but: Sequence[str] = (),
    ahead: Mapping[str, int] | None = None,
) -> Member | None:
    """Return the node for a session that needs an environment, or None if no node accepts it.

    `but` names excluded nodes. `ahead` counts sessions recently sent to nodes, which their load may
    not include. If any node has the environment ready, at least one of the two candidates has it.
    """
    open_ = [each for each in members if not (each.lost or each.draining or each.name in but)]
    if not open_:
        return None
    drawn = draw.sample(open_, min(2, len(open_)))
    ready = [each for each in open_ if environment and environment in each.load.environments]
    if ready and not any(each in ready for each in drawn):
        drawn[-1] = draw.choice(ready)
    sent = ahead or {}
    return max(drawn, key=lambda each: _merit(each, environment, sent).order)
