"""`verify` finds planted faults and names their causes, and finds nothing in clean sessions."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.integration.agent import Answer
from tests.integration.servers import Servers
from tests.integration.verified import CLEAN, FAULTS, LATER, Case, verified

pytestmark = pytest.mark.anyio

FLAGS = ("--allow", "*", "--max-sessions", "20")
IN_THE_GATE = {
    *("edited-threshold", "edited-and-run-again", "deleted-value", "deleted-definition"),
    *("order-moved-up", "repeated-counter", "earlier-kernel-name", "file-changed", "file-gone"),
    *(
        "random-far-away",
        "hash-group",
        "deleted-two",
        "clock-seconds",
        "hash-set",
        "folder-listing",
        "entropy-uuid",
    ),
    *("addresses", "time-magic", "error-in-function", "writes-once", "appends", "bash", "set-repr"),
}


def cases(all_of_them: tuple[Case, ...]) -> list[Any]:
    return [
        pytest.param(
            case, id=case.name, marks=() if case.name in IN_THE_GATE else (pytest.mark.ways,)
        )
        for case in all_of_them
    ]


def found(answer: Answer) -> dict[str, Any]:
    meta = answer.result.meta or {}
    assert "kernel-mcp/verification" in meta, answer.text
    made: dict[str, Any] = meta["kernel-mcp/verification"]
    return made


@pytest.mark.parametrize("case", cases((*FAULTS, *LATER)))
async def test_a_planted_fault_is_found_and_its_cause_named(servers: Servers, case: Case) -> None:
    async with servers.agent(*FLAGS) as notebook:
        answer = await verified(notebook, case)
    said = found(answer)
    if case.cause == "hash_seed" and sys.version_info < (3, 11):
        # kernels cannot be started with the hash seed of another: the cause stays open
        assert (said["cause"], said["verdict"]) in (
            ("unknown", "differs"),
            ("hash_seed", "fragile"),
        )
        return
    assert said["cause"] == case.cause, answer.text
    assert said["verdict"] == (case.verdict or said["verdict"]), answer.text
    assert said["cell"] == (case.cell or said["cell"]), answer.text


@pytest.mark.parametrize("case", cases(CLEAN))
async def test_a_clean_session_is_reproduced(servers: Servers, case: Case) -> None:
    async with servers.agent(*FLAGS) as notebook:
        answer = await verified(notebook, case)
    assert found(answer)["verdict"] == "reproduced", answer.text
