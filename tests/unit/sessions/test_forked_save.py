"""Data from a forked child is bounded and checked, and the saver chooses when to save."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from kernel_mcp.errors import HibernationError
from kernel_mcp.kernels.kernel import Kernel, PendingReply
from kernel_mcp.kernels.message_codec import Message
from kernel_mcp.linux.proc import Usage
from kernel_mcp.sessions.forked_save import BYTES_PER_S, ForkedSave, UnfitToFork, pause_after
from kernel_mcp.sessions.saver import IDLE_S, LONGEST_S, SMALL_BYTES, SaveCost, Saver
from kernel_specs.restricted.hibernation.saving import BLOCK
from tests.unit.fake_kernels import FakeClock

pytestmark = [pytest.mark.anyio]

REPORT = {
    "status": "ok",
    "size": 4,
    "names": ["a"],
    "stored": ["a"],
    "lost": {},
    "variables": [],
    "changed": {},
    "files": [],
    "groups": [["a"]],
}


def block(tag: bytes, data: bytes, size: int | None = None) -> bytes:
    return BLOCK.pack(tag, len(data) if size is None else size) + data


def report(**changes: Any) -> bytes:
    return block(b"r", json.dumps({**REPORT, **changes}).encode())


class Forks:
    """A kernel whose child sends these bytes."""

    def __init__(self, sends: bytes, **reply: Any) -> None:
        self.handle = self
        self.exit = None
        self.pid, self.snapshots = 1, None
        self._sends = sends
        self._reply = {"status": "ok", "unfit": "", **reply}

    def usage(self) -> Usage:
        return Usage()

    @contextmanager
    def asking(
        self, channel: str, kind: str, content: dict[str, Any], *, given: int
    ) -> Iterator[PendingReply]:
        mine = socket.socket(fileno=os.dup(given))

        def send() -> None:
            with mine, suppress(OSError):  # who reads it has seen enough
                mine.sendall(self._sends)

        threading.Thread(target=send).start()
        answer = PendingReply()
        answer.message = Message("reply", "", self._reply)
        answer.done.set()
        yield answer


async def saved(folder: Path, sends: bytes, most_bytes: int = 100) -> Any:
    with ForkedSave() as saving, anyio.fail_after(30):
        await saving.begin(cast(Kernel, Forks(sends)), max_bytes=most_bytes)
        return await saving.finish(folder / "dump", max_bytes=most_bytes)


async def test_what_a_child_sends_is_on_the_disk(tmp_path: Path) -> None:
    dump = await saved(tmp_path, block(b"n", b"a") + report() + block(b"d", b"data"))
    assert dump.path.read_bytes() == b"data"
    assert (dump.names, dump.groups) == (("a",), (("a",),))


LIES: dict[str, bytes] = {
    "nothing": b"",
    "no report": block(b"d", b"data"),
    "a report without end": block(b"r", b"{}", 2**40),
    "a report that is none": block(b"r", b"[1]"),
    "a report in a report": block(b"r", b"[" * 100_000),
    "names of no names": report(names=[1]) + block(b"d", b"data"),
    "groups of no names": report(groups=[["a" * 1000]]) + block(b"d", b"data"),
    "a name without end": block(b"n", b"a" * 100, 10**6),
    "more than there is room for": report(size=2**40) + block(b"d", b"data", 2**40),
    "another size than announced": report() + block(b"d", b"dat", 3),
    "less than announced": report() + block(b"d", b"da", 4),
    "less than nothing": report(size=-1) + block(b"d", b"data"),
    "names without end": block(b"n", b"a") * 30_000 + report(),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_child_that_lies_has_saved_nothing(tmp_path: Path, lie: str) -> None:
    with pytest.raises(HibernationError):
        await saved(tmp_path, LIES[lie])


async def test_the_variable_that_ended_the_child_is_known(tmp_path: Path) -> None:
    with ForkedSave() as saving:
        kernel = cast(Kernel, Forks(block(b"n", b"") + block(b"n", b"good") + block(b"n", b"bad")))
        await saving.begin(kernel, max_bytes=9)
        with pytest.raises(HibernationError, match="ended too early"):
            await saving.finish(tmp_path / "dump", max_bytes=9)
        assert saving.last == "bad"


async def test_a_kernel_that_may_not_be_forked_says_why() -> None:
    with ForkedSave() as saving, pytest.raises(UnfitToFork, match="a thread"):
        await saving.begin(cast(Kernel, Forks(b"", unfit="a thread")), max_bytes=9)


async def test_large_and_costly_saves_are_rare() -> None:
    assert pause_after(1000 * BYTES_PER_S, 1.0) == 1000.0
    assert pause_after(1000, 10.0) == 200.0


@pytest.mark.parametrize("said", [-1.0, float("nan"), 1e9, "much", None])
async def test_what_a_child_says_of_its_cost_is_bounded(tmp_path: Path, said: object) -> None:
    with ForkedSave() as saving, anyio.fail_after(30):
        sends = report(cpu_s=said) + block(b"d", b"data")
        await saving.begin(cast(Kernel, Forks(sends)), max_bytes=100)
        await saving.finish(tmp_path / "dump", max_bytes=100)
    assert 0.0 <= saving.cpu_s <= 60.0


class Changing:
    """A session that is saved at once."""

    def __init__(self, handle: str, clock: Callable[[], float]) -> None:
        self.handle = handle
        self.last_used = clock()
        self.changed = True
        self.saves: list[int | None] = []
        self.urgent: list[bool] = []
        self.written: SaveCost | None = SaveCost(10)
        self.rarely: list[float] = []
        self.failure: Exception | None = None
        self.told: list[str] = []
        self.done = anyio.Event()
        self.held = 0
        """How often something of its own keeps it from being saved."""
        self.busy = False
        self.saving: anyio.Event | None = None
        """Set when the save is done that is under way."""

    @property
    def state(self) -> str:
        return "busy" if self.busy else "idle"

    def unsaved(self, reason: str) -> None:
        self.told.append(reason)

    def rarely_saved(self, pause_s: float) -> None:
        self.rarely.append(pause_s)

    async def settle(self) -> bool:
        if self.busy:
            await anyio.sleep_forever()
        if self.saving is not None and not self.saving.is_set():
            await self.saving.wait()
            return True
        if not self.held:
            return False
        self.held -= 1
        return True

    async def save(self, *, urgent: bool = False, most_bytes: int | None = None) -> SaveCost | None:
        if (self.busy and not urgent) or self.held:
            return None
        if self.saving is not None and not self.saving.is_set():
            return None
        self.saves.append(most_bytes)
        self.urgent.append(urgent)
        self.changed = self.written is None
        self.done.set()
        if self.failure is not None:
            raise self.failure
        return self.written


async def test_a_session_is_saved_when_it_has_been_idle_and_then_as_often_as_it_costs() -> None:
    clock = FakeClock()
    saver = Saver(clock, lambda: None)
    session = Changing("s", clock)
    session.written = SaveCost(10, 0.5)
    async with anyio.create_task_group() as tasks:
        saver.touch(session)
        assert saver.due() == {"s": clock.now + IDLE_S}
        began = clock.now = clock.now + IDLE_S
        tasks.start_soon(saver.run)
        with anyio.fail_after(30):
            await session.done.wait()
            session.last_used = clock.now = clock.now + 1.0
            while not saver.due():
                saver.touch(session)
                await anyio.lowlevel.checkpoint()
        assert saver.due() == {"s": began + 10.0}
        tasks.cancel_scope.cancel()
    assert session.saves == [None]
    assert session.rarely == [0.0]


async def test_a_session_that_is_never_idle_is_saved_all_the_same() -> None:
    clock = FakeClock()
    saver = Saver(clock, lambda: None)
    session = Changing("s", clock)
    session.busy = True
    begin, since = clock.now, []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(saver.run)
        for _ in range(150):  # cells 0.8 s apart
            session.changed = True
            session.last_used = clock.now = clock.now + 0.8
            saver.touch(session)
            saver._wake.set()
            await anyio.wait_all_tasks_blocked()
            while saver._saving:  # a thread makes room for the next save
                await anyio.sleep(0)
            if session.done.is_set():
                session.done = anyio.Event()
                since.append(clock.now - begin)
                begin = clock.now
        tasks.cancel_scope.cancel()
    assert session.urgent == [True] * 3
    assert all(LONGEST_S <= each <= LONGEST_S + 2 for each in since), since


async def test_a_session_too_large_to_be_saved_often_is_told_so() -> None:
    clock = FakeClock()
    saver = Saver(clock, lambda: None)
    session = Changing("s", clock)
    session.written = SaveCost(100 * BYTES_PER_S)
    async with anyio.create_task_group() as tasks:
        saver.touch(session)
        began = clock.now = clock.now + IDLE_S
        tasks.start_soon(saver.run)
        await anyio.wait_all_tasks_blocked()
        assert session.rarely == [100.0]
        saver.touch(session)
        assert saver.due() == {"s": began + 100.0}
        tasks.cancel_scope.cancel()


async def test_what_changes_without_a_cell_is_looked_for_as_long_as_the_session_lasts() -> None:
    clock = FakeClock()
    saver = Saver(clock, lambda: None)
    session = Changing("s", clock)
    seen = []
    async with anyio.create_task_group() as tasks:
        saver.touch(session)
        clock.now += IDLE_S
        tasks.start_soon(saver.run)
        await anyio.wait_all_tasks_blocked()
        for _ in range(4):
            seen.append(len(saver._looks))
            clock.now += LONGEST_S
            saver._wake.set()
            await anyio.wait_all_tasks_blocked()
        assert sum(seen) == 4
        tasks.cancel_scope.cancel()
    assert len(session.saves) == 1


async def test_progress_of_a_thread_is_saved_without_a_cell() -> None:
    clock = FakeClock()
    saver = Saver(clock, lambda: None)
    session = Changing("s", clock)
    async with anyio.create_task_group() as tasks:
        saver.touch(session)
        clock.now += IDLE_S
        tasks.start_soon(saver.run)
        await anyio.wait_all_tasks_blocked()
        for _ in range(3):
            session.changed = True
            clock.now += LONGEST_S
            saver._wake.set()
            await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert len(session.saves) == 4


@pytest.mark.parametrize("failure", [HibernationError("no"), OSError(28, "full")])
async def test_a_session_that_cannot_be_saved_is_tried_again_ever_later(
    failure: Exception,
) -> None:
    clock = FakeClock()
    saver = Saver(clock, lambda: None)
    session = Changing("s", clock)
    session.failure = failure
    async with anyio.create_task_group() as tasks:
        saver.touch(session)
        clock.now += IDLE_S
        tasks.start_soon(saver.run)
        for pause in (60.0, 120.0, 240.0):
            with anyio.fail_after(30):
                while saver.due().get("s", 0.0) <= clock.now:
                    await anyio.lowlevel.checkpoint()
            assert saver.due()["s"] == clock.now + pause
            clock.now += pause
            saver.touch(Changing("other", clock))
            saver.forget(Changing("other", clock))
        assert all(session.told)
        session.failure = None
        with anyio.fail_after(30):
            while session.told[-1]:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def test_at_the_end_small_sessions_are_saved_before_large_ones() -> None:
    clock = FakeClock()
    saver = Saver(clock, lambda: None)
    order: list[tuple[str, int | None]] = []

    class Sized(Changing):
        async def save(
            self, *, urgent: bool = False, most_bytes: int | None = None
        ) -> SaveCost | None:
            order.append((self.handle, most_bytes))
            if self.handle == "large" and most_bytes is not None:
                raise HibernationError("too large")
            return await super().save(most_bytes=most_bytes)

    for handle in ("large", "small", "smaller"):
        saver.touch(Sized(handle, clock))
    await saver.finish()
    assert sorted(order[:3]) == [(each, SMALL_BYTES) for each in ("large", "small", "smaller")]
    assert order[3:] == [("large", None)]
    await saver.finish()
    assert len(order) == 4


async def test_the_end_stops_cells_and_one_that_does_not_stop_holds_up_no_other_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernel_mcp.sessions.saver.SETTLE_S", 0.01)
    clock = FakeClock()
    saver = Saver(clock, lambda: None)
    held, busy = Changing("held", clock), Changing("busy", clock)
    held.held, busy.busy = 2, True
    saver.touch(held)
    saver.touch(busy)
    await saver.finish()
    assert [len(each.saves) for each in (held, busy)] == [1, 0]


async def test_the_end_waits_for_a_save_that_takes_longer_than_a_cell_may(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kernel_mcp.sessions.saver.SETTLE_S", 0.01)
    saver, session = Saver(FakeClock(), lambda: None), Changing("s", FakeClock())
    session.saving = anyio.Event()
    saver.touch(session)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(saver.finish)
        await anyio.sleep(0.05)
        session.saving.set()
    assert len(session.saves) == 1
    assert "did not stop" not in caplog.text
