"""How a cell that has to be stopped ends, with a kernel that reacts late or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import anyio
import pytest

from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.kernels.run import Run
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.sessions.cell import Cell, Outcome, Status, StopReason
from kernel_mcp.sessions.execution import run_cell
from tests.unit.fake_kernels import FakeClock, FakeKernel, FakeSource

pytestmark = [pytest.mark.anyio]


class LateKernel(FakeKernel):
    """Answers only when it is killed, as a reply that was on its way would arrive."""

    def interrupt(self) -> None:
        """Do not react."""

    def kill(self) -> None:
        run = cast(Run, self._waiting)
        run.on_reply({"status": "error", "ename": "KeyboardInterrupt", "evalue": ""})
        run.on_idle()
        self.die()


async def stopped(kernel: FakeKernel, folder: Path, reason: StopReason) -> Outcome:
    """The outcome of a cell that waits for ever and is told to stop."""
    cell = Cell(1, "wait", 0, OutputLog(folder, 1))
    cell.begin(0.0)
    cell.stop(reason)
    with anyio.fail_after(60):
        return await run_cell(cast(Kernel, kernel), cell, grace_s=0.01, cpu_s=0, clock=FakeClock())


async def test_an_interrupt_that_works_keeps_the_variables(tmp_path: Path) -> None:
    outcome = await stopped(FakeKernel(FakeSource()), tmp_path, StopReason.INTERRUPT)
    assert outcome.status is Status.INTERRUPTED
    assert outcome.state_kept


async def test_a_reply_that_comes_after_the_kill_does_not_hide_the_loss(tmp_path: Path) -> None:
    outcome = await stopped(LateKernel(FakeSource()), tmp_path, StopReason.TIMEOUT)
    assert outcome.status is Status.KILLED
    assert not outcome.state_kept
    assert "did not stop" in str(outcome.cause)


async def test_a_cell_that_resists_is_killed_at_once_when_its_session_ends(tmp_path: Path) -> None:
    kernel = LateKernel(FakeSource())
    cell = Cell(1, "wait", 0, OutputLog(tmp_path, 1))
    cell.begin(0.0)
    cell.stop(StopReason.CANCEL)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, kernel, cell)
            await anyio.wait_all_tasks_blocked()
            assert kernel.exit is None
            cell.stop(StopReason.RESET)
            cell.stop(StopReason.CLOSE)
            await cell.finished.wait()
    assert cell.outcome == Outcome(
        Status.KILLED, state_kept=False, cause="the session was reset", execution_count=None
    )


async def run(kernel: FakeKernel, cell: Cell) -> None:
    """Run a cell that has more time to obey than the test."""
    ended = await run_cell(cast(Kernel, kernel), cell, grace_s=1000, cpu_s=0, clock=FakeClock())
    cell.finish(ended, 0.0)
