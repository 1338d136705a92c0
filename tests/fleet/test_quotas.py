"""Quotas of a principal are counted over all nodes and fronts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.fleet.handles import node_of
from kernel_mcp.fleet.members import RENEW_S
from kernel_mcp.units import GIB
from tests.fleet.machines import Machines, fronted
from tests.fleet.test_http import fronts
from tests.integration.calls_contract import PATIENCE_S, Person
from tests.integration.httpclient import wire
from tests.integration.httpserver import HttpServer
from tests.integration.principals import add

pytestmark = [pytest.mark.anyio]


async def states(person: Person) -> dict[str, str]:
    listed = (await person.call("list_sessions")).data["sessions"]
    return {str(each["session"]): str(each["state"]) for each in listed}


async def on_two_nodes(person: Person) -> list[str]:
    """Sessions, the first and the last of which are on different nodes."""
    handles = [await person.opened()]
    while node_of(handles[-1]) == node_of(handles[0]):
        handles.append(await person.opened())
    return handles


async def test_sessions_on_all_nodes_count_and_the_idlest_of_them_gives_way(
    ray: Any, whole: Machines
) -> None:
    async with fronted(ray) as one, fronted(ray) as two:
        ada, also = Person(one), Person(two)
        also.name = ada.name
        ada.quotas = also.quotas = Quotas(sessions=3)
        handles: list[str] = []
        while len(handles) < 4 or len({node_of(each) for each in handles}) < 2:
            person = (ada, also)[len(handles) % 2]
            handles.append(await person.opened())
            await person.run(f"x = {len(handles)}", session=handles[-1])
            found = await states(ada)
            assert sum(each != "hibernated" for each in found.values()) <= 3
            assert set(found) == set(handles)
            assert found[handles[-1]] != "hibernated"
        assert found[handles[0]] == "hibernated"
        assert (await ada.call("list_sessions")).data["limit"] == 3
        for number, handle in enumerate(handles, 1):  # each of which has another one give way
            assert str(number) in (await also.run("x", session=handle)).splitlines()
            found = await states(ada)
            assert sum(each != "hibernated" for each in found.values()) <= 3
        for handle in handles:
            await ada.call("close_session", session=handle)


async def test_sessions_asked_for_at_once_are_never_too_many(ray: Any, whole: Machines) -> None:
    async with fronted(ray) as calls:
        ada = Person(calls)
        ada.quotas = Quotas(sessions=4)
        refused: list[str] = []
        running: list[str] = []

        async def hold() -> None:
            person = Person(calls)
            person.name, person.quotas = ada.name, ada.quotas
            answer = await person.call("create_session")
            if not answer.failed:
                handle = str(answer.data["session"])
                code = "import time; time.sleep(60)"
                answer = await person.call("execute", code=code, session=handle, wait=0)
            if answer.failed:
                refused.append(answer.text)
            else:
                running.append(handle)

        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(hold)
        assert 1 <= len(running) <= 4
        assert len(refused) == 12 - len(running)
        assert all("quota `sessions`" in each for each in refused), refused
        found = await states(ada)
        assert sum(state != "hibernated" for state in found.values()) <= 4
        for handle in found:
            await ada.call("close_session", session=handle)


async def test_a_closed_session_counts_no_more_wherever_the_next_one_is(
    ray: Any, whole: Machines
) -> None:
    async with fronted(ray) as calls:
        ada = Person(calls)
        ada.quotas = Quotas(sessions=2)
        kept = await ada.opened()
        await ada.run("x = 1", session=kept)
        for _ in range(6):
            await ada.call("close_session", session=await ada.opened())
        assert (await states(ada))[kept] != "hibernated"
        await ada.call("close_session", session=kept)


async def test_memory_on_all_nodes_counts_and_the_largest_kernel_ends(
    ray: Any, whole: Machines
) -> None:
    async with fronted(ray) as calls:
        ada = Person(calls)
        ada.quotas = Quotas(memory=GIB)
        handles = await on_two_nodes(ada)
        small, large = handles[0], handles[-1]
        await ada.run("a = bytearray(300 * 2**20)", session=small)
        with anyio.fail_after(PATIENCE_S):
            await anyio.sleep(2 * RENEW_S)
            code = "b = bytearray(800 * 2**20)\nimport time\nwhile True: time.sleep(0.1)"
            ended = await ada.call("execute", code=code, session=large)
        assert ended.failed
        assert "your quota `memory`" in ended.text
        assert str(300 * 2**20) in await ada.run("len(a)", session=small)
        for handle in handles:
            await ada.call("close_session", session=handle)


async def test_of_two_kernels_that_grow_at_once_on_two_nodes_one_ends(
    ray: Any, whole: Machines
) -> None:
    async with fronted(ray) as calls:
        ada = Person(calls)
        ada.quotas = Quotas(memory=GIB)
        handles = await on_two_nodes(ada)
        code = (
            "import time\n"
            "parts = []\n"
            "for _ in range(70):\n"
            "    parts.append(bytearray(10 * 2**20)); time.sleep(0.08)\n"
            f"time.sleep({2 * RENEW_S})\n"
        )
        ended: list[str] = []

        async def grow(handle: str) -> None:
            answer = await ada.call("execute", code=code, session=handle)
            if answer.failed:
                assert "your quota `memory`" in answer.text
                ended.append(handle)

        async with anyio.create_task_group() as tasks:
            for handle in (handles[0], handles[-1]):
                tasks.start_soon(grow, handle)
        assert len(ended) == 1
        for handle in handles:
            await ada.call("close_session", session=handle)


async def test_the_rate_of_a_principal_is_that_of_all_fronts(
    whole: Machines, tmp_path: Path
) -> None:
    rate = 4.0
    token = add(tmp_path / "tokens", "ada", "--quota", f"rate={rate:g}")
    answered = 0
    with fronts(whole, tmp_path / "tokens") as (one, two):
        began = anyio.current_time()

        async def ask(server: HttpServer) -> None:
            nonlocal answered
            async with wire(server, token) as client:
                while anyio.current_time() < began + 10:
                    said = await client.call("list_sessions")
                    assert said.status in (200, 429)
                    answered += said.status == 200

        async with anyio.create_task_group() as tasks:
            for server in (one, two) * 4:
                tasks.start_soon(ask, server)
        took_s = anyio.current_time() - began
    assert rate < answered / took_s < 1.6 * rate  # each alone has `rate`, and as many at once
