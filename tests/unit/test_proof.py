"""The last results of `.ci/full`, as they are recorded and written into a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import proof
from tests.proof import Counts, Result, Run

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests">
 <testsuite name="3.12.3" errors="1" failures="1" skipped="1" tests="6">
  <testcase classname="tests.unit.test_a" name="test_one" time="0.1" />
  <testcase classname="tests.unit.test_a" name="test_two">
   <failure message="no">why</failure></testcase>
  <testcase classname="tests.unit.test_a" name="test_three">
   <skipped message="no podman" /></testcase>
  <testcase classname="tests.escape.test_escape" name="test_x[bwrap]" />
  <testcase classname="tests.escape.test_escape" name="test_y">
   <error message="no">why</error></testcase>
  <testcase classname="tests.integration.test_state_table" name="test_undo[own]" />
 </testsuite>
</testsuites>
"""
RUN = Run("3.12.3", Counts(3, 2, 1), attacks=Counts(1, 1, 0), rows=Counts(1, 0, 0))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of results, in a folder of this test."""
    monkeypatch.setattr(proof, "RESULTS", tmp_path / "results.json")
    return tmp_path / "results.json"


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """A folder with one report."""
    folder = tmp_path / "reports"
    folder.mkdir()
    (folder / "a.xml").write_text(REPORT)
    return folder


def row(step: str) -> str:
    """Return the row of a step in the table of steps."""
    (found,) = re.findall(
        rf"^\| `{step}` \|.*$", proof.tables(proof.loaded()).partition("\n## By")[0], re.MULTILINE
    )
    return str(found)


def test_a_report_is_counted_by_outcome_and_kind(reports: Path) -> None:
    assert Run.read(reports / "a.xml") == RUN


def test_a_failed_step_is_recorded_as_failed(results: Path, reports: Path) -> None:
    proof.main("image", "2", "abcdef123456+", "61", str(reports))
    (step, result), *others = proof.loaded().items()
    assert (step, others) == ("image", [])
    assert result == Result(False, result.date, "abcdef123456+", 61, (RUN,))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", result.date)
    expected = f"**failed** | 3 | 2 | 1 | 1 | 3.12.3 | {result.date} | `abcdef123456+` |"
    assert row("image").endswith(expected)


def test_a_later_result_replaces_the_earlier_one_and_no_other(results: Path, reports: Path) -> None:
    proof.main("load", "1", "one", "60", str(reports))
    proof.main("fleet", "0", "one", "60", str(reports))
    proof.main("load", "0", "two", "60", str(reports))
    assert [(step, each.commit, each.ok) for step, each in proof.loaded().items()] == [
        ("fleet", "one", True),
        ("load", "two", True),
    ]


def test_a_step_that_wrote_no_report_has_counts_of_zero(results: Path, tmp_path: Path) -> None:
    proof.main("clients", "1", "one", "3", str(tmp_path / "none"))
    assert "| **failed** | 0 | 0 | 0 | 0 |  |" in row("clients")


def test_the_page_says_which_steps_have_no_result(results: Path, reports: Path) -> None:
    assert all(proof.NONE_YET in row(step) for step in proof.STEPS)
    proof.main("load", "0", "one", "60", str(reports))
    assert proof.NONE_YET not in row("load")
    assert proof.NONE_YET in row("user")


def test_attacks_and_rows_are_listed_for_each_python(results: Path, reports: Path) -> None:
    (reports / "b.xml").write_text(REPORT.replace("3.12.3", "3.13.1"))
    proof.main("pythons", "0", "one", "60", str(reports))
    table = proof.tables(proof.loaded()).partition("## By Python")[2]
    for python in ("3.12.3", "3.13.1"):
        assert f"| `pythons` | {python} | attacks | 1 | 1 | 0 |" in table
        assert f"| `pythons` | {python} | state table | 1 | 0 | 0 |" in table


def test_the_steps_are_those_of_the_command() -> None:
    text = (Path(proof.__file__).parents[1] / ".ci/full").read_text()
    assert re.findall(r"^#   ([a-z]+) ", text, re.MULTILINE) == list(proof.STEPS)
    assert all(re.search(rf"^{step}\(\) \{{", text, re.MULTILINE) for step in proof.STEPS)
