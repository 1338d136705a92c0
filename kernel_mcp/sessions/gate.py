"""The policy's say on a cell before it runs, in the form of a cell's failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio

from kernel_mcp.output.events import Failure
from kernel_mcp.policy import Policy, Report, check, own_modules

LONG_CODE_CHARS = 20_000
"""Code beyond this is checked in a thread: 300 lines take some 9 ms."""


async def refuse(code: str, policy: Policy, workspace: Path) -> Failure | None:
    """The failure that stands for the policy's refusal, or None when the code may run.

    Modules that lie in `workspace` may be imported.
    """
    if policy.allow_all:
        return None
    if len(code) > LONG_CODE_CHARS:
        report = await anyio.to_thread.run_sync(_check, code, policy, workspace)
    else:
        report = _check(code, policy, workspace)
    if not report.refusals:
        return None
    text = replace(report, diagnostics=report.refusals).render()
    return Failure("PolicyError", f"nothing was run.\n{text}", ())


def _check(code: str, policy: Policy, workspace: Path) -> Report:
    report = check(code, policy, compiled=False)
    if not report.refusals:
        return report
    return check(code, policy, own_modules=own_modules(workspace))
