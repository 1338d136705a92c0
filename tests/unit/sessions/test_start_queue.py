"""The order in which cells of many busy sessions begin."""

from __future__ import annotations

import anyio
import pytest

from kernel_mcp.sessions.start_queue import CellStartQueue

pytestmark = pytest.mark.anyio
FOR_EVER = 3600.0


async def test_none_of_many_gets_far_ahead_of_another() -> None:
    start_queue, begun, at_once, most = CellStartQueue(2, FOR_EVER), [0] * 20, 0, 0

    async def busy(number: int) -> None:
        nonlocal at_once, most
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
            async with start_queue.slot():
                begun[number] += 1
                at_once += 1
                most = max(most, at_once)
                assert max(begun) - min(begun) <= 2
                for _ in range(1 + number % 3):  # some cells take longer
                    await anyio.lowlevel.checkpoint()
                at_once -= 1

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(busy, number)
    assert begun == [10] * 20
    assert most == 2


async def test_a_cell_that_goes_on_holds_up_no_other() -> None:
    start_queue, end, begun = CellStartQueue(1, 0.0), anyio.Event(), 0

    async def long() -> None:
        nonlocal begun
        async with start_queue.slot():
            begun += 1
            await end.wait()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(long)
            while begun < 5:
                await anyio.lowlevel.checkpoint()
            end.set()
    await only_one(start_queue)


async def test_who_stops_waiting_takes_no_turn_away() -> None:
    start_queue = CellStartQueue(1, FOR_EVER)
    for moment in ("while it waits", "as its turn has come"):
        async with anyio.create_task_group() as tasks:
            async with start_queue.slot():
                tasks.start_soon(wait_for, start_queue)
                await anyio.wait_all_tasks_blocked()
                if moment == "while it waits":
                    tasks.cancel_scope.cancel()
                    await anyio.lowlevel.cancel_shielded_checkpoint()
            tasks.cancel_scope.cancel()
        await only_one(start_queue)


async def test_a_cell_that_fails_gives_its_turn_back() -> None:
    start_queue = CellStartQueue(1, FOR_EVER)
    for _ in range(3):
        with pytest.raises(ValueError, match="x"):
            async with start_queue.slot():
                raise ValueError("x")
    await only_one(start_queue)


async def wait_for(start_queue: CellStartQueue) -> None:
    async with start_queue.slot():
        await anyio.sleep_forever()


async def only_one(start_queue: CellStartQueue) -> None:
    """There is one turn, neither lost nor given twice."""
    second = anyio.Event()

    async def another() -> None:
        async with start_queue.slot():
            second.set()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            async with start_queue.slot():
                tasks.start_soon(another)
                await anyio.wait_all_tasks_blocked()
                assert not second.is_set()
            await second.wait()
