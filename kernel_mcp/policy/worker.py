"""`worker FD MARK`: a process that checks one long cell, started by `bare_program`.

FD holds the arguments of `check`, pickled by the server. The report is written to stdout as JSON.
Its texts contain `MARK` and a number in place of the next step for a module: only the server knows
that step. The number is an index into `asked`, the list of these modules.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernel_mcp.policy import Diagnostic, ImportUse, Policy, Report, operators_step
from kernel_mcp.policy.check import check
from kernel_mcp.units import GIB
from kernel_specs import linux

MOST_BYTES = GIB
"""Address-space limit of the process in bytes; the densest code of `MAX_CODE` uses a quarter."""
MOST_CPU_S = 20
"""Limit of processor seconds of the process; the densest code of `MAX_CODE` uses one."""


def request(code: str, policy: Policy, wishes: Mapping[str, Any]) -> int:
    """Return a memfd with the arguments of `check`; `wishes` are its keyword arguments.

    `policy.step` is replaced, because it refers to objects of the server. Raises OSError.
    """
    wanted = code, replace(policy, step=operators_step), wishes
    fd = os.memfd_create("code", os.MFD_CLOEXEC)
    with open(fd, "r+b", closefd=False) as file:
        pickle.dump(wanted, file)
        file.seek(0)
    return fd


def report_of(answer: bytes, mark: str, policy: Policy) -> Report:
    """Return the report of the process, with the steps of `policy` in place of the marks."""
    told = json.loads(answer)

    def completed(message: str) -> str:
        first, *others = message.split(mark)
        parts = [first]
        for number, _, rest in (other.partition(".") for other in others):
            parts += [policy.next_step(told["asked"][int(number)]), rest]
        return "".join(parts)

    found = (Diagnostic(**each) for each in told["diagnostics"])
    diagnostics = tuple(replace(each, message=completed(each.message)) for each in found)
    imports = tuple(ImportUse(**each) for each in told["imports"])
    return Report(told["valid"], diagnostics, imports, told["note"])


def main(argv: Sequence[str]) -> int:
    """Check the code of the request at descriptor `argv[0]`; `argv[1]` marks missing steps."""
    fd, mark = int(argv[0]), argv[1]
    linux.set_name("kernel-check")
    _limit(resource.RLIMIT_AS, MOST_BYTES)
    _limit(resource.RLIMIT_CPU, MOST_CPU_S)
    _limit(resource.RLIMIT_CORE, 0)
    gc.disable()  # syntax trees have no cycles
    with open(fd, "rb") as file:
        code, policy, wishes = pickle.load(file)
    asked: list[str] = []

    def step(module: str, *, once: bool) -> str:
        asked.append(module)
        return f"{mark}{len(asked) - 1}."

    report = check(code, replace(policy, step=step), **wishes)
    json.dump({**report.to_json(), "note": report.note, "asked": asked}, sys.stdout)
    return 0


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
