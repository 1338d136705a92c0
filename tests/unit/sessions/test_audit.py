"""The audit trail: one readable line an event, and trouble with the file that harms nobody."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import pytest

from kernel_mcp.errors import ConfigError
from kernel_mcp.launch.process import KernelProcess
from kernel_mcp.linux.proc import ExitStatus, Usage
from kernel_mcp.output.items import Stream
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.sessions.audit import MAX_TEXT, MAX_TEXTS, Audit, AuditLog, open_audit
from kernel_mcp.sessions.cell import Cell, CellOutcome, Status

NOON = datetime(2030, 1, 2, 12, 0, 0, 5000, timezone.utc)


class Handle:
    """A kernel that uses one processor second between two looks."""

    exit: ExitStatus | None = None

    def __init__(self) -> None:
        self.looks = 0

    def usage(self) -> Usage:
        self.looks += 1
        return Usage(cpu_s=self.looks * 1.0, memory_bytes=5000)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log(path: Path) -> AuditLog:
    return AuditLog(path, now=lambda: NOON)


def cell(folder: Path, outcome: CellOutcome, code: str = "x = 1") -> Cell:
    made = Cell(3, code, 0, OutputLog(folder, 3))
    made.started = 10.0
    made.take(Stream("stdout", "hello"))
    made.finish(outcome, 12.5)
    return made


def test_every_event_is_a_line_with_its_time_principal_and_session(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = log(path)
    journal = audit.journal("ada", "s-1")
    journal.opened(name="work", packages=("numpy",), python="3.12")
    journal.closed(cells=4)
    audit.close()
    head = {"time": "2030-01-02T12:00:00.005Z", "who": "ada", "session": "s-1"}
    assert lines(path) == [
        {**head, "event": "session_start", "name": "work", "packages": ["numpy"], "python": "3.12"},
        {**head, "event": "session_end", "cells": 4},
    ]


def test_a_cell_is_told_by_hash_outcome_and_what_it_used(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    journal = log(path).journal("ada", "s-1")
    journal.begins(cast(KernelProcess, Handle()))
    journal.ran(cell(tmp_path, CellOutcome(Status.OK), code="secret = 'hunter2'"))
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
    journal = log(path).journal("ada", "s-1")
    handle = Handle()
    journal.begins(cast(KernelProcess, handle))
    handle.exit = ExitStatus(signal=9)
    journal.ran(cell(tmp_path, CellOutcome(Status.KILLED, False, "out of memory")))
    journal.died("the kernel exited with code 3 between cells")
    ran, killed, died = lines(path)
    assert (ran["cpu_s"], ran["memory_bytes"]) == (None, None)
    assert (killed["event"], killed["cell"], killed["cause"]) == ("kill", 3, "out of memory")
    assert (died["event"], died["cell"]) == ("kill", None)


def test_files_are_told_by_the_hash_of_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    journal = log(path).journal("ada", "s-1")
    journal.wrote("a.txt", 2, "ä")
    journal.wrote("b.bin", 3, base64.b64encode(b"\0\1\2").decode(), "BASE64")
    text, binary = lines(path)
    assert text["sha256"] == hashlib.sha256("ä".encode()).hexdigest()
    assert (binary["path"], binary["size"]) == ("b.bin", 3)
    assert binary["sha256"] == hashlib.sha256(b"\0\1\2").hexdigest()


def test_lines_stay_short_and_single_whatever_they_tell(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    journal = log(path).journal("ada", "s-1")
    made = cell(tmp_path, CellOutcome(Status.ERROR))
    journal.refused(made, "\n".join(f"line {number}\x1b[2J" for number in range(1000)))
    journal.installed(["a\nb" * 10_000], "ok")
    refusal, install = lines(path)
    assert len(refusal["reasons"]) == MAX_TEXTS + 1
    assert refusal["reasons"][-1] == "and 980 more"
    assert len(install["packages"][0]) == MAX_TEXT
    assert "\x1b" not in path.read_text()


def test_the_file_is_private_and_added_to(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        audit = log(path)
        audit.note("server_start", {})
        audit.close()
        audit.note("never", {})
    assert [line["event"] for line in lines(path)] == ["server_start", "server_start"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_trouble_is_told_once_and_the_trail_goes_on_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.jsonl"
    audit = log(path)
    assert audit.state == "on"

    def no_space(_fd: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", no_space)
        audit.note("one", {})
        audit.note("two", {})
    audit.note("three", {})
    assert [line["event"] for line in lines(path)] == ["three"]
    assert audit.state.startswith("failing since 2030-01-02 12:00:00 UTC: No space")
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_line_cut_short_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    audit = log(path)
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
        audit.note("one", {})
    audit.note("two", {})
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()[1:]] == ["two"]


@pytest.mark.parametrize("kind", ["folder", "missing", "link", "pipe"])
def test_a_file_that_cannot_be_added_to_is_refused_at_the_start(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "audit.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "missing":
        path = tmp_path / "no" / "audit.jsonl"
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    with pytest.raises(ConfigError, match="--audit-log"):
        AuditLog(path)


def test_without_a_file_nothing_is_kept_and_no_kernel_is_looked_at(tmp_path: Path) -> None:
    audit = open_audit(None)
    assert audit.state == "off"
    assert type(audit) is Audit
    journal = audit.journal("ada", "s-1")
    handle = Handle()
    journal.begins(cast(KernelProcess, handle))
    journal.ran(cell(tmp_path, CellOutcome(Status.OK)))
    assert handle.looks == 0
