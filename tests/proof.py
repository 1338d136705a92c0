"""Records the last result of each step of `.ci/full`, and writes them as tables for docs/proof.md.

`.ci/full` calls it after each step: `python -m tests.proof STEP STATUS COMMIT SECONDS REPORTS`.
All counts are from the reports that pytest writes (`--junitxml`), one for each run of it. The name
of a report's suite is the Python that ran it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree as ET

RESULTS = Path(__file__).parents[1] / ".ci/results.json"
STEPS = {
    "exhaustive": "every test, the long ones included",
    "pythons": "the tests on each Python of the machine; the state table on all of them",
    "user": "the tests as an ordinary user",
    "clients": "MCP clients of other projects",
    "libraries": "libraries of data analysis, and what a death leaves of them",
    "image": "the image of the server under podman",
    "languages": "sessions and attacks in other languages",
    "fleet": "three machines of a fleet on loopback",
    "load": "the tests while every processor is busy",
    "newest": "the tests on the newest dependencies that are allowed",
}
"""The steps of `.ci/full`."""
ATTACKS = "tests.escape."
STATE_TABLE = "tests.integration.test_state_table"
NONE_YET = "no result yet"


@dataclass(frozen=True)
class Counts:
    """Numbers of tests by outcome."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped
        )

    @classmethod
    def of(cls, case: ET.Element) -> Counts:
        """Return the outcome of one test of a report."""
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            return cls(failed=1)
        return cls(skipped=1) if "skipped" in kinds else cls(passed=1)


@dataclass(frozen=True)
class Run:
    """One run of pytest: all tests, and among them the attacks and the rows of the state table."""

    python: str
    tests: Counts = Counts()
    attacks: Counts = Counts()
    rows: Counts = Counts()

    @classmethod
    def read(cls, report: Path) -> Run:
        """Read a report. Raises OSError and ParseError."""
        suites = ET.parse(report).getroot()
        run = cls(next(suites.iter("testsuite")).get("name", ""))
        for case in suites.iter("testcase"):
            count, name = Counts.of(case), case.get("classname", "")
            run = replace(run, tests=run.tests + count)
            if name.startswith(ATTACKS):
                run = replace(run, attacks=run.attacks + count)
            elif name.startswith(STATE_TABLE):
                run = replace(run, rows=run.rows + count)
        return run


@dataclass(frozen=True)
class Result:
    """The last result of a step; `date` is its end in UTC, `commit` ends in + after changes."""

    ok: bool
    date: str
    commit: str
    duration_s: int
    runs: tuple[Run, ...]

    @property
    def tests(self) -> Counts:
        """All tests of its runs."""
        return sum((run.tests for run in self.runs), Counts())

    @property
    def pythons(self) -> str:
        """The releases that its tests ran on, each once."""
        return ", ".join(dict.fromkeys(run.python for run in self.runs))


def loaded() -> dict[str, Result]:
    """Return the recorded results by step; empty before the first."""
    if not RESULTS.exists():
        return {}
    return {step: _result(each) for step, each in json.loads(RESULTS.read_text()).items()}


def _result(stored: Mapping[str, object]) -> Result:
    fields = dict(stored)
    runs = fields.pop("runs")
    assert isinstance(runs, list)
    made = (
        Run(each.pop("python"), **{name: Counts(**counts) for name, counts in each.items()})
        for each in runs
    )
    return Result(runs=tuple(made), **fields)  # type: ignore[arg-type]


def record(step: str, result: Result) -> None:
    """Replace the recorded result of a step."""
    results = {**loaded(), step: result}
    stored = {name: asdict(results[name]) for name in STEPS if name in results}
    RESULTS.write_text(json.dumps(stored, indent=2) + "\n")


def tables(results: Mapping[str, Result]) -> str:
    """Return the generated part of docs/proof.md."""
    return "\n".join(("## Steps\n", *_steps(results), "", "## By Python\n", *_pythons(results), ""))


def _steps(results: Mapping[str, Result]) -> Iterator[str]:
    yield "| step | tests | result | passed | failed | skipped | minutes | Python | UTC | commit |"
    yield "|---|---|---|--:|--:|--:|--:|---|---|---|"
    for step, words in STEPS.items():
        if (each := results.get(step)) is None:
            yield f"| `{step}` | {words} | {NONE_YET} | | | | | | | |"
            continue
        tests = each.tests
        yield (
            f"| `{step}` | {words} | {'passed' if each.ok else '**failed**'} | {_cells(tests)} | "
            f"{each.duration_s / 60:.0f} | {each.pythons} | {each.date} | `{each.commit}` |"
        )


def _pythons(results: Mapping[str, Result]) -> Iterator[str]:
    yield "| step | Python | | passed | failed | skipped |"
    yield "|---|---|---|--:|--:|--:|"
    empty = True
    for step in (each for each in STEPS if each in results):
        for run in results[step].runs:
            for kind, counts in (("attacks", run.attacks), ("state table", run.rows)):
                if counts != Counts():
                    empty = False
                    yield f"| `{step}` | {run.python} | {kind} | {_cells(counts)} |"
    if empty:
        yield f"| {NONE_YET} | | | | | |"


def _cells(counts: Counts) -> str:
    return f"{counts.passed} | {counts.failed} | {counts.skipped}"


def main(step: str, status: str, commit: str, seconds: str, reports: str) -> None:
    """Record what the reports of a folder say of a step that ended with this status."""
    found = sorted(Path(reports).glob("*.xml"), key=lambda path: path.stat().st_mtime_ns)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    runs = tuple(map(Run.read, found))
    record(step, Result(status == "0", now, commit, int(seconds), runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
