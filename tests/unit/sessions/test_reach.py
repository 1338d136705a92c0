"""A kernel that has lost a cell is told from one that is busy with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.run import Run
from kernel_mcp.linux.proc import Usage
from kernel_mcp.sessions import execution

pytestmark = [pytest.mark.anyio]


class FakeKernel:
    """Answers questions with `replies` in turn, the last one for ever; None is no answer.

    It takes requests from the `hears`th question on. That of the cell `sends` has output
    meanwhile.
    """

    def __init__(
        self,
        *replies: dict[str, Any] | None,
        cpu_s: float = 0.0,
        hears: int = 0,
        sends: Run | None = None,
    ) -> None:
        self.handle = self
        self._sends = sends
        self.stopped = self.broken = False
        self.told: list[str] = []
        self._hears = hears
        self.asked = 0
        self.on_asked: Callable[[], None] = lambda: None
        self._replies = replies
        self._cpu_s = cpu_s

    @property
    def taken(self) -> bool:
        return self.asked >= self._hears

    def knock(self) -> None:
        assert self.taken

    def usage(self) -> Usage:
        return Usage(self.asked * self._cpu_s)

    async def ask(self, kind: str, content: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        reply = self._replies[min(self.asked, len(self._replies) - 1)]
        self.asked += 1
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


async def looked(kernel: FakeKernel, run: Run, most: int) -> bool:
    """What comes of it; the cell ends after `most` questions."""

    def end() -> None:
        if kernel.asked >= most:
            run.finished.set()

    kernel.on_asked = end
    with anyio.fail_after(30):
        return await execution.ended(kernel, run, None, kernel.told.append)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("replies", "looks"),
    [
        (({"idle": True},), execution.IDLE_LOOKS),
        (({"idle": False}, {"idle": True}), 1 + execution.IDLE_LOOKS),
        (({"idle": True}, {}, {"idle": True}), 2 + execution.IDLE_LOOKS),
        ((None,), execution.DEAF_LOOKS),
    ],
)
async def test_a_kernel_without_work_has_lost_the_cell(
    replies: tuple[dict[str, Any] | None, ...], looks: int
) -> None:
    kernel = FakeKernel(*replies)
    assert not await looked(kernel, Run(lambda _event: None), 99)
    assert kernel.asked == looks
    assert kernel.broken


async def test_a_kernel_at_work_is_waited_for() -> None:
    run = Run(lambda _event: None)
    assert await looked(FakeKernel({"idle": False}), run, 9)
    assert await looked(FakeKernel(None, cpu_s=1.0), Run(lambda _event: None), 9)
    talks = Run(lambda _event: None)
    assert await looked(FakeKernel(None, sends=talks), talks, 9)
    stopped = FakeKernel(None)
    stopped.stopped = True
    assert await looked(stopped, Run(lambda _event: None), 9)
    answered = Run(lambda _event: None)
    answered.on_reply({"status": "ok"})
    assert await looked(FakeKernel({"idle": True}), answered, 9)


async def test_code_that_lets_nobody_answer_is_waited_for_and_told_once() -> None:
    holds = FakeKernel(None, hears=99)
    assert await looked(holds, Run(lambda _event: None), 9)
    assert holds.told == [execution.HELD]
    assert not holds.broken
    lets_go = FakeKernel(*[None] * 5, {"idle": False}, hears=5)
    assert await looked(lets_go, Run(lambda _event: None), 9)
    breaks = FakeKernel(None, hears=5)
    assert not await looked(breaks, Run(lambda _event: None), 99)
    assert breaks.asked == 4 + execution.DEAF_LOOKS
