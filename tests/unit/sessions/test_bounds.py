"""Sessions that are trimmed when the server holds too much."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.linux import process
from kernel_mcp.output.items import Stream
from kernel_mcp.sessions import bounds
from kernel_mcp.sessions.bounds import OwnMemory, ServerBounds, relieve, size_of
from kernel_mcp.sessions.cell import CellOutcome, Status
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import NotificationQueue
from kernel_mcp.sessions.runner import CellQueue
from kernel_mcp.units import KIB, MIB
from tests.integration.memory import status_bytes
from tests.unit.fake_kernels import FakeClock, FakeSource, new_manager

if TYPE_CHECKING:
    from pathlib import Path

    from kernel_mcp.sessions.session import Session


@dataclass(eq=False)
class Holder:
    """A session that holds so much of the memory that `Server` counts, and records on disk."""

    handle: str
    held: int = 0
    queue: CellQueue | None = None
    state: str = "idle"
    owner: str = "local"
    causes: list[str] = field(default_factory=list)

    @property
    def cells(self) -> object:
        assert self.queue is not None
        return self.queue.cells

    def relieve(self, cause: str) -> str:
        self.held = 0
        self.causes.append(cause)
        return "lost its kernel"


class Server:
    def __init__(self, *holders: Holder, most: int = 100 * MIB, records: int = MIB) -> None:
        self.holders = holders
        self.other = 0
        self.bounds = ServerBounds(
            lambda: cast("list[Session]", list(self.holders)),
            memory=lambda: self.other + sum(holder.held for holder in self.holders),
            most_memory=most,
            most_records=records,
        )


@pytest.fixture
def _holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask each `MemoryOwner` itself."""
    monkeypatch.setattr(bounds, "held_by", lambda holder: holder.held)
    monkeypatch.setattr(bounds, "relieve", Holder.relieve)


def test_memory_goes_back_to_the_system_when_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(Holder("s-1", state="busy"))
    trims: list[int] = []

    def trim(*, collect: bool) -> None:
        assert not collect
        trims.append(server.other // MIB)
        server.other -= 20 * MIB

    monkeypatch.setattr(process, "trim", trim)
    for server.other, state, trimmed in (
        (40 * MIB, "idle", []),
        (70 * MIB, "busy", []),
        (70 * MIB, "idle", [70]),
        (57 * MIB, "idle", [70]),
        (59 * MIB, "idle", [70, 59]),
        (20 * MIB, "idle", [70, 59]),
        (30 * MIB, "idle", [70, 59, 30]),
    ):
        server.holders[0].state = state
        server.bounds.tidy()
        assert trims == trimmed
    for _ in range(2 * bounds.REST_LOOKS):
        server.bounds.tidy()
    assert trims == [70, 59, 30, 10]


def test_cycles_are_looked_for_only_where_sessions_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(Holder("s-1"), Holder("s-2"))
    collected: list[bool] = []
    monkeypatch.setattr(process, "trim", lambda *, collect: collected.append(collect))
    two, three = server.holders, (*server.holders, Holder("s-3"))
    for held, holders in ((40 * MIB, two), (60 * MIB, three), (80 * MIB, two), (100 * MIB, two)):
        server.other, server.holders = held, holders
        server.bounds.tidy()
    assert collected == [False, True, False]


@pytest.mark.usefixtures("_holders")
def test_the_session_that_holds_most_lets_go_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(Holder("s-1", 30 * MIB), Holder("s-2", 60 * MIB), Holder("s-3", 20 * MIB))
    assert server.bounds.check_memory()
    assert [holder.held // MIB for holder in server.holders] == [30, 0, 20]
    [cause] = server.holders[1].causes
    assert cause == (
        "the server's memory ran short (it holds 110 MiB, limit 100 MiB), and this session held "
        "much of it: 60 MiB of outputs and code"
    )
    assert "session s-2, which held 60 MiB, lost its kernel" in caplog.text
    assert server.bounds.check_memory()
    assert not any(holder.causes for holder in server.holders[::2])


@pytest.mark.usefixtures("_holders")
def test_memory_that_no_session_holds_costs_no_session_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(Holder("s-1", 10 * MIB), Holder("s-2", 5 * MIB))
    server.other = 200 * MIB
    assert not server.bounds.check_memory()
    assert not server.bounds.check_memory()
    assert not any(holder.causes for holder in server.holders)
    assert len(caplog.messages) == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("sizes", "done", "statuses", "told"),
    [
        (
            (10, 5, 5),
            "had its ended cells moved to disk",
            ("running", "queued"),
            "Cells 1 to 1 (1)",
        ),
        ((10, 6, 5), "had 1 waiting cells ended", ("running", "interrupted"), "were not run: why"),
        ((10, 6, 6), "lost its kernel", ("killed", "interrupted"), "were not run: why"),
    ],
)
async def test_a_session_lets_go_of_no_more_than_will_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    done: str,
    statuses: tuple[str, ...],
    told: str,
) -> None:
    source = FakeSource()
    manager = new_manager(tmp_path, source, FakeClock())
    async with manager.running():
        session = await manager.create(Caller())
        await session.submit("x = 1", 0).finished.wait()
        running, waiting = session.submit("wait", 0), session.submit("y = 2", 0)
        with anyio.fail_after(60):
            while source.kernels[0].running is None:
                await anyio.lowlevel.checkpoint()
        held = iter(sizes)
        monkeypatch.setattr(bounds, "held_by", lambda _session: next(held))
        monkeypatch.setattr(
            source.kernels[0].limits, "kill_for", lambda _cause: source.kernels[0].die()
        )
        assert relieve(session, "why") == done
        if statuses[0] == "killed":
            with anyio.fail_after(60):
                await running.finished.wait()
        assert (running.status.value, waiting.status.value) == statuses
        assert any(told in notice.text for notice in session.notifications.pending)


def test_records_are_levelled_so_that_small_ones_are_kept(tmp_path: Path) -> None:
    holders = []
    for number, size in enumerate((20 * KIB, 600 * KIB, 900 * KIB)):
        folder = tmp_path / str(number)
        folder.mkdir()
        holders.append(
            Holder(f"s-{number}", queue=CellQueue(folder, lambda: 0.0, NotificationQueue()))
        )
        _print(holders[-1].queue, size)
    server = Server(*holders, records=700 * KIB)
    server.bounds.check_records()
    found = [holder.queue.cells.disk_bytes for holder in holders if holder.queue is not None]
    assert found[0] >= 20 * KIB
    assert 200 * KIB < found[1] <= 340 * KIB
    assert sum(found) <= 700 * KIB
    large = holders[2].queue
    assert large is not None
    assert "removed to make room" in "".join(large.cells[0].log.text())
    assert "removed to make room" not in "".join(large.cells[-1].log.text())


def test_records_of_many_sessions_make_room_before_one_of_another(tmp_path: Path) -> None:
    holders = []
    for number, owner in enumerate(("ada", "ben", "ben", "ben", "ben")):
        folder = tmp_path / str(number)
        folder.mkdir()
        queue = CellQueue(folder, lambda: 0.0, NotificationQueue())
        holders.append(Holder(f"s-{number}", queue=queue, owner=owner))
        _print(queue, 200 * KIB)
    server = Server(*holders, records=500 * KIB)
    server.bounds.check_records()
    ada, *ben = [each.queue.cells.disk_bytes for each in holders if each.queue is not None]
    assert ada >= 200 * KIB
    assert sum(ben) <= 300 * KIB


@pytest.mark.usefixtures("_holders")
def test_who_holds_most_in_many_sessions_is_relieved_first() -> None:
    ada = Holder("s-ada", held=60 * MIB, owner="ada")
    ben = [Holder(f"s-{number}", held=40 * MIB, owner="ben") for number in range(3)]
    server = Server(ada, *ben)
    assert server.bounds.check_memory()
    assert ada.causes == []
    assert [len(each.causes) for each in ben] == [1, 0, 0]


def _print(queue: CellQueue | None, size: int) -> None:
    """Run cells that print 20 KiB each."""
    assert queue is not None
    for _ in range(size // (20 * KIB)):
        cell = queue.add("print()", 0.0)
        queue.begin()
        cell.take(Stream("stdout", "x" * 20 * KIB))
        cell.finish(CellOutcome(Status.OK), 0.0)
        cell.end_reported = True
        queue.end(cell)


def test_what_hangs_on_a_session_is_weighed_whatever_it_is_made_of(tmp_path: Path) -> None:
    queue = CellQueue(tmp_path, lambda: 0.0, NotificationQueue())
    empty = size_of(queue, None)
    assert empty < 100 * KIB
    cell = queue.add("x = 1 # \U0001f600" + "a" * 100_000, 0.0)
    assert 400_000 < size_of(queue, None) - empty < 500_000
    queue.begin()
    cell.take(Stream("stdout", "y" * 300_000))
    assert size_of(queue, None) - empty > 650_000


def test_own_memory_is_what_linux_counts_as_private() -> None:
    memory = OwnMemory()
    before = memory()
    kept = b"x" * 64 * MIB
    assert 56 * MIB < memory() - before < 80 * MIB  # Linux counts by the batch
    memory.close()
    assert len(kept)
    assert abs(before + len(kept) - status_bytes(os.getpid(), "RssAnon")) < 8 * MIB
