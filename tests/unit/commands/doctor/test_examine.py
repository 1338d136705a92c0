"""The doctor's examination: trials in kernels, and what keeps clients out."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kernel_mcp.commands.doctor.examine import _entrance, _summed_up, _TrialRunner, _versions
from kernel_mcp.commands.doctor.trials import Trial, TrialKernel
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError, LaunchError
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.sandbox.self_test import Check

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("version", "told"), [("3.12.1", "off: on in 3.13.0"), ("3.13.0", "Python 3.13.0")]
)
def test_where_references_are_counted_in_each_kernel_is_told(version: str, told: str) -> None:
    environment = KernelEnvironment(Path("/usr/bin/python3"), (), version=version)
    assert told in _versions(environment)["kernel"]
    assert ("off" in told) == ("off" in _versions(environment)["kernel"])


def test_system_calls_are_counted_and_only_those_that_pass_are_named() -> None:
    held, passed = (
        Check("system call bpf refused", True, "EPERM"),
        Check("system call acct refused", False, "done"),
    )
    checks = _summed_up([Check("network closed", True, "none"), held, passed])
    assert [check.name for check in checks] == [
        "network closed",
        "dangerous system calls refused",
        "system call acct refused",
    ]
    assert checks[1].found == "1 of 2"


class Runner(_TrialRunner):
    """Kernels that are names alone; `started` counts them, `broken` are those that never start."""

    def __init__(self, *trials: Trial, broken: tuple[int, ...] = ()) -> None:
        nothing: Any = None
        super().__init__(nothing, Path(), environment=nothing, variables=(), trials=trials)
        self.started, self.open = 0, 0
        self._broken = broken

    @asynccontextmanager
    async def _kernel(self) -> AsyncIterator[TrialKernel]:
        self.started += 1
        if self.started in self._broken:
            raise LaunchError("no kernel today")
        kernel: Any = SimpleNamespace(dead=anyio.Event(), number=self.started)
        async with anyio.create_task_group():
            self.open += 1
            yield TrialKernel(kernel, Path())
            self.open -= 1


def trial(name: str, *, ends: bool = False, fails: bool = False) -> Trial:
    """A trial that tells in which kernel it was."""

    async def perform(target: TrialKernel) -> list[Check]:
        if ends:
            target.kernel.dead.set()
        if fails:
            raise LaunchError("not here")
        number: Any = target.kernel
        return [Check(name, True, str(number.number))]

    return Trial(name, perform)


async def test_trials_share_a_kernel_for_as_long_as_it_lives() -> None:
    runner = Runner(trial("a"), trial("b", ends=True), trial("c"), trial("d"))
    found = await runner.perform_all()
    assert [(check.name, check.found) for check in found] == [
        ("a", "1"),
        ("b", "1"),
        ("c", "2"),
        ("d", "2"),
    ]
    assert (runner.started, runner.open) == (2, 0)


async def test_what_cannot_be_tried_fails_and_the_others_are_tried() -> None:
    runner = Runner(trial("a"), trial("b", fails=True), trial("c", ends=True), trial("d"))
    found = await runner.perform_all()
    assert [check.passed for check in found] == [True, False, True, True]
    assert found[1].found == "could not be tried: not here"
    assert "defect" not in found[1].remedy
    runner = Runner(trial("a"), trial("b"), broken=(1,))
    found = await runner.perform_all()
    assert [(check.name, check.found) for check in found] == [
        ("a", "could not be tried: no kernel today"),
        ("b", "2"),
    ]


def test_a_port_that_is_taken_and_a_file_of_tokens_that_is_not_there_are_told(
    tmp_path: Path,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        settings = Settings(http=("127.0.0.1", taken.getsockname()[1]))
        (told,) = _entrance(settings)
        assert "nothing can listen there" in told
    assert _entrance(settings) == []
    with pytest.raises(ConfigError, match="there is no such file"):
        _entrance(replace(settings, tokens=tmp_path / "none"))
