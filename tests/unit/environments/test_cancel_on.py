"""Work that something else may end."""

from __future__ import annotations

import anyio
import pytest

from kernel_mcp.environments.workshop import cancel_on

pytestmark = pytest.mark.anyio


async def five() -> int:
    await anyio.lowlevel.checkpoint()
    return 5


async def test_work_that_ends_first_gives_its_result() -> None:
    assert await cancel_on(anyio.sleep_forever, five) == 5


async def test_an_event_that_comes_first_ends_the_work() -> None:
    ended = anyio.Event()

    async def work() -> int:
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()
        return 5

    with anyio.fail_after(60):
        assert await cancel_on(five, work) is None
    assert ended.is_set()


async def test_an_error_of_the_work_comes_out_as_it_is() -> None:
    async def work() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await cancel_on(anyio.sleep_forever, work)


async def test_cancelling_the_whole_cancels_the_work() -> None:
    with anyio.move_on_after(0.01) as scope:
        await cancel_on(anyio.sleep_forever, anyio.sleep_forever)
    assert scope.cancelled_caught
