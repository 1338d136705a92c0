"""The task that compares kernels with their limits while they do something."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.limits.kernel import KernelLimits

TICK_S = 0.25
"""How often a kernel is checked that runs code or has just done so."""
REST_S = 5.0
"""How often others are, to notice threads and processes that go on between cells."""
CROWDED_S = 0.75
"""How often, a tick later, the memory of others is weighed that have left processes behind."""


class Watchdog:
    """Checks the kernels that have run code at least once; the others cost nothing."""

    def __init__(self) -> None:
        self._kernels: set[KernelLimits] = set()
        self._woken = anyio.Event()

    def watch(self, kernel: KernelLimits) -> None:
        """Check a kernel from here on."""
        self._kernels.add(kernel)
        self._woken.set()

    def forget(self, kernel: KernelLimits) -> None:
        """Stop checking a kernel that has ended."""
        self._kernels.discard(kernel)

    async def run(self) -> None:
        """Check kernels for ever; has to be run as a task."""
        rest = weighed = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            while True:
                soonest = rest + REST_S
                if any(kernel.crowded for kernel in self._kernels):
                    soonest = min(soonest, weighed + CROWDED_S)
                await self._pause(soonest - anyio.current_time())
                now = anyio.current_time()
                if everyone := now >= rest + REST_S:
                    rest = now
                if crowded := now >= weighed + CROWDED_S:
                    weighed = now
                for kernel in list(self._kernels):
                    if kernel.awake or everyone:
                        with Barrier("ranking a kernel", kernel.session):
                            kernel.rank()
                        tasks.start_soon(_guarded, kernel, kernel.check_memory)
                        tasks.start_soon(_guarded, kernel, kernel.check_disk)
                    elif crowded and kernel.crowded:
                        tasks.start_soon(_guarded, kernel, kernel.check_memory)

    async def _pause(self, longest_s: float) -> None:
        """Wait for one tick, and before that until there is something to check."""
        if not any(kernel.awake for kernel in self._kernels):
            self._woken = anyio.Event()
            with anyio.move_on_after(max(longest_s, 0) if self._kernels else math.inf):
                await self._woken.wait()
        await anyio.sleep(TICK_S)


async def _guarded(kernel: KernelLimits, check: Callable[[], Awaitable[None]]) -> None:
    """Let one check that fails be the end of itself only."""
    with Barrier("comparing a kernel with its limits", kernel.session):
        await check()
