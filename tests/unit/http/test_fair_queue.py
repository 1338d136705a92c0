"""One principal that calls all the time, beside others and alone."""

from __future__ import annotations

import pytest

from kernel_mcp.http.fair_queue import CALLS_S, LATELY_S, MOST_S, FairQueue, TokenBucket
from kernel_mcp.units import MIB
from tests.unit.fake_kernels import FakeClock

pytestmark = pytest.mark.anyio


class Made:
    """Turns by a clock that sleeping moves on."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.clock.now = 1000.0
        self.slept = 0.0
        self.turns = FairQueue(self.clock, self.sleep)
        self.taken = {name: TokenBucket() for name in ("greedy", "other")}

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.clock.now += seconds

    async def call(self, name: str, count: int = 1) -> float:
        """Seconds that so many calls of one had to wait."""
        before = self.slept
        for _ in range(count):
            assert not await self.turns.wait(name, self.taken[name])
        return self.slept - before


async def test_one_alone_waits_for_nobody() -> None:
    made = Made()
    assert await made.call("greedy", 1000) == 0


async def test_one_that_calls_all_the_time_is_slowed_down_while_others_call() -> None:
    made = Made()
    await made.call("greedy", 1000)
    assert await made.call("other") == 0
    assert await made.call("greedy", int(CALLS_S)) == 0
    assert await made.call("greedy", 100) == pytest.approx(100 / CALLS_S, abs=0.05)
    assert await made.call("other") == 0
    made.clock.now += LATELY_S + 1
    await made.call("greedy")
    made.clock.now += LATELY_S + 1
    assert await made.call("greedy", 1000) == 0


async def test_long_messages_count_and_one_that_owes_too_much_is_told_when_to_call() -> None:
    made = Made()
    await made.call("other")
    await made.call("greedy")
    for _ in range(4):
        made.taken["greedy"].read(4 * MIB)
    assert await made.call("greedy") == pytest.approx(1.0, abs=0.1)
    made.taken["greedy"].read(4000 * MIB)
    assert await made.turns.wait("greedy", made.taken["greedy"]) > MOST_S
    assert await made.call("other") == 0
