"""The doctor's report: what is shown of what was found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_mcp.commands.doctor.examine import Diagnosis, Examination, _summed_up, as_json, as_text
from kernel_mcp.sandbox import remedies
from kernel_mcp.sandbox.base import SandboxReport
from kernel_mcp.sandbox.probe import Check

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


def test_a_backend_that_enforces_nothing_never_holds() -> None:
    nothing = SandboxReport("none", (), ("nothing is enforced",))
    found = diagnosis(GOOD, used="none", report=nothing)
    assert not found.holds
    assert "none: is no boundary" in as_text(found, colour=False)


def test_the_table_says_what_fails_and_what_to_do() -> None:
    text = as_text(diagnosis(GOOD, GAP, BAD), colour=False)
    assert "bwrap: does NOT hold" in text
    assert "ok    network closed" in text
    assert "gap   own namespaces  shared: pid" in text
    assert "FAILS not root" in text
    assert "what to do: do this" in text
    assert "    - a gap" in text
    assert "uses bwrap, which does not hold" in text
    assert "\x1b" not in text
    assert "\x1b[31m" in as_text(diagnosis(BAD), colour=True)


def test_a_backend_that_cannot_be_used_says_why() -> None:
    refusal = "not installed\nDo this instead"
    broken = Diagnosis({}, (Examination("bwrap", problem="not installed\nDo that"),), "", refusal)
    text = as_text(broken, colour=False)
    assert "bwrap: cannot be used\n  not installed\n  Do that" in text
    assert "would not start" in text
    assert text.endswith("What you can do:\n    - Do this instead")


def test_what_can_be_done_is_said_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedies, "_MARKS", {})
    monkeypatch.setattr(remedies, "_SYSTEMD", Path("/"))
    monkeypatch.setattr(remedies, "_UNIFIED", Path("/"))
    weak = SandboxReport("bwrap", ("everything",), ("no cgroup limits memory",))
    found = replace(diagnosis(GOOD, report=weak), missing=("--allow x is left out: why",))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert found.advice[0] == "--allow x is left out: why"
    assert "systemd-run --user --scope" in found.advice[1]
    assert as_text(found, colour=False).endswith(found.advice[1])
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
