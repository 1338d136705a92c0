"""A fleet of 100,000 sessions on paper: placement, loss of nodes, what saves take of the network.

`python -m benchmarks.fleet` simulates what the code of `kernel_mcp.fleet` decides (`choose`), with
figures of sessions that `docs/fleet.md` names. With `--against` it measures instead what a front of
a real fleet adds to calls, in turns with a server of its own.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import anyio

from benchmarks.connection import connected
from kernel_mcp.fleet.members import LEASE_S, MARGIN_S, Load, Member
from kernel_mcp.fleet.placement import choose

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Plan:
    """The assumptions.

    awake        part of all sessions that have a kernel
    kernel_mib   memory of one of those (measured: a session with numpy and pandas and some data)
    node_gib     memory of a node, `usable` of which is for kernels
    fill         part of the usable memory that sessions take
    state_mib    variables of a session: the mean of a log-normal with `spread`
    dirty_s      a session that is used is saved this often (`sessions.saver.LONGEST_S`)
    used         part of the awake sessions in which a cell runs within that time
    cap_mib      variables beyond it are saved at hibernation alone, 0 for no bound
    changed      part of a save that has to be copied, as the rest is there already
    restore_s    until a session is back, and `restore_s_mib` more for each MiB
    at_once      sessions that one node brings back at a time
    """

    sessions: int = 100_000
    awake: float = 0.2
    kernel_mib: float = 260.0
    node_gib: float = 256.0
    usable: float = 0.75
    fill: float = 0.7
    state_mib: float = 40.0
    spread: float = 1.5
    dirty_s: float = 60.0
    used: float = 0.5
    cap_mib: float = 0.0
    changed: float = 1.0
    restore_s: float = 0.2
    restore_s_mib: float = 0.015
    at_once: int = 8

    @property
    def per_node(self) -> int:
        """Awake sessions that fit on a node."""
        return int(self.node_gib * 1024 * self.usable / self.kernel_mib)

    @property
    def nodes(self) -> int:
        """Nodes that hold the awake sessions at `fill`."""
        return -(-int(self.sessions * self.awake) // int(self.per_node * self.fill))


def sizes(plan: Plan, count: int, draw: Random) -> list[float]:
    """MiB of the variables of so many sessions."""
    scale = plan.state_mib / math.exp(plan.spread**2 / 2)
    return [scale * draw.lognormvariate(0.0, plan.spread) for _ in range(count)]


def placed(plan: Plan, draw: Random, *, stale: int) -> list[int]:
    """Awake sessions of each node, as fronts place them whose knowledge is `stale` sessions old."""
    count = int(plan.sessions * plan.awake)
    there = [0] * plan.nodes
    room = int(plan.node_gib * GIB * plan.usable)
    members: list[Member] = []
    for number in range(count):
        if number % stale == 0:
            members = [
                Member(
                    str(node),
                    "",
                    load=Load(
                        free_bytes=int(room - held * plan.kernel_mib * MIB),
                        sessions=held,
                        most=plan.per_node,
                    ),
                )
                for node, held in enumerate(there)
            ]
        found = choose(members, "", draw)
        assert found is not None
        there[int(found.name)] += 1
    return there


def back(plan: Plan, there: Sequence[int], lost: int, draw: Random) -> dict[str, float]:
    """Seconds until the sessions of lost nodes are back, which all are called at once.

    Those of silent nodes wait for the lease besides.
    """
    sessions = sum(there[:lost])
    free = [plan.per_node - held for held in there[lost:]]
    refused = max(0, sessions - sum(free))
    queues = [[0.0] * plan.at_once for _ in free]
    times = []
    for size in sizes(plan, sessions - refused, draw):
        one, two = draw.randrange(len(free)), draw.randrange(len(free))
        node = one if free[one] >= free[two] else two
        if free[node] <= 0:
            node = max(range(len(free)), key=free.__getitem__)
        free[node] -= 1
        took = plan.restore_s + plan.restore_s_mib * size
        times.append(heapq.heappushpop(queues[node], queues[node][0] + took) + took)
    times.sort()
    return {
        "sessions": sessions,
        "refused": refused,
        "p50_s": round(times[len(times) // 2], 2) if times else 0.0,
        "p99_s": round(times[int(len(times) * 0.99)], 2) if times else 0.0,
        "silent_s": LEASE_S + MARGIN_S,
    }


def bandwidth(plan: Plan, draw: Random) -> float:
    """GiB a second that all nodes write to the store together."""
    busy = int(plan.sessions * plan.awake * plan.used)
    found = sizes(plan, busy, draw)
    if plan.cap_mib:
        found = [size for size in found if size <= plan.cap_mib]
    return sum(found) * plan.changed / plan.dirty_s / 1024


def report(plan: Plan, seed: int) -> dict[str, Any]:
    """All figures of one plan."""
    draw = Random(seed)
    there = placed(plan, draw, stale=max(1, plan.nodes))
    draw.shuffle(there)
    mean = statistics.mean(there)
    return {
        "plan": asdict(plan),
        "nodes": plan.nodes,
        "awake_per_node": plan.per_node,
        "fullest_to_mean": round(max(there) / mean, 3),
        "lease_renewals_per_s": round(plan.nodes / 2.0, 1),
        "one_node_lost": back(plan, there, 1, draw),
        "third_lost": back(plan, there, plan.nodes // 3, draw),
        "store_gib_s": round(bandwidth(plan, draw), 2),
    }


VARIANTS: dict[str, dict[str, float]] = {
    "as it is": {},
    "cap of 64 MiB": {"cap_mib": 64.0},
    "cap, a quarter changed": {"cap_mib": 64.0, "changed": 0.25},
    "saved every five minutes": {"dirty_s": 300.0},
}


ROUNDS, CALLS, WARM = 15, 20, 30


async def added(address: str, place: str) -> dict[str, float]:
    """Milliseconds of calls of a local server and of a fleet, in turns: medians."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        own = [sys.executable, "-m", "kernel_mcp", "--state-dir", str(folder / "s")]
        front = [sys.executable, "-m", "kernel_mcp", "--fleet", address]
        front += ["--fleet-place", place] if place else []
        ray = {key: value for key, value in os.environ.items() if key.startswith("RAY_")}
        times: dict[str, list[float]] = {}
        async with (
            connected(own, folder) as local,
            connected(front, folder, environ=ray) as fleet,
        ):
            sides = {"local": local, "fleet": fleet}
            for client in sides.values():
                for _ in range(WARM):
                    await client.call_tool("execute", {"code": "1"})
            for _ in range(ROUNDS):
                for kind, hear in (("call", None), ("with progress", _hear)):
                    for side, client in sides.items():
                        found = times.setdefault(f"{side} {kind}", [])
                        for _ in range(CALLS):
                            began = time.perf_counter()
                            await client.call_tool("execute", {"code": "1"}, progress_callback=hear)
                            found.append((time.perf_counter() - began) * 1000)
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


async def _hear(progress: float, total: float | None, message: str | None) -> None:
    """Ignore a progress report; a callback only makes the server send them."""


def main() -> None:
    """Print the figures, as a table or as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--sessions", type=int, default=Plan.sessions)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--against", metavar="HOST:PORT", help="the fleet of this cluster")
    parser.add_argument("--place", metavar="IP", default="", help="this machine's address in it")
    given = parser.parse_args()
    if given.against:
        print(json.dumps(anyio.run(added, given.against, given.place), indent=1))
        return
    found = {
        name: report(Plan(sessions=given.sessions, **changes), given.seed)  # type: ignore[arg-type]
        for name, changes in VARIANTS.items()
    }
    if given.json:
        print(json.dumps(found, indent=1))
        return
    first = found["as it is"]
    nodes, each = first["nodes"], first["awake_per_node"]
    print(f"{given.sessions:,} sessions: {nodes} nodes, each with room for {each} that are awake")
    print(f"fullest node to the mean: {first['fullest_to_mean']}")
    for name in ("one_node_lost", "third_lost"):
        row = first[name]
        print(
            f"{name.replace('_', ' ')}: {row['sessions']} sessions, back p50 {row['p50_s']} s, "
            f"p99 {row['p99_s']} s, no room for {row['refused']}"
        )
    for name, row in found.items():
        print(f"{name}: {row['store_gib_s']} GiB/s to the store")


if __name__ == "__main__":
    main()
