"""The contract of calls on sessions, kept by the nodes of a fleet."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fleet.machines import Machines, fronted
from tests.integration.calls_contract import CONTRACT, Clause

pytestmark = [pytest.mark.anyio]


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda each: each.__name__)
async def test_sessions_of_a_fleet(clause: Clause, ray: Any, whole: Machines) -> None:
    async with fronted(ray) as calls:
        await clause(calls)
