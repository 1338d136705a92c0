"""The pair that waits for the next kernel: when there is one, what it holds, how it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from tests.integration.processes import named, running
from tests.integration.template.bench import (
    ENVIRONMENT,
    Bench,
    bench,
    holds_for_an_ordinary_user,
    is_forked,
    run,
)

pytestmark = pytest.mark.anyio

PAIR = ("kernel-sandbox", "kernel-next")
"""The names of the init and of the process that waits for the request of a kernel."""


def waiting(name: str) -> list[int]:
    return named(name, below=os.getpid())


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not holds():
            await anyio.lowlevel.checkpoint()


async def pair() -> tuple[int, int]:
    """The two that wait, once they do."""
    await until(lambda: all(len(waiting(name)) == 1 for name in PAIR))
    init, kernel = (waiting(name)[0] for name in PAIR)
    return init, kernel


async def test_a_kernel_that_was_waited_for_has_the_next_one_wait() -> None:
    async with bench() as b:
        await until(lambda: not any(map(waiting, PAIR)))  # those of the trial end
        await run(await b.forked(), "x = 1")
        for _ in range(2):
            init, process = await pair()
            kernel = await b.forked()
            assert kernel.handle.process.pids == [init, process]
            assert await run(kernel, "import os; print('x' in dir(), os.getpid())") == "False 2\n"


async def test_a_kernel_that_came_early_has_the_next_one_wait_once_all_is_loaded() -> None:
    async with bench(ready=False) as b:
        b.launcher.prepare(ENVIRONMENT, ("statistics",))
        kernel = await b.forked()
        with anyio.fail_after(60):
            assert await b.launcher.ready(ENVIRONMENT)
        await pair()
        assert await run(kernel, "print(1)") == "1\n"


async def test_behind_a_spare_nothing_waits() -> None:
    async with bench() as b:
        await run(await b.forked(), "1")
        await pair()
        for _ in range(2):
            await run(await b.forked(spare=True), "1")
            await until(lambda: not any(map(waiting, PAIR)))


@pytest.mark.parametrize("name", PAIR)
async def test_a_pair_that_is_killed_costs_nobody_a_kernel(name: str) -> None:
    async with bench() as b:
        first = await b.forked()
        await run(first, "x = 1")
        init, process = await pair()
        os.kill(waiting(name)[0], signal.SIGKILL)
        second = await b.kernel(spare=True)  # at once, before or after the end is noticed
        assert await run(second, "print(1)") == "1\n"
        await until(lambda: not running(init) and not running(process))
        assert await run(first, "print(x)") == "1\n"
        await run(await b.forked(), "1")
        await pair()


@pytest.mark.parametrize("name", PAIR)
async def test_a_stopped_pair_does_not_end_the_template(name: str) -> None:
    async with bench() as b:
        await run(await b.forked(), "1")
        await pair()
        stopped = waiting(name)[0]
        os.kill(stopped, signal.SIGSTOP)
        async with anyio.create_task_group() as tasks:
            made: list[bool] = []

            async def launch() -> None:
                kernel = await b.kernel(spare=True)
                made.append(await run(kernel, "print(1)") == "1\n")

            tasks.start_soon(launch)
            # the other of the two has its request, and is called otherwise
            await until(lambda: not all(map(waiting, PAIR)))
            assert not made
            os.kill(stopped, signal.SIGCONT)
        assert made == [True]
        assert is_forked(await b.kernel(spare=True))


async def test_it_holds_nothing_of_the_template() -> None:
    async with bench() as b:
        await run(await b.forked(), "1")
        for pid in await pair():
            kinds = sorted(
                str(entry.readlink()).partition(":")[0]
                for entry in Path(f"/proc/{pid}/fd").iterdir()
                if int(entry.name) > 2
            )
            # a link to the init, the pipe between the two; the process also has the init itself
            expected = ["pipe", "socket"]
            if pid == waiting("kernel-next")[0]:
                expected = ["/dev/null", "/dev/null", "anon_inode", *expected]
            assert kinds == expected, kinds


async def test_a_template_that_forks_no_more_has_nothing_wait() -> None:
    async with bench() as b:
        old = await b.forked()
        await run(old, "x = 1")
        await pair()
        b.launcher.prepare(ENVIRONMENT, ("statistics",))
        await until(lambda: not any(map(waiting, PAIR)))
        assert await run(old, "print(x)") == "1\n"
        with anyio.fail_after(60):
            assert await b.launcher.ready(ENVIRONMENT)
        await run(await b.forked(), "1")
        await pair()


async def crowd(b: Bench, count: int) -> set[int]:
    pids: set[int] = set()

    async def one() -> None:
        kernel = await b.forked()
        assert await run(kernel, "print(1)") == "1\n"
        pids.update(kernel.handle.process.pids)

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(one)
    return pids


async def test_of_a_crowd_one_takes_the_pair_and_all_have_their_own() -> None:
    async with bench() as b:
        await run(await b.forked(), "1")
        there = await pair()
        pids = await crowd(b, 10)
        assert len(pids) == 20
        assert pids.issuperset(there)
        await pair()


async def test_a_launch_that_is_cancelled_takes_the_pair_with_it() -> None:
    async with bench() as b:
        await run(await b.forked(), "1")
        init, process = await pair()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(b.launcher.launch, b.request(spare=True))
            await until(lambda: not any(map(waiting, PAIR)))
            tasks.cancel_scope.cancel()
        await until(lambda: not running(init) and not running(process))
        assert await run(await b.forked(spare=True), "print(1)") == "1\n"


def test_all_of_it_holds_for_an_ordinary_user() -> None:
    holds_for_an_ordinary_user(__file__)
