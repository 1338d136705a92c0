"""Every call that reaches the system is known, and none that fails takes a session along."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import pytest

from tests.faults.seams import HARMLESS, SEAMS, Call, all_calls

pytestmark = [pytest.mark.anyio]

FEWEST = 35
"""Calls that the actions of a client reach at least: 53 where nothing else runs. Fewer mean that
nothing is tried any more."""


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return all_calls()


def test_every_way_to_the_system_is_in_the_list(calls: list[Call]) -> None:
    unknown = [str(call) for call in calls if call.name not in SEAMS | HARMLESS]
    assert unknown == [], "name them in SEAMS of tests/faults/seams.py, so that they fail in drills"


def test_the_list_names_nothing_that_has_gone(calls: list[Call]) -> None:
    assert SEAMS - {call.name for call in calls} == set()


async def drilled(*flags: str) -> None:
    """Run a drill and judge its report."""
    ran = await anyio.run_process(
        [sys.executable, "-m", "tests.faults.drill", *flags],
        check=False,
        stderr=None,
        cwd=Path(__file__).parents[2],
    )
    report = json.loads(ran.stdout)
    assert report["problems"] == []
    assert report["injected"] > FEWEST


async def test_no_call_that_fails_costs_another_session_anything() -> None:
    await drilled()


@pytest.mark.full
@pytest.mark.timeout(7200)
async def test_no_call_that_fails_in_any_way_costs_another_session_anything() -> None:
    await drilled("--full")
