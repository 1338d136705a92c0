"""Events: what is recorded of a cell, and that the trail and the meters hear the same."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from kernel_mcp.launch.process import KernelProcess
from kernel_mcp.linux.proc import ExitStatus, Usage
from kernel_mcp.output.items import Stream
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.sessions.cell import Cell, CellOutcome, Status, StopReason
from kernel_mcp.sessions.events import MAX_TEXT, MAX_TEXTS, START, Events, reason_of_kill
from kernel_mcp.telemetry import Meters
from tests.unit.sessions.test_audit import lines, log


class Handle:
    """A kernel that uses one processor second between two looks."""

    exit: ExitStatus | None = None

    def __init__(self) -> None:
        self.looks = 0

    def usage(self) -> Usage:
        self.looks += 1
        return Usage(cpu_s=self.looks * 1.0, memory_bytes=5000)


class Heard(Meters):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        self.events.append((event, facts))


def cell(folder: Path, outcome: CellOutcome, code: str = "x = 1") -> Cell:
    made = Cell(3, code, 0, OutputLog(folder, 3))
    made.started = 10.0
    made.take(Stream("stdout", "hello"))
    made.finish(outcome, 12.5)
    return made


def test_every_event_is_a_line_with_its_time_principal_and_session(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    events = Events(log(path))
    session = events.of_session("ada", "s-1")
    session.note("session_start", name="work", packages=["numpy"])
    session.note(START, kind="cold", seconds=0.5)
    events.close()
    session.note("too_late")
    noon = {"time": "2030-01-02T12:00:00.005Z"}
    head = {**noon, "who": "ada", "session": "s-1"}
    assert lines(path) == [
        {**head, "event": "session_start", "name": "work", "packages": ["numpy"]},
        {**noon, "event": "server_end"},
    ]


def test_a_cell_is_told_by_hash_outcome_and_what_it_used(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    session = Events(log(path)).of_session("ada", "s-1")
    session.begins(cast(KernelProcess, Handle()))
    session.ran(cell(tmp_path, CellOutcome(Status.OK), code="secret = 'hunter2'"))
    (line,) = lines(path)
    assert line["event"] == "cell"
    assert line["code_sha256"] == hashlib.sha256(b"secret = 'hunter2'").hexdigest()
    assert (line["cell"], line["status"], line["cause"]) == (3, "ok", "")
    assert (line["duration_s"], line["cpu_s"], line["memory_bytes"]) == (2.5, 1.0, 5000)
    assert line["output_chars"] == 5
    assert "hunter2" not in path.read_text()
    assert "hello" not in path.read_text()


def test_a_kill_has_a_line_of_its_own_and_no_invented_numbers(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    session = Events(log(path)).of_session("ada", "s-1")
    handle = Handle()
    session.begins(cast(KernelProcess, handle))
    handle.exit = ExitStatus(signal=9)
    session.ran(cell(tmp_path, CellOutcome(Status.KILLED, False, "out of memory")))
    session.died("the kernel exited with code 3 between cells")
    ran, killed, died = lines(path)
    assert (ran["cpu_s"], ran["memory_bytes"]) == (None, None)
    assert (killed["event"], killed["cell"], killed["cause"]) == ("kill", 3, "out of memory")
    assert (killed["reason"], died["reason"]) == ("memory", "lost")
    assert (died["event"], died["cell"]) == ("kill", None)


def test_files_are_told_by_the_hash_of_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    session = Events(log(path)).of_session("ada", "s-1")
    session.wrote("a.txt", 2, "ä")
    session.wrote("b.bin", 3, base64.b64encode(b"\0\1\2").decode(), "BASE64")
    text, binary = lines(path)
    assert text["sha256"] == hashlib.sha256("ä".encode()).hexdigest()
    assert (binary["path"], binary["size"]) == ("b.bin", 3)
    assert binary["sha256"] == hashlib.sha256(b"\0\1\2").hexdigest()


def test_lines_stay_short_and_single_whatever_they_tell(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    session = Events(log(path)).of_session("ada", "s-1")
    session.note("refusal", reasons=[f"line {number}\x1b[2J" for number in range(1000)])
    session.note("install", packages=["a\nb" * 10_000], done=True)
    refusal, install = lines(path)
    assert len(refusal["reasons"]) == MAX_TEXTS + 1
    assert refusal["reasons"][-1] == "and 980 more"
    assert len(install["packages"][0]) == MAX_TEXT
    assert "\x1b" not in path.read_text()


def test_without_a_file_nothing_is_kept_and_no_kernel_is_looked_at(tmp_path: Path) -> None:
    events = Events()
    assert events.audit_state == "off"
    session = events.of_session("ada", "s-1")
    handle = Handle()
    session.begins(cast(KernelProcess, handle))
    session.ran(cell(tmp_path, CellOutcome(Status.OK)))
    assert handle.looks == 0


def test_meters_hear_what_the_trail_hears(tmp_path: Path) -> None:
    heard = Heard()
    session = Events(meters=heard).of_session("ada", "s-1")
    killed = cell(tmp_path, CellOutcome(Status.KILLED, cause="killed by SIGKILL"))
    killed.stop_reason = StopReason.TIMEOUT
    session.ran(killed)
    session.note(START, kind="cold", seconds=0.5)
    (ran, facts), (kill, why), (start, _) = heard.events
    assert (ran, kill, start) == ("cell", "kill", START)
    assert (facts["status"], facts["duration_s"], why["reason"]) == ("killed", 2.5, "time")


@pytest.mark.parametrize("reason", [*StopReason], ids=[each.value for each in StopReason])
def test_every_reason_to_stop_has_a_word(reason: StopReason) -> None:
    assert reason_of_kill(reason, "") in {"time", "cpu", "disk", "asked"}


def test_a_kernel_that_ends_by_itself_is_lost() -> None:
    assert reason_of_kill(None, "the kernel exited with code 1") == "lost"
