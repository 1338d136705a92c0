"""When a checkpoint is made, and which one a session goes back to."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kernel_mcp.errors import LaunchError, Uncopyable
from kernel_mcp.sessions import checkpoints
from kernel_mcp.sessions.checkpoints import (
    CROWD,
    IDLE_S,
    PACE_S,
    PAUSE_S,
    PROCESSORS,
    RESTING,
    SMALL,
    Checkpoints,
    IdleCheckpoints,
    most_idle,
)
from kernel_mcp.sessions.losses import Rollback, cells_in_words

pytestmark = [pytest.mark.anyio]

GIB = 1 << 30


class Copy:
    """One that waits."""

    def __init__(self, pid: int) -> None:
        self.pid, self.usable, self.users = pid, True, 1


class Copied:
    """A kernel that can be copied; a copy holds `own` bytes alone."""

    def __init__(self) -> None:
        self.exit = None
        self.made: list[Any] = []
        self.dropped: list[Any] = []
        self.failure: LaunchError | None = None
        self.fork_s = 0.004
        self.handle = SimpleNamespace(
            pid=1, sandbox_group=SimpleNamespace(drop=self.dropped.append)
        )

    async def checkpoint(self) -> tuple[Any, float]:
        if self.failure is not None:
            raise self.failure
        self.made.append(Copy(len(self.made) + 1))
        return self.made[-1], self.fork_s


class SlowlyCopied(Copied):
    """One whose copy is there once it is `parked`."""

    def __init__(self) -> None:
        super().__init__()
        self.parked = anyio.Event()

    async def checkpoint(self) -> tuple[Any, float]:
        await self.parked.wait()
        return await super().checkpoint()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes that a copy has alone, of a gigabyte."""
    found: dict[int, int] = {}
    monkeypatch.setattr(checkpoints, "_memory", lambda pid: (found.get(pid, 0), GIB))
    return found


def made(mode: str = "auto") -> tuple[Checkpoints, Any, list[str]]:
    told: list[str] = []
    return Checkpoints(mode, lambda: 0.0, told.append), Copied(), told


async def test_quick_cells_get_none_until_they_are_a_second_of_work(own: dict[int, int]) -> None:
    policy, kernel, _ = made()
    for _ in range(9):
        policy.worked(0.1)
        await policy.after(kernel, 1)
    assert kernel.made == []
    policy.worked(0.2)
    await policy.after(kernel, 10)
    assert len(kernel.made) == 1
    assert policy.state_of(policy.newest) == 10  # type: ignore[arg-type]


async def test_what_is_copied_afterwards_counts_as_cost(own: dict[int, int]) -> None:
    policy, kernel, _ = made()
    policy.worked(2)
    await policy.after(kernel, 1)
    own[1] = 512 << 20  # 131,072 pages: 0.39 s
    policy.worked(7)
    await policy.after(kernel, 2)
    await policy.pause(kernel, 2)
    assert len(kernel.made) == 1
    policy.worked(2)
    await policy.after(kernel, 3)
    assert len(kernel.made) == 2


async def test_a_pause_is_used_once_and_a_long_one_gives_all_up(own: dict[int, int]) -> None:
    policy, kernel, _ = made()
    assert policy.pause_s(kernel) is None
    policy.worked(0.001)
    assert policy.pause_s(kernel) == PAUSE_S
    await policy.pause(kernel, 1)
    assert len(kernel.made) == 1
    assert policy.pause_s(kernel) == IDLE_S
    await policy.pause(kernel, 1)
    assert len(kernel.dropped) == 1
    assert policy.newest is None


async def test_the_last_three_are_kept_while_they_share(own: dict[int, int]) -> None:
    policy, kernel, _ = made()
    for cell in range(1, 5):
        policy.worked(0.1)
        await policy.take(kernel, cell)
    assert [policy.state_of(each) for each in policy._as_of] == [2, 3, 4]
    own[3] = GIB // 2
    policy.worked(0.1)
    await policy.take(kernel, 5)
    assert [policy.state_of(each) for each in policy._as_of] == [4, 5]
    found = policy.at(4)
    assert found is not None
    policy.back_at(kernel, found)
    assert [policy.state_of(each) for each in policy._as_of] == [4]
    assert policy.at(3) is None


async def test_in_a_hurry_the_last_three_are_kept_unseen(own: dict[int, int]) -> None:
    policy, kernel, _ = made()
    for cell in range(1, 6):
        own[cell] = GIB
        policy.worked(0.1)
        await policy.take(kernel, cell, asked=True, hurry=True)
        assert len(policy._as_of) <= checkpoints.MOST
    assert [policy.state_of(each) for each in policy._as_of] == [3, 4, 5]
    policy.worked(0.1)
    await policy.take(kernel, 6)
    assert [policy.state_of(each) for each in policy._as_of] == [6]


async def test_what_is_saved_besides_is_not_called_lost(own: dict[int, int]) -> None:
    told: list[str] = []
    policy: Checkpoints = Checkpoints("auto", lambda: 0.0, told.append, lambda: True)
    kernel: Any = Copied()
    kernel.failure = Uncopyable(("torch",))
    policy.worked(2.0)
    await policy.after(kernel, 1)
    assert "goes back to the last save" in told[0]
    assert "lost" not in told[0]


async def test_what_is_in_the_way_is_told_once_by_name(own: dict[int, int]) -> None:
    policy, kernel, told = made()
    kernel.failure = Uncopyable(("torch", "the thread 'x'"))
    for cell in range(3):
        policy.worked(2)
        await policy.after(kernel, cell)
    assert len(told) == 1
    assert "torch, the thread 'x'" in told[0]
    assert "all variables are lost" in told[0]
    with pytest.raises(Uncopyable):
        await policy.asked(kernel, 3)
    assert len(told) == 1


async def test_a_kernel_that_does_not_answer_is_asked_no_more(own: dict[int, int]) -> None:
    policy, kernel, told = made()
    kernel.failure = LaunchError("the kernel has not answered")
    policy.worked(2)
    await policy.after(kernel, 1)
    kernel.failure = None
    policy.worked(2)
    await policy.after(kernel, 2)
    assert kernel.made == told == []
    await policy.asked(kernel, 2)
    assert len(kernel.made) == 1


async def test_off_makes_none_but_on_request(own: dict[int, int]) -> None:
    policy, kernel, _ = made("off")
    policy.worked(100)
    await policy.after(kernel, 1)
    assert policy.pause_s(kernel) is None
    assert kernel.made == []


def test_cells_are_named_in_runs() -> None:
    assert cells_in_words([3]) == "cell 3"
    assert cells_in_words([1, 2, 3, 5, 8, 9]) == "cells 1–3, 5, 8–9"  # noqa: RUF001


def test_a_return_says_what_stands_and_what_to_run_again() -> None:
    text = Rollback(12, (13,), ("x",)).words(14)
    assert "as after cell 12; run cells 13–14 again" in text  # noqa: RUF001
    assert "Gone with that: x." in text
    assert Rollback(3, (), ()).loss("it died") is None


async def rest(policy: Checkpoints, kernel: Any, cell: int = 1) -> None:
    policy.worked(0.1)
    await policy.pause(kernel, cell)


async def test_of_many_that_rest_those_used_last_keep_their_copies(own: dict[int, int]) -> None:
    idle_checkpoints = IdleCheckpoints(lambda: 2)
    policies = [
        Checkpoints("auto", lambda: 0.0, print, idle_checkpoints=idle_checkpoints) for _ in range(3)
    ]
    kernels: list[Any] = [Copied() for _ in policies]
    for policy, kernel in zip(policies, kernels, strict=True):
        await rest(policy, kernel)
    assert [each.newest is not None for each in policies] == [False, True, True]
    first, second, _ = policies
    assert first.owed
    await first.ahead(kernels[0], 1)
    assert first.newest is not None
    assert not first.owed
    second.stir()  # it is used
    await rest(first, kernels[0], 2)
    await rest(Checkpoints("auto", lambda: 0.0, print, idle_checkpoints=idle_checkpoints), Copied())
    assert [each.newest is not None for each in policies] == [True, True, False]


def test_more_of_them_keep_copies_where_there_is_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> int:
        raise OSError

    for free, most in ((0, RESTING), (2**30, 4), (2**34, 64)):
        monkeypatch.setattr(checkpoints, "available_memory", lambda free=free: free)
        assert most_idle() == most
    monkeypatch.setattr(checkpoints, "available_memory", fails)
    assert most_idle() == RESTING


async def test_while_cells_wait_for_processors_no_copy_takes_them(own: dict[int, int]) -> None:
    busy = CROWD + 1.0
    idle_checkpoints = IdleCheckpoints(busy=lambda: busy)
    policy = Checkpoints("auto", lambda: 0.0, print, idle_checkpoints=idle_checkpoints)
    kernel: Any = Copied()
    await rest(policy, kernel)
    assert not kernel.made
    assert policy.pause_s(kernel) == PAUSE_S  # the next pause is looked at again
    busy = float(CROWD)
    await policy.pause(kernel, 1)
    assert len(kernel.made) == 1
    await policy.pause(kernel, 1)
    assert policy.owed
    busy = CROWD + 1.0
    assert not policy.owed


async def test_of_many_cells_that_begin_together_few_wait_for_a_copy(own: dict[int, int]) -> None:
    begun, many = 0, (CROWD + 2) * PROCESSORS
    idle_checkpoints = IdleCheckpoints(lambda: 0, busy=lambda: begun / PROCESSORS)
    policies = [
        Checkpoints("auto", lambda: 0.0, print, idle_checkpoints=idle_checkpoints)
        for _ in range(many)
    ]
    kernels: list[Any] = [SlowlyCopied() for _ in policies]
    for policy, kernel in zip(policies, kernels, strict=True):
        kernel.parked.set()
        await rest(policy, kernel)
        kernel.parked = anyio.Event()
    assert not any(kernel.made for kernel in kernels)
    waited: list[Any] = []

    async def run(policy: Checkpoints, kernel: Any) -> None:
        nonlocal begun
        begun += 1
        policy.stir()
        if policy.owed:
            await policy.pay(kernel, 1)
        waited.append(kernel)

    async with anyio.create_task_group() as tasks:
        for number, (policy, kernel) in enumerate(zip(policies, kernels, strict=True), 1):
            tasks.start_soon(run, policy, kernel)
            if number == PROCESSORS + 3:
                await anyio.wait_all_tasks_blocked()
                assert not waited
        await anyio.wait_all_tasks_blocked()
        assert len(waited) == len(kernels) - PROCESSORS  # while the copies are being made
        for kernel in kernels:
            kernel.parked.set()
    assert sum(len(kernel.made) for kernel in kernels) == PROCESSORS
    begun = 0
    assert policies[-1].owed
    await policies[-1].pay(kernels[-1], 1)
    assert policies[-1].newest is not None


async def test_of_many_pauses_few_are_used_at_a_time(own: dict[int, int]) -> None:
    idle_checkpoints = IdleCheckpoints(lambda: 99)
    policies = [
        Checkpoints("auto", lambda: 0.0, print, idle_checkpoints=idle_checkpoints)
        for _ in range(PROCESSORS + 1)
    ]
    kernels: list[Any] = [SlowlyCopied() for _ in policies]
    async with anyio.create_task_group() as tasks:
        for policy, kernel in zip(policies, kernels, strict=True):
            tasks.start_soon(rest, policy, kernel)
        await anyio.wait_all_tasks_blocked()
        for kernel in kernels:
            kernel.parked.set()
    assert [len(kernel.made) for kernel in kernels] == [1] * PROCESSORS + [0]
    assert policies[-1].pause_s(kernels[-1]) == PACE_S  # it asks again
    await policies[-1].pause(kernels[-1], 1)
    assert len(kernels[-1].made) == 1


async def test_those_that_could_not_make_a_copy_ask_one_after_the_other(
    own: dict[int, int],
) -> None:
    idle_checkpoints = IdleCheckpoints(lambda: 99)
    policies = [
        Checkpoints("auto", lambda: 0.0, print, idle_checkpoints=idle_checkpoints) for _ in range(9)
    ]
    kernel: Any = Copied()
    asks = []
    with contextlib.ExitStack() as others:
        for _ in range(PROCESSORS):
            others.enter_context(idle_checkpoints.at_once(Checkpoints("auto", lambda: 0.0, print)))
        for policy in policies:
            await rest(policy, kernel)
            asks.append(policy.pause_s(kernel))
    assert asks == [PACE_S * place for place in range(1, 10)]
    assert not kernel.made
    policies[0].stir()  # it runs a cell
    await policies[1].pause(kernel, 1)
    assert len(kernel.made) == 1
    assert policies[2].pause_s(kernel) == PACE_S * 7


async def test_none_is_made_of_a_session_that_could_not_keep_it(own: dict[int, int]) -> None:
    idle_checkpoints = IdleCheckpoints(lambda: 2)
    policies = [
        Checkpoints("auto", lambda: 0.0, print, idle_checkpoints=idle_checkpoints) for _ in range(4)
    ]
    kernels: list[Any] = [Copied() for _ in policies]
    for policy in policies:
        policy.worked(0.1)
    first, second, third, _ = zip(policies, kernels, strict=True)
    await first[0].pause(first[1], 1)
    assert first[0].owed  # one is made before its next cell
    assert first[0].pause_s(first[1]) is None
    policies[3].drop_all(kernels[3])  # it is closed
    for policy, kernel in (second, third):
        await policy.pause(kernel, 1)
    assert [len(kernel.made) for kernel in kernels] == [0, 1, 1, 0]
    await rest(*first, 2)
    assert [policy.newest is not None for policy in policies] == [True, False, True, False]


async def test_of_many_cells_at_a_time_each_has_done_a_part_of_the_work(
    own: dict[int, int],
) -> None:
    policy = Checkpoints(
        "auto", lambda: 0.0, print, idle_checkpoints=IdleCheckpoints(busy=lambda: 32.0)
    )
    kernel: Any = Copied()
    for cell in range(1, 20):
        policy.worked(1.0)  # of which it had a processor for some 30 ms
        await policy.after(kernel, cell)
    assert not kernel.made


async def test_copies_that_a_dead_kernel_comes_back_from_are_not_given_up(
    own: dict[int, int],
) -> None:
    idle_checkpoints = IdleCheckpoints(lambda: 1)
    policy, kernel = (
        Checkpoints("auto", lambda: 0.0, print, idle_checkpoints=idle_checkpoints),
        Copied(),
    )
    await rest(policy, kernel)
    kernel.exit = "it is dead"  # type: ignore[assignment]
    await rest(Checkpoints("auto", lambda: 0.0, print, idle_checkpoints=idle_checkpoints), Copied())
    assert policy.newest is not None


async def test_copies_that_cost_much_stay(
    own: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_checkpoints = IdleCheckpoints(lambda: 0)
    monkeypatch.setattr(checkpoints, "_resident", lambda _kernel: SMALL + 1)
    large, kernel = (
        Checkpoints("auto", lambda: 0.0, print, idle_checkpoints=idle_checkpoints),
        Copied(),
    )
    kernel.fork_s = 0.2
    await rest(large, kernel)
    assert large.newest is not None
    monkeypatch.setattr(checkpoints, "_resident", lambda _kernel: SMALL)
    await rest(large, kernel, 2)  # what it has cost is known by now
    assert large.newest is not None


async def test_after_a_long_rest_one_is_made_before_the_next_cell(own: dict[int, int]) -> None:
    policy, kernel, _ = made()
    await rest(policy, kernel)
    await policy.pause(kernel, 1)
    assert policy.newest is None
    assert policy.owed
    await policy.ahead(kernel, 1)
    assert len(kernel.made) == 2
