"""How often the watchdog looks at kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import anyio
import pytest

from kernel_mcp.limits import manager
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.limits.manager import Watchdog

pytestmark = pytest.mark.anyio


class Seen:
    """A kernel between cells whose checks are counted."""

    session = "s"

    def __init__(
        self,
        *,
        crowded: bool = False,
        awake: bool = False,
        pressing: bool = False,
        at_rest: bool = True,
        computed: bool = True,
    ) -> None:
        self.crowded, self.awake, self.computed = crowded, awake, computed
        self._pressing, self._at_rest = pressing, at_rest
        self.weighed = self.looked = self.asked = 0

    def rank(self) -> None: ...

    def pressing(self, others: int) -> bool:
        return self._pressing

    def at_rest(self) -> bool:
        self.asked += 1
        return self._at_rest

    def memory_due(self, others: int) -> bool:
        return self.computed

    async def check_disk(self, others: int = 0) -> None:
        self.looked += 1

    async def check_memory(self) -> None:
        self.weighed += 1


async def watch_until(done: Callable[[], bool], *kernels: Seen) -> None:
    found = Watchdog()
    for kernel in kernels:
        found.watch(cast("KernelLimits", kernel))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(found.run)
        with anyio.fail_after(60):
            while not done():
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def test_processes_left_behind_are_weighed_more_often_than_a_kernel_at_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager, "TICK_S", 0.001)
    monkeypatch.setattr(manager, "CROWDED_S", 0.001)
    left, plain = Seen(crowded=True), Seen()
    await watch_until(lambda: left.weighed >= 3, left, plain)
    assert plain.weighed == 0


async def test_a_kernel_that_waits_for_a_look_is_not_checked_until_that_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager, "TICK_S", 0.001)
    waits, runs = Seen(awake=True), Seen(awake=True, pressing=True)
    await watch_until(lambda: runs.looked >= 9, waits, runs)
    assert (waits.looked, waits.weighed) == (0, 0)
    assert runs.weighed >= runs.looked


async def test_the_memory_of_a_kernel_that_has_not_computed_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager, "TICK_S", 0.001)
    monkeypatch.setattr(manager, "CROWDED_S", 0.001)
    waits = Seen(awake=True, pressing=True, computed=False)
    left = Seen(crowded=True, computed=False)
    await watch_until(lambda: waits.looked >= 9, waits, left)
    assert (waits.weighed, left.weighed) == (0, 0)


async def test_of_kernels_at_rest_only_those_are_checked_that_have_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager, "TICK_S", 0.001)
    monkeypatch.setattr(manager, "REST_S", 0.002)
    still, moved = Seen(), Seen(at_rest=False)
    await watch_until(lambda: moved.looked >= 3, still, moved)
    assert still.asked >= 3
    assert (still.looked, still.weighed) == (0, 0)


async def test_a_group_that_cannot_be_read_soon_keeps_no_running_kernel_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = threading.Event()

    class Slow(Seen):
        def at_rest(self) -> bool:
            begun.append(None)
            read.wait(60)
            return super().at_rest()

    monkeypatch.setattr(manager, "TICK_S", 0.001)
    monkeypatch.setattr(manager, "REST_S", 0.002)
    slow, runs = Slow(), Seen(awake=True, pressing=True)
    begun: list[None] = []
    answers = []

    def enough() -> bool:
        if begun and runs.looked >= 9:
            answers.append((slow.asked, len(begun)))
            read.set()
        return read.is_set()

    await watch_until(enough, slow, runs)
    assert answers == [(0, 1)]
