"""The audit trail: one readable line an event, and trouble with the file that harms nobody."""

from __future__ import annotations

import json
import os
import stat
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.errors import ConfigError
from kernel_mcp.sessions.audit import AuditLog

NOON = datetime(2030, 1, 2, 12, 0, 0, 5000, timezone.utc)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log(path: Path) -> AuditLog:
    return AuditLog(path, now=lambda: NOON)


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


@pytest.mark.parametrize("empty", [True, False], ids=["removed", "created anew"])
def test_after_a_rotation_lines_go_to_the_file_that_has_the_name(
    tmp_path: Path, empty: bool
) -> None:
    path, older = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    audit = log(path)
    audit.note("one", {})
    path.rename(older)
    if not empty:
        path.touch(0o600)
    audit.note("two", {})
    audit.note("three", {})
    assert [line["event"] for line in lines(older)] == ["one"]
    assert [line["event"] for line in lines(path)] == ["two", "three"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert audit.state == "on"
    audit.close()


def test_a_rotation_that_leaves_no_file_to_add_to_loses_no_line(tmp_path: Path) -> None:
    path, older = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    audit = log(path)
    path.rename(older)
    path.mkdir()
    audit.note("two", {})
    assert [line["event"] for line in lines(older)] == ["two"]
    assert "failing since" in audit.state
    audit.close()


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
