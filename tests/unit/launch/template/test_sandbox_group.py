"""Which of several kernels ends where all of them together have too much memory."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_mcp.launch.template import sandbox_group
from kernel_mcp.launch.template.sandbox_group import ForkedSandboxGroup
from kernel_mcp.linux.proc import ExitStatus

pytestmark = pytest.mark.anyio

KILLED = ExitStatus(signal=signal.SIGKILL)


class Kernel:
    def __init__(self, pid: int, killed: list[int]) -> None:
        self.pid = pid
        self.exit: ExitStatus | None = None
        self.process = SimpleNamespace(explain=lambda status: status)
        self._killed = killed

    def kill(self) -> None:
        self._killed.append(self.pid)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Kernel], list[int]]:
    """An sandbox_group with two kernels, the second of which holds more."""
    killed: list[int] = []
    kernels = [Kernel(10, killed), Kernel(20, killed)]
    made: Any = ForkedSandboxGroup.__new__(ForkedSandboxGroup)
    made._kernels, made._ending = kernels, None
    made._limits = SimpleNamespace(cause="out of memory (limit 1 GiB)")
    monkeypatch.setattr(sandbox_group, "tree", lambda pid: [pid])
    monkeypatch.setattr(sandbox_group, "_held_now", lambda pid: pid)
    return made, kernels, killed


async def test_the_largest_ends_and_the_next_one_once_what_it_held_counts_no_more(
    family: tuple[Any, list[Kernel], list[int]],
) -> None:
    made, (_, large), killed = family
    for _ in range(3):
        made._kill_largest()
    assert killed == [20]
    large.exit = KILLED
    made._kill_largest()  # by what was measured before it had ended
    assert killed == [20]
    made._kill_largest()
    assert killed == [20, 10]


async def test_its_end_has_its_reason_whatever_other_cells_do_meanwhile(
    family: tuple[Any, list[Kernel], list[int]],
) -> None:
    made, (small, large), _ = family
    made._kill_largest()
    made._limits.cause = ""  # a cell of the other one has ended
    assert large.process.explain(KILLED).cause == "out of memory (limit 1 GiB)"
    assert large.process.explain(ExitStatus(code=7)).cause == ""
    assert small.process.explain(KILLED).cause == ""
