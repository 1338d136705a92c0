"""Cells that can change no more lie on disk, and read as they did in memory."""

from __future__ import annotations

import base64
import gc
import json
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.output import displays
from kernel_mcp.output.displays import DisplayIndex
from kernel_mcp.output.items import Clear, Display, Event, Failure, Stream
from kernel_mcp.output.outputs import EVICTED, OutputLog
from kernel_mcp.output.render import render
from kernel_mcp.sessions import history
from kernel_mcp.sessions.cell import Cell, CellOutcome, Phase, Status
from kernel_mcp.sessions.history import BATCH, ClosedRecords, History
from kernel_mcp.sessions.notebook_export import notebook
from kernel_mcp.sessions.notifications import Loss, Notice

pytestmark = [pytest.mark.anyio]

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20_000)).decode()
OUTPUTS: list[list[Event]] = [
    [],
    [Stream("stdout", "a\n"), Stream("stderr", "b"), Stream("stdout", "c \ud800 ☃")],
    [Stream("stdout", "line\n" * 60_000)],
    [Stream("stdout", "x" * 5_000), Display({"text/plain": "1"}, {"m": [1]}, result=True)],
    [Display({"image/png": PNG, "text/plain": "<Figure size 1x1>"}, {})],
    [Display({"application/json": {"a": [1, None, "ü"]}}, {}), Stream("stdout", "after")],
    [Display({"application/json": {"a": ["b"] * 9_000}, "text/html": "<b>x</b>"}, {})],
    [Stream("stderr", "w\n"), Failure("ValueError", "v", ("one", "two"))],
    [Stream("stdout", "gone"), Clear(wait=False), Stream("stdout", "kept")],
    [Display({"text/plain": str(n)}, {}) for n in range(230)],
    [Display({"image/png": "no base64"}, {}), Display({"text/x": "y" * 10_000}, {})],
]


class Cells:
    """A history whose cells run at once."""

    def __init__(self, folder: Path) -> None:
        self.displays: DisplayIndex[OutputLog] = DisplayIndex()
        self.history = History(folder, self.displays)
        self._folder = folder

    def run(self, *events: Event, told: bool = True, listens: bool = True) -> Cell:
        number = len(self.history) + 1
        cell = Cell(number, f"cell {number}", 0.0, self._log(number))
        self.history.append(cell)
        cell.started = 1.0
        take = cell.listen() if listens else cell.take
        for event in events:
            take(event)
        cell.phase, cell.numbered, cell.state_as_of = Phase.RUN, True, number
        cell.run_after([Notice(1, "lost", Loss("a reason", ("x", "y"), 3))])
        cell.finish(CellOutcome(Status.ERROR, True, "a cause", number), 3.5)
        cell.end_reported = told
        return cell

    def _log(self, number: int) -> OutputLog:
        return OutputLog(self._folder, number, index=self.displays)


@pytest.fixture
def cells(tmp_path: Path) -> Cells:
    return Cells(tmp_path)


async def seen(cell: Cell) -> list[Any]:
    """All that anyone can read of a cell."""
    log = cell.log
    outputs = [log.output(str(number)) for number in (1, 2, 230)]
    return [
        *(cell.number, cell.code, cell.outcome, cell.status, cell.duration_s, cell.end_reported),
        *(log.since(), log.since(limit=100), log.position(), list(log.text()), log.characters),
        *(log.disk_bytes, log.closed, outputs, [part and part.read() for part in outputs]),
        cell.meta("s", omitted=0, outputs=[]),
        await render(log.since(), session="s", cell=cell.number),
    ]


async def test_a_cell_on_disk_reads_as_it_did_in_memory(cells: Cells) -> None:
    for events in OUTPUTS:
        cells.run(*events)
    cells.run()
    before = [await seen(cell) for cell in cells.history]
    book = notebook(cells.history)
    cells.history.settle()
    assert cells.history.in_memory == 1
    assert [await seen(cell) for cell in cells.history] == before
    assert notebook(cells.history) == book
    assert cells.history[-2].code == "cell 11"
    assert [cell.number for cell in cells.history[1:4]] == [2, 3, 4]


async def test_what_may_still_change_stays_in_memory(cells: Cells) -> None:
    untold = cells.run(told=False)
    cells.run()
    shown = cells.run(Display({"text/plain": "old"}, {}, "id"))
    listener = cells.run()
    cells.run(listens=False)
    newest = cells.run(listens=False)
    cells.history.settle()
    assert cells.history.in_memory == 4
    for cell in (untold, shown, listener, newest):
        assert cells.history[cell.number - 1] is cell
    assert cells.history.unreported == [untold]
    listener.take(Stream("stdout", "from a thread"))
    other = cells.run(Display({"text/plain": "new"}, {}, "id", update=True))
    assert "".join(shown.log.text()) == "new\n"
    untold.end_reported = True
    cells.history.settle()
    assert cells.history.late == [listener]
    listener.tell_late(listener.log.position())
    cells.history.settle()
    assert cells.history.in_memory == 2
    assert "".join(cells.history[listener.number - 1].log.text()) == "from a thread"
    cells.history.settle(kernel_gone=True)
    assert cells.history.in_memory == 1
    assert cells.history[-1] is other
    assert "".join(cells.history[shown.number - 1].log.text()) == "new\n"


async def test_displays_of_many_cells_are_not_held_for_ever(cells: Cells) -> None:
    shown = [
        cells.run(*(Display({"text/plain": "old"}, {}, f"{n}-{k}") for k in range(5)))
        for n in range(displays.MAX_HELD + 40)
    ]
    cells.history.settle()
    assert cells.history.in_memory == displays.MAX_HELD
    cells.run(Display({"text/plain": "new"}, {}, "0-1", update=True))
    cells.run(Display({"text/plain": "new"}, {}, "50-1", update=True))
    assert "new" not in "".join(cells.history[0].log.text())
    assert "new" in "".join(shown[50].log.text())


async def test_a_cell_on_disk_costs_some_bytes_of_memory(cells: Cells) -> None:
    def run(count: int) -> None:
        for n in range(count):
            cell = cells.run(Stream("stdout", f"{n}\n"), Display({"text/plain": "1"}, {}))
            cells.history.ended(cell, 10**9)

    def growth() -> int:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        run(400)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    run(10 * BATCH)
    tracemalloc.start()
    try:  # other threads of this process allocate as well, but not each time
        least = min(growth() for _ in range(3))
    finally:
        tracemalloc.stop()
    assert least < 400 * 50
    assert cells.history.in_memory <= BATCH + 1


async def test_the_oldest_outputs_make_room_wherever_their_cells_are(cells: Cells) -> None:
    for _ in range(4):
        cells.run(Stream("stdout", "x" * 20_000))
    cells.history.settle()
    for _ in range(2):
        cells.run(Stream("stdout", "x" * 20_000))
    kept = cells.run(Stream("stdout", "x" * 30_000))
    cells.history.make_room(4 * 70_000 // 3)
    assert [cell.log.disk_bytes for cell in cells.history] == [0] * 4 + [20_000, 20_000, 30_000]
    cells.history.make_room(0)
    assert [cell.log.disk_bytes for cell in cells.history] == [0] * 6 + [30_000]
    for cell in cells.history[:6]:
        assert "".join(cell.log.text()) == f"{EVICTED}\n"
        assert cell.code == f"cell {cell.number}"
    assert kept.log.disk_bytes


async def test_the_oldest_rows_make_room_when_there_are_too_many(
    cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "SEGMENT_BYTES", 5_000)
    for _ in range(100):
        cell = cells.run(Stream("stdout", "x" * 9_000))
        cells.history.ended(cell, 60_000)
    assert cells.history.disk_bytes < 60_000
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert on_disk == cells.history.disk_bytes
    first, *_, last = cells.history
    assert "".join(first.log.text()) == f"{EVICTED}\n"
    assert (first.code, first.status) == ("", Status.ERROR)
    assert last.code == "cell 100"
    source = [cell["source"] for cell in json.loads(notebook(cells.history))["cells"]]
    assert len(source) == 100
    assert source[-1] == "cell 100"


async def test_a_row_longer_than_one_read_is_whole(cells: Cells) -> None:
    failure = Failure("E", "v", tuple("f" * 4_000 for _ in range(40)))
    cells.run(failure)
    cells.run()
    before = await seen(cells.history[0])
    cells.history.settle()
    assert await seen(cells.history[0]) == before


async def test_a_record_that_cannot_be_written_keeps_cells_in_memory(
    cells: Cells, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cells-0.jsonl").mkdir()
    for _ in range(3):
        cells.run(Stream("stdout", "kept"))
    cells.history.settle()
    cells.history.settle()
    assert cells.history.in_memory == 3
    assert len(caplog.records) == 1
    (tmp_path / "cells-0.jsonl").rmdir()
    cells.history.settle()
    assert cells.history.in_memory == 1
    assert "".join(cells.history[0].log.text()) == "kept"


@pytest.mark.parametrize("damage", ["gone", "torn"])
async def test_a_record_that_cannot_be_read_says_so(
    cells: Cells, tmp_path: Path, damage: str
) -> None:
    cells.run(Stream("stdout", "x"))
    cells.run()
    cells.history.settle()
    if damage == "gone":
        (tmp_path / "cells-0.jsonl").unlink()
    else:
        (tmp_path / "cells-0.jsonl").write_bytes(b"{")
    lost = cells.history[0]
    assert lost.status is Status.ERROR
    why = "No such file or directory" if damage == "gone" else "its row is not whole"
    assert why in "".join(lost.log.text())
    assert len(json.loads(notebook(cells.history))["cells"]) == 2


def test_another_history_goes_on_where_the_state_of_one_was_taken(tmp_path: Path) -> None:
    first = Cells(tmp_path)
    for events in OUTPUTS:
        first.run(*events)
    first.history.settle()
    first.run(Stream("stdout", "not on disk yet"), told=False)
    state = json.loads(json.dumps(first.history.state()))
    count = len(first.history)
    first.run(Stream("stdout", "after " * 60_000))
    second = Cells(tmp_path)
    second.history.restore(state)
    assert len(second.history) == count
    for mine, other in zip(second.history, first.history[:count], strict=True):
        assert (mine.code, mine.outcome, mine.number) == (other.code, other.outcome, other.number)
        assert list(mine.log.text()) == list(other.log.text())
    assert not (tmp_path / f"{count + 1}.txt").exists()
    added = second.run(Stream("stdout", "more"))
    assert added.number == count + 1
    second.history.settle()
    assert list(second.history[0].log.text()) == list(first.history[0].log.text())


@pytest.mark.parametrize(
    "change",
    [
        {"places": [-1]},
        {"bytes": []},
        {"statuses": [99] * 2, "live": {}},
        {"live": {"9": [1]}},
        {"rows": 3},
    ],
)
def test_a_state_that_is_none_changes_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    first = Cells(tmp_path / "a")
    first.run()
    first.run()
    state = {**first.history.state(), **change}
    (tmp_path / "b").mkdir()
    second = Cells(tmp_path / "b")
    with pytest.raises(ValueError, match=r"\w"):
        second.history.restore(state)
    assert len(second.history) == 0


async def test_all_records_together_are_bounded_at_the_cost_of_who_has_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "KEPT_BYTES", 35)
    async with anyio.create_task_group() as tasks:

        def spawn(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
            tasks.start_soon(work)

        records = ClosedRecords(tmp_path, lambda: 0.0, spawn)
        for owner, handle in (("other", "o1"), *(("greedy", f"g{n}") for n in range(4))):
            cells = Cells(tmp_path / handle).history
            monkeypatch.setattr(cells, "_output_bytes", lambda: 10)
            await records.keep(owner, handle, cells)
        assert records.find("other", "o1") is not None
        there = [n for n in range(4) if records.find("greedy", f"g{n}") is not None]
        assert there == [2, 3]
        tasks.cancel_scope.cancel()


async def test_records_of_closed_sessions_make_room_among_those_of_their_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_KEPT", 2)
    async with anyio.create_task_group() as tasks:

        def spawn(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
            tasks.start_soon(work)

        records = ClosedRecords(tmp_path, lambda: 0.0, spawn)
        for owner, handle in (("other", "o1"), *(("greedy", f"g{n}") for n in range(4))):
            await records.keep(owner, handle, Cells(tmp_path / handle).history)
        assert records.find("other", "o1") is not None
        there = [n for n in range(4) if records.find("greedy", f"g{n}") is not None]
        assert there == [2, 3]
        tasks.cancel_scope.cancel()
