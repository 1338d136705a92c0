"""The doctor's diagnosis: what is shown of what was found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_mcp.commands.doctor.diagnosis import Diagnosis, Examination, as_json, as_text
from kernel_mcp.sandbox import remedies
from kernel_mcp.sandbox.base import SandboxReport
from kernel_mcp.sandbox.self_test import Check

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


def test_a_kernel_that_fails_is_told_apart_from_the_sandbox() -> None:
    kernels = (Check("kernel r", True, "R 4.2.2, runs cells"), Check("kernel x", False, "no", "do"))
    found = replace(diagnosis(GOOD), kernels=kernels)
    text = as_text(found, colour=False)
    assert not found.holds
    assert "ok    kernel r: R 4.2.2, runs cells\nFAILS kernel x: no\n      what to do: do" in text
    assert text.endswith("uses bwrap, which holds.")


@pytest.mark.parametrize("verbose", [False, True])
def test_servers_of_tools_are_named_as_they_run_outside_the_sandbox(verbose: bool) -> None:
    found = replace(diagnosis(GOOD), tools=("crm: the program crm-mcp",))
    text = as_text(found, colour=False, verbose=verbose)
    assert text.count("Outside any sandbox, code calls tools of:\n    - crm: the program") == 1


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


def test_what_could_not_be_tried_is_no_breach() -> None:
    untried = Check("forked: no network", False, "could not be tried: no files", tried=False)
    found = diagnosis(GOOD, GAP, untried)
    text = as_text(found, colour=False)
    assert "bwrap: could not be tried\n  ?     forked: no network" in text
    assert "what to do" not in text
    assert text.splitlines()[-1].endswith("bwrap, of which not everything could be tried here.")
    assert not found.holds
    assert "bwrap, which does not hold" in as_text(diagnosis(BAD, untried), colour=False)
