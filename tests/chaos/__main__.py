"""Run chaos from a shell: `python -m tests.chaos --seconds 600`."""

from __future__ import annotations

import argparse
import json
import sys

import anyio

from tests.chaos.driver import chaos


def main() -> int:
    """Print what was found; 1 when a variable was wrong or lost in silence."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="for the server, behind --")
    chosen = parser.parse_args()

    async def run() -> int:
        findings = await chaos(
            seconds=chosen.seconds,
            sessions=chosen.sessions,
            seed=chosen.seed,
            flags=tuple(chosen.flags),
        )
        found = {**vars(findings)}
        lists = {name: len(value) for name, value in found.items() if isinstance(value, list)}
        for name in lists:
            for text in found[name][:20]:
                sys.stdout.write(f"{name}: {text}\n")
        sys.stdout.write(f"{findings.log}\n")
        summary = {
            "steps": findings.steps,
            "told": findings.losses_told,
            "refusals": findings.refusals,
            **lists,
        }
        sys.stdout.write(json.dumps({**summary, "done": dict(findings.done)}) + "\n")
        return 0 if findings.good else 1

    return anyio.run(run)


if __name__ == "__main__":
    sys.exit(main())
