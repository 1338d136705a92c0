"""Measure kernel-mcp beside jupyter_client with a stock ipykernel, in the same run.

Times are medians. The floor is what a session costs without MCP and without a sandbox.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import MappingProxyType

import anyio

from benchmarks import (
    checks,
    compare,
    crowds,
    field,
    ours,
    over_http,
    record,
    report,
    sessions,
    sleep,
)
from benchmarks.bench import Bench
from benchmarks.machine import Machine
from benchmarks.places import build_ours
from benchmarks.results import BenchmarkError, Results, failure

GROUP_S = 1200
QUIET_LOAD = 0.5
"""Highest load average at which figures can be compared with those of other days."""
RESULTS = Path(__file__).parent / "results"
PEERS = "peers"

GROUPS: Mapping[str, Callable[[Bench], Awaitable[None]]] = MappingProxyType(
    {
        "start": sessions.start,
        "first": sessions.first,
        "session": sessions.session,
        "warm": sessions.warm,
        "http": over_http.warm,
        "cells": sessions.cells,
        "plots": sessions.plots,
        "ends": sessions.ends,
        "wake": sleep.wake,
        "save": sleep.save,
        "doctor": sessions.doctor,
        "check": checks.check,
        "burst": crowds.burst,
        "busy": crowds.busy,
        "robin": crowds.robin,
        "memory": crowds.memory,
        "growth": crowds.growth,
        PEERS: field.measure,
    }
)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, few sessions")
    parser.add_argument("--peers", action="store_true", help="measure other MCP servers too")
    parser.add_argument("--only", metavar="NAME,…", default="", help=f"some of {', '.join(GROUPS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all values are written")
    parser.add_argument(
        "--compare",
        metavar="REV",
        help="measure a revision of git and this tree in turns, and print ratios",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="rewrite docs/benchmarks.md and its plot",
    )
    options = parser.parse_args(argv)
    options.only = [name for name in options.only.split(",") if name]
    if unknown := [name for name in options.only if name not in GROUPS]:
        parser.error(f"there is no {unknown[0]!r}; choose from {', '.join(GROUPS)}")
    return options


async def _run(results: Results, groups: Sequence[str], *, quick: bool) -> None:
    print("Preparing the environments", file=sys.stderr)
    await build_ours(ours.ALLOW)
    for group in groups:
        print(f"Measuring {group}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="kb-") as scratch:
            if why := await failure(partial(_measure, group, Bench(results, Path(scratch), quick))):
                results.broken[group] = why


async def _measure(group: str, bench: Bench) -> None:
    with anyio.fail_after(GROUP_S):
        await GROUPS[group](bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0 when everything could be measured."""
    options = _options(argv)
    groups = options.only or [name for name in GROUPS if name != PEERS or options.peers]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # some servers print into the protocol
    for noisy in ("httpx2", "httpcore2"):  # a line for each call, which would be measured too
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if options.compare:
        try:
            return compare.compare(options.compare, options.only, quick=options.quick)
        except BenchmarkError as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            return 1
    now = datetime.now(timezone.utc)
    machine = Machine.this()
    if machine.load > QUIET_LOAD:
        print(f"This machine is busy: its load average is {machine.load}", file=sys.stderr)
    results = Results()
    why = anyio.run(failure, partial(_run, results, groups, quick=options.quick))
    if why:
        print(f"benchmarks: {why}", file=sys.stderr)
        return 1
    print(report.table(results))
    for group, why in results.broken.items():
        print(f"\n{group} was not measured to its end: {why}")
    print(f"\n{machine.describe()}")
    file = options.json or RESULTS / f"{now:%Y-%m-%dT%H%M%SZ}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "date": now.isoformat(timespec="seconds"),
        "quick": options.quick,
        "machine": machine.as_json(),
        "figures": results.as_json(),
    }
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"All values: {file}", file=sys.stderr)
    if options.record:
        why = anyio.run(failure, partial(record.record, results, machine, now))
        if why:
            print(f"benchmarks: nothing recorded: {why}", file=sys.stderr)
            return 1
    return int(results.failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
