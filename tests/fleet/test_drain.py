"""Nodes that are given up in order: their sessions move, and no call is lost."""

from __future__ import annotations

import signal
from typing import Any

import anyio
import pytest

from kernel_mcp.fleet.handles import node_of
from tests.fleet.machines import PATIENCE_S, Machines, fronted
from tests.integration.calls_contract import Person

pytestmark = [pytest.mark.anyio]

SESSIONS = 6


async def test_a_drain_under_load_loses_no_call_and_no_variable(ray: Any, whole: Machines) -> None:
    async with fronted(ray) as calls:
        ada = Person(calls)
        handles = [await ada.opened() for _ in range(SESSIONS)]
        while not any(node_of(each) == "n3" for each in handles):
            handles.append(await ada.opened())
        for handle in handles:
            await ada.run("count = 0", session=handle)
        done = dict.fromkeys(handles, 0)
        over = anyio.Event()

        async def work(handle: str) -> None:
            person = Person(calls)
            person.name = ada.name
            while not over.is_set():
                await person.run("count += 1", session=handle)
                done[handle] += 1

        async with anyio.create_task_group() as tasks:
            for handle in handles:
                tasks.start_soon(work, handle)
            await anyio.sleep(0.5)
            words = ["fleet", "drain", "n3", "--fleet", whole.address, "--within", "60s"]
            drained = await anyio.to_thread.run_sync(lambda: whole.run(*words))
            assert drained.returncode == 0, drained.stderr
            assert "n3 has no sessions left" in drained.stdout
            before = dict(done)
            with anyio.fail_after(PATIENCE_S):
                while any(done[each] < before[each] + 3 for each in handles):
                    await anyio.sleep(0.05)
            over.set()
        for handle in handles:
            assert str(done[handle]) in (await ada.run("count", session=handle)).splitlines()
        found = whole.run("fleet", "status", "--fleet", whole.address).stdout
        (row,) = (line for line in found.splitlines() if line.startswith("n3 "))
        assert "draining, 0 of 100 sessions" in row
        undone = whole.run("fleet", "drain", "n3", "--undo", "--fleet", whole.address)
        assert undone.stdout == "n3 takes sessions\n"
        for handle in handles:
            await ada.call("close_session", session=handle)


async def test_a_node_that_is_told_to_end_gives_its_sessions_away_first(
    ray: Any, whole: Machines
) -> None:
    async with fronted(ray) as calls:
        ada = Person(calls)
        handle = await ada.opened()
        while node_of(handle) != "n4":
            handle = await ada.opened()
        await ada.run("x = 1; open('a.txt', 'w').write('a')", session=handle)
        node = whole.nodes["n4"]
        node.command.send_signal(signal.SIGTERM)
        code = await anyio.to_thread.run_sync(node.command.wait)
        assert code == 0
        text = await ada.run("x, open('a.txt').read()", session=handle)
        assert "(1, 'a')" in text
        assert "lost" not in text
        await ada.call("close_session", session=handle)


def test_a_node_that_is_not_there_cannot_be_drained(whole: Machines) -> None:
    done = whole.run("fleet", "drain", "n9", "--fleet", whole.address)
    assert done.returncode == 1
    assert "there is no node 'n9'; there are n2, n3, n4" in done.stderr
