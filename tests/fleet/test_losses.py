"""Nodes that are lost: what is answered, what goes on elsewhere, and what runs no more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.fleet.handles import node_of
from kernel_mcp.fleet.members import LEASE_S, MARGIN_S
from tests.fleet.machines import Machines, Node, fronted, running, stopped
from tests.integration.agent import Answer
from tests.integration.calls_contract import Person

pytestmark = [pytest.mark.anyio]

LOSS = "The node that had this session was lost"
Lose = Callable[[Machines, Node], None]


def kill_node(_machines: Machines, node: Node) -> None:
    """The process that has the sessions."""
    os.kill(node.pid, signal.SIGKILL)


def kill_ray(machines: Machines, node: Node) -> None:
    """The process of Ray's that has started it, alone."""
    os.kill(machines.raylet(int(node.name[1:])), signal.SIGKILL)


def kill_all(machines: Machines, node: Node) -> None:
    """All at once, as of a machine that has lost its power."""
    number = int(node.name[1:])
    for pid in (node.command.pid, machines.raylet(number), node.pid, node.watchdog):
        os.kill(pid, signal.SIGKILL)


def kill_watchdog(_machines: Machines, node: Node) -> None:
    """Kill the watchdog that would end the node: the node may not go on without it."""
    os.kill(node.watchdog, signal.SIGKILL)


LOSSES: list[Lose] = [kill_node, kill_ray, kill_all, kill_watchdog]


async def opened_on(
    person: Person, machines: Machines, *, not_head: bool = True
) -> tuple[str, Node]:
    """A session that is not on the head, and its node."""
    while True:
        handle = await person.opened()
        name = node_of(handle)
        if name != "n2" or not not_head:
            return handle, machines.nodes[name]
        await person.call("close_session", session=handle)


async def saved(machines: Machines, handle: str, cell: int) -> None:
    """Wait until other nodes could go on with a session as it was after a cell."""
    from kernel_mcp.fleet.session_table import SessionTable
    from kernel_mcp.fleet.signed import Signed, key_of
    from kernel_mcp.fleet.storage import FolderStorage

    rows = SessionTable(
        Signed(FolderStorage(machines.root / "store"), key_of(machines.token)), "", ""
    )
    with anyio.fail_after(60):
        while True:
            known = await anyio.to_thread.run_sync(rows.find, handle)
            if known is not None and known.row.saved and known.row.saved["cell"] == cell:
                return
            await anyio.sleep(0.05)


async def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return await work(), time.monotonic() - began


@pytest.mark.parametrize("lose", LOSSES, ids=lambda each: each.__name__)
async def test_a_session_goes_on_elsewhere_as_it_was_saved_and_says_what_is_lost(
    lose: Lose, ray: Any, whole: Machines
) -> None:
    async with fronted(ray) as calls:
        ada = Person(calls)
        handle, node = await opened_on(ada, whole)
        await ada.run("x = 40; open('kept.txt', 'w').write('kept')", session=handle)
        await saved(whole, handle, 1)
        await ada.run("y = 2", session=handle)
        processes = node.all
        answers: list[tuple[Answer, float]] = []

        async def hang() -> None:
            code = "open('begun', 'w').close()\nwhile True: pass"
            answers.append(await timed(lambda: ada.call("execute", code=code, session=handle)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hang)
            begun = node.workspace(ada, handle) / "begun"
            with anyio.fail_after(60):
                while not begun.exists():
                    await anyio.sleep(0.01)
            lose(whole, node)
            lost_at = time.monotonic()
        (answer, _) = answers[0]
        answered_s = time.monotonic() - lost_at
        assert answer.failed
        assert f"Node {node.name} was lost" in answer.text
        assert answer.result.meta is not None
        assert answer.result.meta["kernel-mcp/lost"]["state_kept"] is False
        again = await ada.call("execute", code="x, 'y' in globals()", session=handle)
        back_s = time.monotonic() - lost_at
        assert "(40, False)" in again.text
        assert LOSS in again.text
        assert "nothing was run again" in again.text
        assert not running(processes)
        assert await ada.run("open('kept.txt').read()", session=handle) == "'kept'"
        assert "begun" not in await ada.run("import os; os.listdir('.')", session=handle)
        print(f"{lose.__name__}: answered after {answered_s:.2f} s, back after {back_s:.2f} s")
        await ada.call("close_session", session=handle)


async def test_a_session_of_which_nothing_was_saved_says_so(ray: Any, whole: Machines) -> None:
    async with fronted(ray) as calls:
        ada, ben = Person(calls), Person(calls, "ben")
        handle, node = await opened_on(ada, whole)
        await ada.call(
            "execute", code="import time; x = 1; time.sleep(600)", session=handle, wait=0.1
        )
        kill_node(whole, node)
        there = await ada.call("list_variables", session=handle)
        assert there.data["variables"] == []
        assert "before anything of it was saved" in there.text
        foreign = await ben.call("execute", code="x", session=handle)
        assert foreign.text.startswith("There is no session")


@pytest.mark.parametrize("with_watchdog", [False, True], ids=["node", "machine"])
async def test_nothing_of_a_silent_node_runs_once_others_go_on(
    ray: Any, whole: Machines, with_watchdog: bool
) -> None:
    async with fronted(ray) as calls:
        ada = Person(calls)
        handle, node = await opened_on(ada, whole)
        await ada.run("x = 1", session=handle)
        await saved(whole, handle, 1)
        code = "import time\nwhile True:\n    open('log', 'a').write('.\\n'); time.sleep(0.001)\n"
        await ada.call("execute", code=code, session=handle, wait=0.2)
        log = node.workspace(ada, handle) / "log"
        assert log.stat().st_size > 0
        raylet = whole.raylet(int(node.name[1:]))
        processes = node.all
        watchdog = node.watchdog
        still = [*processes, raylet, node.command.pid, *([watchdog] if with_watchdog else [])]
        with stopped(still):
            silent = log.stat().st_size
            answer, answered_s = await timed(partial(ada.call, "execute", code="1", session=handle))
            again, _ = await timed(partial(ada.call, "execute", code="x", session=handle))
            assert "1" in again.text.splitlines()
            assert log.exists() is False or log.stat().st_size == silent
            fd = os.open(log.parent, os.O_PATH) if log.exists() else -1
            print(f"silent: answered after {answered_s:.1f} s: {answer.text[:60]}")
            assert not running(processes)
        if fd >= 0:
            size = os.stat("log", dir_fd=fd).st_size if log.exists() else silent
            os.close(fd)
            assert size == silent
        assert "1" in await ada.run("x", session=handle)
        if with_watchdog:
            os.kill(raylet, signal.SIGKILL)
        await ada.call("close_session", session=handle)


async def test_the_death_of_the_registry_ends_no_node_and_no_call(
    ray: Any, whole: Machines
) -> None:
    async with fronted(ray) as calls:
        ada = Person(calls)
        handle, _ = await opened_on(ada, whole)
        await ada.run("x = 1", session=handle)
        pids = [each.pid for each in whole.nodes.values()]
        answers: list[Answer] = []

        async def run() -> None:
            code = "import time; time.sleep(3); x += 1; x"
            answers.append(await ada.call("execute", code=code, session=handle))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.sleep(0.5)
            (registry,) = whole.of_ray("ray::Registry")
            os.kill(registry, signal.SIGKILL)
        assert "2" in answers[0].text.splitlines()
        another = await ada.opened()
        assert "2" in await ada.run("1 + 1", session=another)
        assert registry not in whole.of_ray("ray::Registry")
        await anyio.sleep(LEASE_S + MARGIN_S)  # nobody's lease was lost with it
        assert running(pids) == pids
        assert "2" in (await ada.run("x", session=handle)).splitlines()
        for each in (handle, another):
            await ada.call("close_session", session=each)
