"""Two hundred sessions on three nodes, one of which dies: each variable is right, or told lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest

from kernel_mcp.fleet.front import FleetCalls
from kernel_mcp.fleet.handles import node_of
from tests.fleet.machines import Machines, fronted
from tests.integration.agent import Answer
from tests.integration.calls_contract import Person

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

PEOPLE, EACH = 10, 20
AT_ONCE = 6
TOLD = "The node that had this session was lost"


async def everywhere(work: Any, of: list[Any]) -> None:
    """Do something for each, some at a time."""
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def one(each: Any) -> None:
        async with limiter:
            await work(each)

    async with anyio.create_task_group() as tasks:
        for each in of:
            tasks.start_soon(one, each)


async def test_every_variable_is_as_a_model_outside_has_it_or_told(
    ray: Any, whole: Machines
) -> None:
    async with fronted(ray) as calls:
        model: dict[str, tuple[str, int]] = {}

        def person(name: str) -> Person:
            made = Person(calls)
            made.name = name
            return made

        names = [Person(calls, "many").name for _ in range(PEOPLE)]

        async def begin(name: str) -> None:
            ada = person(name)
            handle = await ada.opened()
            await ada.run(f"v = {len(model)}", session=handle)
            model[handle] = (name, int((await ada.run("v", session=handle)).splitlines()[-1]))

        await everywhere(begin, names * EACH)
        counts = {name: sum(node_of(each) == name for each in model) for name in whole.nodes}
        assert sum(counts.values()) == PEOPLE * EACH
        assert min(counts.values()) > 0

        async def change(handle: str) -> None:
            name, value = model[handle]
            await person(name).run("v += 1000", session=handle)
            model[handle] = (name, value + 1000)

        await everywhere(change, [each for number, each in enumerate(model) if number % 2])
        os.kill(whole.nodes["n3"].pid, signal.SIGKILL)
        outcomes = {"right": 0, "told": 0}

        async def look(handle: str) -> None:
            name, value = model[handle]
            answer = await asked(calls, person(name), handle)
            first = answer.text.splitlines()[0]
            if first == str(value):
                outcomes["right"] += 1
            else:
                assert node_of(handle) == "n3", (handle, answer.text)
                assert TOLD in answer.text, (handle, answer.text)
                outcomes["told"] += 1

        await everywhere(look, list(model))
        print(f"many: {counts}, {outcomes}")
        assert sum(outcomes.values()) == PEOPLE * EACH

        async def close(handle: str) -> None:
            await person(model[handle][0]).call("close_session", session=handle)

        await everywhere(close, list(model))


async def asked(calls: FleetCalls, person: Person, handle: str) -> Answer:
    """Return the state of a session; a call that meets a node's end is repeated."""
    code = "v if 'v' in globals() else None"
    answer = await person.call("execute", code=code, session=handle)
    if "was lost while it answered" in answer.text:
        answer = await person.call("execute", code=code, session=handle)
    return answer
