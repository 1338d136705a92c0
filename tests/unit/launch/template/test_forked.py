"""The end of a kernel that a checkpoint has forked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kernel_mcp.launch.template import forked
from kernel_mcp.launch.template.forked import ResumedProcess

pytestmark = pytest.mark.anyio


class Sandbox:
    """Stands for the sandbox that kernels share."""

    def __init__(self, *, needed: bool) -> None:
        self.tail: Any = None
        self.init: Any = SimpleNamespace(pid=1)
        self.killed = False
        self._needed = needed

    def needed(self, _beside: object) -> bool:
        """Say what was chosen."""
        return self._needed

    def kill(self) -> None:
        """Note it."""
        self.killed = True


@pytest.mark.parametrize("needed", [True, False])
async def test_its_status_is_that_which_its_checkpoint_reports(
    monkeypatch: pytest.MonkeyPatch, needed: bool
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    report: list[Callable[[int], None]] = []
    checkpoint: Any = SimpleNamespace(when_ended=lambda _number, call: report.append(call))
    resumed: Any = SimpleNamespace(pid=child.pid, pidfd=os.pidfd_open(child.pid), number=7)
    monkeypatch.setattr(forked, "wait_status", lambda _pidfd: None)
    sandbox, ends = Sandbox(needed=needed), list[object]()
    process = ResumedProcess(resumed, checkpoint, sandbox)
    process.begin(ends.append)
    assert process.pids == [1, child.pid]
    process.kill()
    assert sandbox.killed is not needed
    with anyio.fail_after(60):
        await process.gone()
    assert ends == []
    report[0](9)
    assert ends == [-9]
    child.communicate()
    process.close()


async def test_without_any_status_its_end_is_reported_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forked, "STATUS_S", 0.01)
    monkeypatch.setattr(forked, "wait_status", lambda _pidfd: None)
    child = subprocess.Popen([sys.executable, "-c", ""])
    checkpoint: Any = SimpleNamespace(when_ended=lambda _number, _call: None)
    resumed: Any = SimpleNamespace(pid=child.pid, pidfd=os.pidfd_open(child.pid), number=7)
    process = ResumedProcess(resumed, checkpoint, Sandbox(needed=False))
    ended = anyio.Event()
    codes: list[object] = []

    def on_end(code: object) -> None:
        codes.append(code)
        ended.set()

    process.begin(on_end)
    with anyio.fail_after(60):
        await ended.wait()
    assert codes == [None]
    child.wait()
    process.close()
