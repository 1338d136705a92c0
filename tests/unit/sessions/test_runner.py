"""Cells take turns in the order they came; a restrictive policy speaks before one runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernel_mcp.output.items import Stream
from kernel_mcp.policy import Policy
from kernel_mcp.sessions import runner
from kernel_mcp.sessions.cell import CellOutcome, Status, StopReason
from kernel_mcp.sessions.checking import Checks
from kernel_mcp.sessions.notifications import Loss, NotificationQueue
from kernel_mcp.sessions.runner import CellQueue, refuse
from tests.unit.fake_kernels import FakeClock

pytestmark = [pytest.mark.anyio]


@pytest.fixture
def cells(tmp_path: Path) -> CellQueue:
    return CellQueue(tmp_path, FakeClock(), NotificationQueue())


async def test_cells_begin_in_the_order_they_came(cells: CellQueue) -> None:
    first, second = cells.add("1", 1.0), cells.add("2", 1.0)
    assert [cells.place(cell) for cell in (first, second)] == [0, 1]
    assert cells.begin() is first
    assert (cells.current, len(cells)) == (first, 1)
    assert [cells.place(cell) for cell in (first, second)] == [0, 1]
    cells.end(first)
    assert cells.begin() is second
    cells.end(second)
    assert cells.begin() is None
    assert not cells.busy
    assert [cell.number for cell in cells.cells] == [1, 2]


async def test_a_cell_that_waits_is_abandoned_at_once_a_running_one_stopped(
    cells: CellQueue,
) -> None:
    running, waiting = cells.add("1", 1.0), cells.add("2", 1.0)
    cells.begin()
    cells.abandon(waiting)
    cells.abandon(running)
    assert waiting.outcome == CellOutcome(
        Status.INTERRUPTED, cause="it was cancelled before it began"
    )
    assert waiting.end_reported
    assert running.outcome is None
    assert running.stop_reason is StopReason.CANCEL
    assert len(cells) == 0


@pytest.mark.parametrize(
    ("reason", "word"), [(StopReason.RESET, "reset"), (StopReason.CLOSE, "closed")]
)
async def test_a_halt_ends_every_cell(cells: CellQueue, reason: StopReason, word: str) -> None:
    running, *waiting = (cells.add("1", 1.0) for _ in range(3))
    cells.begin()
    lost = NotificationQueue().add("gone", Loss("halt", ("x",)))
    cells.halt(reason, lost)
    assert running.stop_reason is reason
    cause = f"the session was {word} before this cell began"
    assert [cell.outcome for cell in waiting] == [CellOutcome(Status.INTERRUPTED, cause=cause)] * 2
    assert [cell.meta("s", omitted=0, outputs=[])["lost"] for cell in (running, *waiting)] == [
        ["x"]
    ] * 3


async def test_the_end_of_a_cell_makes_room_for_its_output(
    cells: CellQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RECORD_BYTES", 0)
    for _ in range(2):
        cell = cells.add("1", 1.0)
        cells.begin()
        cell.take(Stream("stdout", "x" * 20_000))
        cell.finish(CellOutcome(Status.OK), 0.0)
        cells.end(cell)
    assert [cell.log.disk_bytes for cell in cells.cells] == [0, 20_000]


POLICY = Policy.for_allow(["numpy"])
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}.7"
BROKEN = ("x = (1\nimport os", "x = (1\n!ls", "if x:\npass", "f a b", "f(\n__import__('os')")


@pytest.mark.parametrize("code", BROKEN)
@pytest.mark.parametrize("python", ["", "3.9.2", OWN])
async def test_text_that_does_not_parse_is_not_run(code: str, python: str, tmp_path: Path) -> None:
    refusal = await refuse(code, POLICY, [tmp_path], checks=Checks(), python=python)
    assert refusal is not None
    assert refusal.name == "SyntaxError"
    assert refusal.value.startswith("nothing was run.\nline ")
    assert "Error: " in refusal.value


@pytest.mark.parametrize("code", BROKEN)
async def test_a_newer_python_than_the_servers_parses_for_itself(code: str, tmp_path: Path) -> None:
    assert (
        await refuse(
            code, POLICY, [tmp_path], checks=Checks(), python=f"3.{sys.version_info[1] + 1}.0rc1"
        )
        is None
    )


async def test_a_command_is_refused_whatever_the_python(tmp_path: Path) -> None:
    for python in ("3.9.2", OWN, "3.99.0"):
        refusal = await refuse("!ls\nx = (1", POLICY, [tmp_path], checks=Checks(), python=python)
        assert refusal is not None
        assert refusal.name == "PolicyError"


async def test_with_everything_allowed_the_kernel_parses(tmp_path: Path) -> None:
    assert (
        await refuse("x = (1\nimport os", Policy.for_allow(["*"]), [tmp_path], checks=Checks())
        is None
    )


async def test_what_only_the_compiler_objects_to_is_left_to_the_kernel(tmp_path: Path) -> None:
    assert await refuse("return 1", POLICY, [tmp_path], checks=Checks()) is None
