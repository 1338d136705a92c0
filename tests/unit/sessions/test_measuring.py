"""Meters hear what the audit trail hears."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.sessions.audit import Audit, Journal
from kernel_mcp.sessions.cell import Cell, CellOutcome, Status, StopReason
from kernel_mcp.sessions.measuring import Measured, cause_of
from kernel_mcp.telemetry import Meters


class Heard(Meters):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def cell(self, outcome: str, seconds: float) -> None:
        self.events.append(("cell", outcome, seconds))

    def kill(self, cause: str) -> None:
        self.events.append(("kill", cause))

    def start(self, kind: str, seconds: float) -> None:
        self.events.append(("start", kind, seconds))

    def failed_start(self) -> None:
        self.events.append(("failed",))

    def hibernation(self, way: str) -> None:
        self.events.append((way,))

    def install(self, outcome: str) -> None:
        self.events.append(("install", outcome))

    def refusal(self, reason: str) -> None:
        self.events.append(("refusal", reason))


class Written(Journal):
    """Keeps the names of the events of a trail."""

    def __init__(self, names: list[str]) -> None:
        for name in [each for each in vars(Journal) if not each.startswith("_")]:
            setattr(self, name, lambda *_, _name=name, **__: names.append(_name))


class Trail(Audit):
    def __init__(self) -> None:
        self.names: list[str] = []

    def journal(self, who: str, session: str) -> Journal:
        return Written(self.names)


def cell(folder: Path, outcome: CellOutcome) -> Cell:
    made = Cell(1, "x", 0, OutputLog(folder, 1))
    made.started = 1.0
    made.finish(outcome, 3.5)
    return made


EVENTS: dict[str, Any] = {
    "opened": {"name": "", "packages": (), "python": ""},
    "closed": {"cells": 1},
    "begins": {"handle": None},
    "died": {"cause": "the kernel was killed by SIGKILL: out of memory"},
    "started": {"kind": "pooled", "seconds": 0.5},
    "not_started": {},
    "checkpointed": {"cell": 1},
    "revived": {"cell": 1},
    "undone": {"cells": [1]},
    "branched": {"handles": ["s-1"]},
    "adopted": {"handle": "s-1"},
    "hibernated": {"saved": 1, "lost": 0, "size": 9, "cause": ""},
    "woke": {"back": 1, "lost": 0},
    "resumed": {"saved": 1.0, "cells": 2},
    "installed": {"packages": ["a"], "outcome": "no", "done": False},
    "wrote": {"path": "a", "size": 1, "content": "x"},
    "uploaded": {"path": "a", "size": 1, "sha256": "0"},
    "removed": {"path": "a"},
    "connected": {"facts": {"verdict": "refused"}},
}


def test_the_trail_hears_every_event_as_before(tmp_path: Path) -> None:
    trail = Trail()
    journal = Measured(trail, Meters()).journal("ada", "s-1")
    done = cell(tmp_path, CellOutcome(Status.OK))
    facts = {**EVENTS, "ran": {"cell": done}, "refused": {"cell": done, "reasons": "no"}}
    events = [each for each in vars(Journal) if not each.startswith("_")]
    for name in events:  # also one that is new
        getattr(journal, name)(**facts.get(name, {}))
    assert trail.names == events


def test_meters_hear_what_they_count(tmp_path: Path) -> None:
    heard = Heard()
    journal = Measured(Audit(), heard).journal("ada", "s-1")
    for name, facts in EVENTS.items():
        getattr(journal, name)(**facts)
    journal.ran(cell(tmp_path, CellOutcome(Status.OK)))
    journal.refused(cast(Cell, None), "import of os")
    assert heard.events == [
        ("kill", "memory"),
        ("start", "pooled", 0.5),
        ("failed",),
        ("hibernated",),
        ("woke",),
        ("install", "failed"),
        ("refusal", "network"),
        ("cell", "ok", 2.5),
        ("refusal", "policy"),
    ]


def test_a_killed_cell_is_a_kill_by_its_cause(tmp_path: Path) -> None:
    heard = Heard()
    killed = cell(tmp_path, CellOutcome(Status.KILLED, cause="killed by SIGKILL"))
    killed.stop_reason = StopReason.TIMEOUT
    Measured(Audit(), heard).journal("ada", "s-1").ran(killed)
    assert heard.events == [("cell", "killed", 2.5), ("kill", "time")]


@pytest.mark.parametrize("reason", [*StopReason], ids=[each.value for each in StopReason])
def test_every_reason_to_stop_has_a_cause(reason: StopReason) -> None:
    assert cause_of(reason, "") in {"time", "cpu", "disk", "asked"}


def test_a_kernel_that_ends_by_itself_is_lost() -> None:
    assert cause_of(None, "the kernel exited with code 1") == "lost"
