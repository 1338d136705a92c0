"""How a cell ends that is stopped, or that its kernel has lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.kernels.run import Run
from kernel_mcp.linux.proc import Usage
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.sessions import execution
from kernel_mcp.sessions.cell import Cell, CellOutcome, Status, StopReason
from kernel_mcp.sessions.execution import run_cell
from tests.unit.fake_kernels import FakeKernel, FakeSource

pytestmark = [pytest.mark.anyio]


class LateKernel(FakeKernel):
    """Answers only when it is killed, as a reply that was on its way would arrive."""

    def interrupt(self, *, alone: bool = False) -> None:
        """Do not react."""

    def kill(self) -> None:
        run = cast(Run, self._waiting)
        run.on_reply({"status": "error", "ename": "KeyboardInterrupt", "evalue": ""})
        run.on_idle()
        self.die()


async def stopped(kernel: FakeKernel, folder: Path, reason: StopReason) -> CellOutcome:
    """The outcome of a cell that waits for ever and is told to stop."""
    cell = Cell(1, "wait", 0, OutputLog(folder, 1))
    cell.started = 0.0
    cell.stop(reason)
    with anyio.fail_after(60):
        return await run_cell(cast(Kernel, kernel), cell, grace_s=0.01, cpu_s=0)


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
    cell.started = 0.0
    cell.stop(StopReason.CANCEL)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, kernel, cell)
            await anyio.wait_all_tasks_blocked()
            assert kernel.exit is None
            cell.stop(StopReason.RESET)
            cell.stop(StopReason.CLOSE)
            await cell.finished.wait()
    assert cell.outcome == CellOutcome(
        Status.KILLED, state_kept=False, cause="the session was reset", exit_code=7
    )


async def run(kernel: FakeKernel, cell: Cell) -> None:
    """Run a cell that has more time to obey than the test."""
    ended = await run_cell(cast(Kernel, kernel), cell, grace_s=1000, cpu_s=0)
    cell.finish(ended, 0.0)


class AskedKernel:
    """Answers questions with `replies` in turn, the last one for ever; None is no answer.

    It takes requests from the `hears`th question on. That of the cell `sends` has output
    meanwhile; one that `floods` is read in turns.
    """

    def __init__(
        self,
        *replies: dict[str, Any] | None,
        cpu_s: float = 0.0,
        hears: int = 0,
        sends: Run | None = None,
        floods: bool = False,
        pid: int = -1,
    ) -> None:
        self.handle = self
        self.pid = pid
        self._sends = sends
        self._floods = floods
        self.rests = 0
        self.stopped = self.broken = False
        self.extended = True
        self.told: list[str] = []
        self._hears = hears
        self.asked = 0
        self.on_asked: Callable[[], None] = lambda: None
        self._replies = replies
        self._cpu_s = cpu_s

    @property
    def taken(self) -> bool:
        return self.asked >= self._hears

    def send_probe(self) -> None:
        assert self.taken

    def usage(self) -> Usage:
        return Usage(self.asked * self._cpu_s)

    async def ask(self, kind: str, content: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        reply = self._replies[min(self.asked, len(self._replies) - 1)]
        self.asked += 1
        self.rests += self._floods
        if self._sends is not None:
            self._sends.outputs += 1
        self.on_asked()
        if reply is None:
            raise LaunchError("no answer")
        return reply


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "AGAIN_S", "MOST_PAUSE_S"):
        monkeypatch.setattr(execution, name, 0.001)


async def looked(kernel: AskedKernel, run: Run, most: int) -> bool:
    """Return the outcome; the cell ends after `most` questions."""

    def end() -> None:
        if kernel.asked >= most:
            run.finished.set()

    kernel.on_asked = end
    with anyio.fail_after(30):
        return await execution.wait_until_ended(kernel, run, None, kernel.told.append)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("replies", "looks"),
    [
        (({"idle": True},), execution.IDLE_LOOKS),
        (({"idle": False}, {"idle": True}), 1 + execution.IDLE_LOOKS),
        (({"idle": True}, {}, {"idle": True}), 2 + execution.IDLE_LOOKS),
        ((None,), execution.UNRESPONSIVE_LOOKS),
    ],
)
async def test_a_kernel_without_work_has_lost_the_cell(
    replies: tuple[dict[str, Any] | None, ...], looks: int
) -> None:
    kernel = AskedKernel(*replies)
    assert not await looked(kernel, Run(lambda _event: None), 99)
    assert kernel.asked == looks
    assert kernel.broken


async def test_a_kernel_at_work_is_waited_for() -> None:
    run = Run(lambda _event: None)
    assert await looked(AskedKernel({"idle": False}), run, 9)
    assert await looked(AskedKernel(None, cpu_s=1.0), Run(lambda _event: None), 9)
    talks = Run(lambda _event: None)
    assert await looked(AskedKernel(None, sends=talks), talks, 9)
    assert await looked(AskedKernel(None, floods=True), Run(lambda _event: None), 9)
    stopped = AskedKernel(None)
    stopped.stopped = True
    assert await looked(stopped, Run(lambda _event: None), 9)
    answered = Run(lambda _event: None)
    answered.on_reply({"status": "ok"})
    assert await looked(AskedKernel({"idle": True}), answered, 9)


async def test_a_kernel_that_waits_for_a_processor_has_not_lost_the_cell() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            starved = AskedKernel({"idle": True}, pid=busy.pid)
            assert await looked(starved, Run(lambda _event: None), 9)
        finally:
            busy.kill()
    gone = AskedKernel({"idle": True}, pid=busy.pid)
    assert not await looked(gone, Run(lambda _event: None), 99)


async def test_code_that_lets_nobody_answer_is_waited_for_and_told_once() -> None:
    holds = AskedKernel(None, hears=99)
    assert await looked(holds, Run(lambda _event: None), 9)
    assert holds.told == [execution.HELD]
    assert not holds.broken
    lets_go = AskedKernel(*[None] * 5, {"idle": False}, hears=5)
    assert await looked(lets_go, Run(lambda _event: None), 9)
    breaks = AskedKernel(None, hears=5)
    assert not await looked(breaks, Run(lambda _event: None), 99)
    assert breaks.asked == 4 + execution.UNRESPONSIVE_LOOKS
