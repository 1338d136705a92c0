"""The doctor's report: what is shown of what was found."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kernel_mcp.commands.doctor.examine import (
    Diagnosis,
    Examination,
    _entrance,
    _summed_up,
    _TrialRunner,
    _versions,
    as_json,
    as_text,
)
from kernel_mcp.commands.doctor.trials import Trial, TrialKernel
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError, LaunchError
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.sandbox import remedies
from kernel_mcp.sandbox.base import SandboxReport
from kernel_mcp.sandbox.self_test import Check

pytestmark = pytest.mark.anyio

REPORT = SandboxReport("bwrap", ("everything",), ("a gap",), frozenset({"own namespaces"}))
GOOD = Check("network closed", True, "none")
GAP = Check("own namespaces", False, "shared: pid")
BAD = Check("not root", False, "user 0", "do this")


def diagnosis(*checks: Check, used: str = "bwrap", report: SandboxReport = REPORT) -> Diagnosis:
    examination = Examination(report.backend, checks=checks, report=report)
    return Diagnosis({"linux": "6.1"}, (examination,), used)


def test_a_backend_holds_with_gaps_it_admits_and_not_with_others() -> None:
    assert diagnosis(GOOD, GAP).holds
    assert not diagnosis(GOOD, BAD).holds
    assert not diagnosis(GOOD, used="").holds
    assert not Diagnosis({}, (), "bwrap").holds


@pytest.mark.parametrize(
    ("version", "told"), [("3.12.1", "off: on in 3.13.0"), ("3.13.0", "Python 3.13.0")]
)
def test_where_references_are_counted_in_each_kernel_is_told(version: str, told: str) -> None:
    environment = KernelEnvironment(Path("/usr/bin/python3"), (), version=version)
    assert told in _versions(environment)["kernel"]
    assert ("off" in told) == ("off" in _versions(environment)["kernel"])


def test_a_backend_that_enforces_nothing_never_holds() -> None:
    nothing = SandboxReport("none", (), ("nothing is enforced",))
    found = diagnosis(GOOD, used="none", report=nothing)
    assert not found.holds
    assert "none: is no boundary" in as_text(found, colour=False, verbose=True)


def test_the_table_says_what_fails_and_what_to_do() -> None:
    text = as_text(diagnosis(GOOD, GAP, BAD), colour=False, verbose=True)
    assert "bwrap: does NOT hold" in text
    assert "ok    network closed" in text
    assert "gap   own namespaces  shared: pid" in text
    assert "FAILS not root" in text
    assert "what to do: do this" in text
    assert "    - a gap" in text
    assert "uses bwrap, which does not hold" in text
    assert "\x1b" not in text
    assert "\x1b[31m" in as_text(diagnosis(BAD), colour=True)


def test_only_what_is_not_well_is_said_and_the_verdict_last() -> None:
    text = as_text(diagnosis(GOOD, GAP, BAD), colour=False)
    assert "FAILS not root  user 0\n        what to do: do this" in text
    assert "network closed" not in text
    assert text.splitlines()[-1] == "A server with these flags uses bwrap, which does not hold."
    well = as_text(diagnosis(GOOD, GAP), colour=False)
    assert well == "A server with these flags uses bwrap, which holds."
    weaker = Examination("landlock", problem="this Linux has none")
    both = replace(diagnosis(GOOD), examinations=(weaker, *diagnosis(GOOD).examinations))
    assert as_text(both, colour=False) == well


def test_a_backend_that_cannot_be_used_says_why() -> None:
    refusal = "not installed\nDo this instead"
    broken = Diagnosis({}, (Examination("bwrap", problem="not installed\nDo that"),), "", refusal)
    text = as_text(broken, colour=False)
    assert "bwrap: cannot be used\n  not installed\n  Do that" in text
    assert "would not start" in text
    assert "What you can do:\n    - Do this instead\n\n" in text
    assert text.splitlines()[-1].startswith("A server with these flags would not start")


def test_what_can_be_done_is_said_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedies, "_MARKS", {})
    monkeypatch.setattr(remedies, "_SYSTEMD", Path("/"))
    monkeypatch.setattr(remedies, "_UNIFIED", Path("/"))
    weak = SandboxReport("bwrap", ("everything",), ("no cgroup limits memory",))
    found = replace(diagnosis(GOOD, report=weak), missing=("--allow x is left out: why",))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert found.advice[0] == "--allow x is left out: why"
    assert "systemd-run --user --scope" in found.advice[1]
    assert f"{found.advice[1]}\n\nA server" in as_text(found, colour=False)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert "a watchdog hold" in found.advice[1]
    assert as_json(found)["advice"] == found.advice
    assert "What you can do" not in as_text(diagnosis(GOOD), colour=False)


def test_the_json_form_is_complete() -> None:
    found = json.loads(json.dumps(as_json(diagnosis(GOOD, GAP, BAD))))
    (backend,) = found["backends"]
    assert found["holds"] is False
    assert found["used"] == "bwrap"
    assert {check["name"]: check["state"] for check in backend["checks"]} == {
        "network closed": "ok",
        "own namespaces": "gap",
        "not root": "fails",
    }
    assert backend["checks"][2]["remedy"] == "do this"
    assert backend["gaps"] == ["a gap"]


def test_system_calls_are_counted_and_only_those_that_pass_are_named() -> None:
    held, passed = (
        Check("system call bpf refused", True, "EPERM"),
        Check("system call acct refused", False, "done"),
    )
    checks = _summed_up([GOOD, held, passed])
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
