"""Attacks on the Landlock sandbox: one function each, `landlock_attacks.toolkit.ATTACKS`."""

from __future__ import annotations

import json

from tests.escape.landlock_attacks import (
    file_reads,
    file_writes,
    network,
    privileges,
    processes,
    resources,
)
from tests.escape.landlock_attacks.toolkit import ATTACKS, Attack, World

__all__ = ["ATTACKS", "Attack", "World", "perform"]

GROUPS = (file_reads, file_writes, network, processes, privileges, resources)


def perform(name: str, world: World) -> None:
    """Run one attack and print what came of it."""
    try:
        result: dict[str, object] = {"escaped": bool(ATTACKS[name].run(world))}
    except (OSError, ValueError, MemoryError) as error:
        result = {"escaped": False, "how": repr(error)}
    print(json.dumps(result))
