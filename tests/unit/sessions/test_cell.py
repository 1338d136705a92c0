"""A cell records one outcome and tells whoever listens."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from kernel_mcp.output.items import Stream
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.sessions.cell import Cell, CellOutcome, Phase, Status, StopReason

pytestmark = [pytest.mark.anyio]


def new_cell(folder: Path) -> Cell:
    return Cell(1, "1", 10.0, OutputLog(folder, 1))


async def test_status_goes_from_queued_over_running_to_the_outcome(tmp_path: Path) -> None:
    cell = new_cell(tmp_path)
    statuses = [cell.status]
    cell.started = 1.0
    statuses.append(cell.status)
    cell.phase, cell.numbered = Phase.RUN, True
    cell.finish(CellOutcome(Status.OK, exit_code=0), 3.5)
    statuses.append(cell.status)
    assert statuses == [Status.QUEUED, Status.RUNNING, Status.OK]
    assert cell.duration_s == 2.5
    found = cell.meta("s", omitted=0, outputs=[])
    assert [found[key] for key in ("cell", "execution_count", "exit_code", "phase")] == [
        *(1, 1, 0),
        "run",
    ]


async def test_the_first_outcome_stands(tmp_path: Path) -> None:
    cell = new_cell(tmp_path)
    cell.finish(CellOutcome(Status.KILLED, state_kept=False), 1.0)
    cell.finish(CellOutcome(Status.OK), 2.0)
    assert cell.status is Status.KILLED


async def test_a_stop_cancels_the_scope_that_watches_it(tmp_path: Path) -> None:
    cell = new_cell(tmp_path)
    with anyio.CancelScope() as scope:
        cell.watch_stop(scope)
        cell.stop(StopReason.INTERRUPT)
    assert scope.cancel_called
    assert cell.stop_reason is StopReason.INTERRUPT


async def test_a_stop_before_anyone_watches_is_not_forgotten(tmp_path: Path) -> None:
    cell = new_cell(tmp_path)
    cell.stop(StopReason.CANCEL)
    cell.stop(StopReason.TIMEOUT)
    with anyio.CancelScope() as scope:
        cell.watch_stop(scope)
    assert scope.cancel_called
    assert cell.stop_reason is StopReason.CANCEL


async def test_listeners_wake_on_output_and_on_the_end(tmp_path: Path) -> None:
    cell = new_cell(tmp_path)
    heard: list[str] = []

    async def listen() -> None:
        changes = 0
        while not cell.finished.is_set():
            changes = await cell.changed(changes)
            heard.append("".join(cell.log.text()).strip())

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await anyio.wait_all_tasks_blocked()
            cell.take(Stream("stdout", "hello\n"))
            await anyio.wait_all_tasks_blocked()
            cell.finish(CellOutcome(Status.OK), 1.0)
    assert heard[0] == "hello"


async def test_what_came_while_nobody_listened_is_heard_at_once(tmp_path: Path) -> None:
    cell = new_cell(tmp_path)
    cell.take(Stream("stdout", "one\n"))
    with anyio.fail_after(60):
        changes = await cell.changed()
        cell.take(Stream("stdout", "two\n"))
        assert await cell.changed(changes) == changes + 1
