"""Runs attacks in the sandbox, each in a process of its own, and prints the outcomes as JSON.

Started as a script by a bare interpreter; the target and the names come on standard input.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.escape.attacks import (
    corners,
    files,
    machine,
    network,
    privileges,
    processes,
    resources,
    shared_files,
    writes,
)
from tests.escape.attacks.table import Attack, Target, attacks_in

ATTACKS = [
    attack
    for module in (
        *(files, writes, shared_files, machine),
        *(network, processes, privileges, resources, corners),
    )
    for attack in attacks_in(module)
]
PATIENCE_S = 10


def main() -> None:
    task = json.load(sys.stdin)
    target = Target(**task["target"])
    os.chdir(task["workspace"])
    outcomes = {a.name: outcome(a, target) for a in ATTACKS if a.name in task["names"]}
    json.dump(outcomes, sys.stdout)


def outcome(attack: Attack, target: Target) -> str:
    """`ESCAPED …` or `held …` with what was seen."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.write(write, attempt(attack, target).encode())
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], PATIENCE_S)
    said = os.read(read, 4096).decode() if ready else ""
    os.close(read)
    if not ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if said:
        return said
    return f"held: killed by signal {os.WTERMSIG(status)}" if ready else "held: it hung"


def attempt(attack: Attack, target: Target) -> str:
    try:
        if attack.group == "resources":
            confine(target.limits)
        got = attack.run(target)
    except BaseException as error:  # noqa: BLE001  # whatever stops an attack stops it
        return f"held: {type(error).__name__}: {error}"
    return f"ESCAPED: {got!r}" if got else "held: nothing gained"


def confine(limits: dict[str, int]) -> None:
    """The limits of a kernel, set by the code of its boot."""
    sys.path.append("/opt")
    from kernel_specs.restricted.config import ProcessLimits
    from kernel_specs.restricted.confine import apply_limits

    names = ("memory_bytes", "pids", "open_files", "file_bytes")
    apply_limits(ProcessLimits(**{name: limits[name] for name in names}))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


if __name__ == "__main__":
    main()
