"""How often the watchdog looks at kernels."""

from __future__ import annotations

from typing import cast

import anyio
import pytest

from kernel_mcp.limits import manager
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.limits.manager import Watchdog

pytestmark = pytest.mark.anyio


class Resting:
    """A kernel between cells that has left processes behind, or has not."""

    session = "s"
    awake = False

    def __init__(self, *, crowded: bool) -> None:
        self.crowded = crowded
        self.weighed = 0
        self.seen = anyio.Event()

    def rank(self) -> None: ...

    async def check_disk(self, others: int = 0) -> None: ...

    async def check_memory(self) -> None:
        self.weighed += 1
        if self.weighed == 3:
            self.seen.set()


async def test_processes_left_behind_are_weighed_more_often_than_a_kernel_at_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager, "TICK_S", 0.001)
    monkeypatch.setattr(manager, "CROWDED_S", 0.001)
    left, plain = Resting(crowded=True), Resting(crowded=False)
    found = Watchdog()
    for kernel in (left, plain):
        found.watch(cast("KernelLimits", kernel))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(found.run)
        with anyio.fail_after(60):
            await left.seen.wait()
        tasks.cancel_scope.cancel()
    assert plain.weighed == 0
