"""The policy's say on a cell before it runs, in the form of a cell's failure."""

from __future__ import annotations

from dataclasses import replace

import anyio

from kernel_mcp.events import Failure
from kernel_mcp.policy import Policy, check

LONG_CODE_CHARS = 20_000
"""Code beyond this is checked in a thread: 300 lines take some 9 ms."""


async def refuse(code: str, policy: Policy) -> Failure | None:
    """The failure that stands for the policy's refusal, or None when the code may run."""
    if policy.allow_all:
        return None
    if len(code) > LONG_CODE_CHARS:
        report = await anyio.to_thread.run_sync(check, code, policy)
    else:
        report = check(code, policy)
    if not report.refusals:
        return None
    text = replace(report, diagnostics=report.refusals).render()
    return Failure("PolicyError", f"nothing was run.\n{text}", ())
