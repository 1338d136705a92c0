"""Figures of many sessions at a time: what one more costs, and whether all get their turn."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from time import perf_counter
from typing import TypeAlias

import anyio

from benchmarks import ours
from benchmarks.bench import Bench
from benchmarks.floor import FLOOR, floor
from benchmarks.notebooks import ONE, PANDAS, Notebook, Notebooks
from benchmarks.processes import children, descendants, load, meminfo_mib, pss_mib, settle
from benchmarks.results import BenchmarkError, Figure, attempt, timed
from benchmarks.sessions import DIRECT, STDIO, warm_call

BURST = Figure("burst", "Sessions asked for at once, each with a pandas cell → last result", FLOOR)
ROBIN = Figure(
    "robin", "Cells a second, all sessions busy", FLOOR, "cells/s", higher_is_better=True
)
BUSY = Figure("busy", "Cell `1` in each of many busy sessions", FLOOR)
SPREAD = Figure("spread", "Busiest session above the least busy", FLOOR, "%")
PANDAS_EACH = Figure("pandas-each", "Memory one session adds, pandas used", FLOOR, "MiB")
PANDAS_ALL = Figure("pandas-all", "Memory of everything ÷ sessions, pandas used", FLOOR, "MiB")
ALIVE_EACH = Figure("alive-each", "Memory one session adds, pandas loaded by none", FLOOR, "MiB")
ALIVE_ALL = Figure("alive-all", "Memory of everything ÷ sessions", FLOOR, "MiB")
ALIVE_IDLE = Figure("alive-idle", "Processor use while all are idle", FLOOR, "% of one")
ALIVE_WARM = Figure("alive-warm", "Cell `1` in one of them, median", FLOOR)

UNGROUPED = f"{STDIO}, no control groups"
AT_A_TIME = 8
"""Sessions that are opened together where it is not the opening that is measured."""
SPARES = 2
"""Kernels in reserve, as by default."""
STOCK_MIB = 110
"""Expected memory of a stock kernel with pandas, in MiB, to avoid starting more than fit."""


class Crowd:
    """Sessions of one system, and the processes they are made of."""

    def __init__(self, system: Notebooks, processes: Callable[[], set[int]]) -> None:
        self.system = system
        self.processes = processes
        self.opened: list[Notebook] = []

    async def grow(self, count: int, code: str, *, together: int = AT_A_TIME) -> None:
        """Open sessions until there are `count`, each of which has run `code`."""
        turns = anyio.Semaphore(together)

        async def add() -> None:
            async with turns:
                notebook = await self.system.open()
                self.opened.append(notebook)
                await notebook.run(code)

        async with anyio.create_task_group() as tasks:
            for _ in range(count - len(self.opened)):
                tasks.start_soon(add)

    async def clear(self) -> None:
        """Close all of them."""
        turns = anyio.Semaphore(AT_A_TIME)

        async def close(notebook: Notebook) -> None:
            async with turns:
                await notebook.close()

        async with anyio.create_task_group() as tasks:
            for notebook in self.opened:
                tasks.start_soon(close, notebook)
        self.opened.clear()


OpenCrowd: TypeAlias = Callable[[], AbstractAsyncContextManager[Crowd]]


def _systems(bench: Bench) -> dict[str, OpenCrowd]:
    """The systems: ours twice where it can have control groups, as most users have none."""

    @asynccontextmanager
    async def stock() -> AsyncIterator[Crowd]:
        before = children(os.getpid())
        async with floor(bench.folder()) as system:
            yield Crowd(system, lambda: _trees(children(os.getpid()) - before))

    @asynccontextmanager
    async def served(*, grouped: bool = True) -> AsyncIterator[Crowd]:
        async with ours.over_stdio(bench.folder(), grouped=grouped) as system:
            first = await system.open()
            await first.run(ONE)
            await first.close()
            await settle()
            yield Crowd(system, lambda: _trees({system.pid}))

    systems: dict[str, OpenCrowd] = {FLOOR: stock, STDIO: served}
    if os.geteuid() == 0:  # an ordinary user has no control groups in the first place
        systems[UNGROUPED] = partial(served, grouped=False)
    return systems


def _with_direct(bench: Bench) -> dict[str, OpenCrowd]:
    """The systems, and ours without the client and the server of the MCP SDK in between."""

    @asynccontextmanager
    async def direct() -> AsyncIterator[Crowd]:
        async with ours.in_process(bench.folder(), warm=SPARES) as system:
            await settle()
            yield Crowd(system, set)

    return {**_systems(bench), DIRECT: direct}


def _trees(roots: set[int]) -> set[int]:
    return roots.union(*(descendants(root) for root in roots))


async def burst(bench: Bench) -> None:
    """Many clients come at once."""
    for count, rounds in ((4, 1),) if bench.quick else ((16, 4), (100, 2)):
        for _ in range(rounds):
            for name, system in _with_direct(bench).items():
                async with system() as crowd:
                    measure = partial(_come_at_once, name, crowd, count)
                    await attempt(bench.results, BURST, name, measure, count)
                await settle()


async def _come_at_once(name: str, crowd: Crowd, count: int) -> float:
    await _afford(name, count)
    return await timed(partial(crowd.grow, count, PANDAS, together=count))


async def busy(bench: Bench) -> None:
    """How long one cell takes while others run theirs."""
    count, seconds = (4, 2.0) if bench.quick else (16, 5.0)
    for _ in range(bench.rounds(2, 1)):
        for name, system in _with_direct(bench).items():
            async with system() as crowd:
                await crowd.grow(count, ONE)
                await settle()
                took: list[float] = []
                await _race(crowd.opened, seconds, took)
                for each in took:
                    bench.results.add(BUSY, name, each, count)
            await settle()


async def robin(bench: Bench) -> None:
    """Every session runs one small cell after the other, all at the same time."""
    count, seconds = (8, 2.0) if bench.quick else (64, 8.0)
    for _ in range(bench.rounds(2, 1)):
        for name, system in _with_direct(bench).items():
            async with system() as crowd:
                done: list[int] = []

                async def measure(crowd: Crowd = crowd, done: list[int] = done) -> float:
                    await crowd.grow(count, ONE)
                    await settle()
                    done.extend(await _race(crowd.opened, seconds))
                    return sum(done) / seconds

                if await attempt(bench.results, ROBIN, name, measure, count):
                    spread = (max(done) / min(done) - 1) * 100
                    bench.results.add(SPREAD, name, spread, count)
            await settle()


async def _race(
    opened: Sequence[Notebook], seconds: float, took: list[float] | None = None
) -> list[int]:
    """How many cells each session runs in the time given, and what each `took` in milliseconds.

    Raises BenchmarkError.
    """
    done = [0] * len(opened)
    end = perf_counter() + seconds

    async def run(number: int) -> None:
        while True:
            began = perf_counter()
            await opened[number].run(ONE)
            now = perf_counter()
            if now > end:
                return
            done[number] += 1
            if took is not None:
                took.append((now - began) * 1000)

    async with anyio.create_task_group() as tasks:
        for number in range(len(opened)):
            tasks.start_soon(run, number)
    if not all(done):
        raise BenchmarkError(f"a session ran no cell in {seconds:g} s")
    return done


async def memory(bench: Bench) -> None:
    """Measure the memory of sessions that have used pandas, for growing numbers of them."""
    counts = (1, 4) if bench.quick else (1, 16, 64)
    for name, system in _systems(bench).items():
        async with system() as crowd:
            empty = pss_mib(crowd.processes())
            for count in counts:
                measure = partial(_added, name, crowd, empty, count, PANDAS)
                if not await attempt(bench.results, PANDAS_EACH, name, measure, count):
                    break
                taken = pss_mib(crowd.processes())
                bench.results.add(PANDAS_ALL, name, taken / count, count)


async def growth(bench: Bench) -> None:
    """Measure memory and load of idle sessions, for growing numbers of them."""
    counts = (1, 4) if bench.quick else (1, 4, 16, 64, 128, 256, 500)
    for name, system in _systems(bench).items():
        async with system() as crowd:
            empty = pss_mib(crowd.processes())
            for count in counts:
                measure = partial(_added, name, crowd, empty, count, ONE)
                if not await attempt(bench.results, ALIVE_EACH, name, measure, count):
                    break
                await _measure_alive(bench, name, crowd)


async def _added(name: str, crowd: Crowd, empty: float, count: int, code: str) -> float:
    """Open `count` sessions that have run `code`, and return what one adds to `empty`, in MiB."""
    await _afford(name, count - len(crowd.opened))
    await crowd.grow(count, code)
    await settle()
    return (pss_mib(crowd.processes()) - empty) / count


async def _measure_alive(bench: Bench, name: str, crowd: Crowd) -> None:
    results, count = bench.results, len(crowd.opened)
    idle = await load(crowd.processes(), 2.0 if bench.quick else 10.0)
    results.add(ALIVE_IDLE, name, idle * 100, count)
    results.add(ALIVE_ALL, name, pss_mib(crowd.processes()) / count, count)
    for notebook in crowd.opened:  # all of them have to answer
        if not await attempt(results, ALIVE_WARM, name, warm_call(notebook), count):
            return


async def _afford(name: str, more: int) -> None:
    """Raises BenchmarkError when so many more stock kernels would not fit into memory."""
    if name == FLOOR and more * STOCK_MIB > meminfo_mib("MemAvailable"):
        raise BenchmarkError(f"{more} more stock kernels do not fit into this machine's memory")
