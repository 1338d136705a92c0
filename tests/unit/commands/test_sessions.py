"""`kernel-mcp sessions`: what is kept, and how to be rid of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.cli import EXIT_USAGE, main
from kernel_mcp.commands import sessions
from kernel_mcp.errors import ConfigError
from kernel_mcp.sessions.manifest import SessionKey
from kernel_mcp.sessions.store import SessionStore
from tests.unit.sessions.test_store import opened, save


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder for state of a server with three sessions, one of them in use."""
    store = SessionStore(tmp_path / "kept", most_bytes=0, most_s=1e9)
    store.make()
    for name in ("default", "other", "used"):
        entry = opened(store, SessionKey(str(tmp_path), name))
        save(entry, b"data")
        if name != "used":
            entry.close()
    return tmp_path


def run(state: Path, *words: str) -> int:
    return main(["sessions", *words, "--state-dir", str(state)])


def test_all_sessions_are_listed_with_folder_and_name(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(state, "list") == 0
    shown = capsys.readouterr().out
    assert f"{state}  default  1 variables" in shown
    assert shown.count("in use") == 1
    assert "3 sessions" in shown


def test_sessions_are_forgotten_by_name_and_folder(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(state, "forget", "default", "--folder", str(state)) == 0
    assert "forgot default" in capsys.readouterr().out
    assert run(state, "forget", "default", "--folder", str(state)) == 1
    assert run(state, "forget", "used", "--folder", str(state)) == 1
    assert "in use by a server" in capsys.readouterr().err
    assert run(state, "forget", "--all") == 1
    run(state, "list")
    assert "1 session," in capsys.readouterr().out


def test_a_command_that_names_nothing_is_refused_and_explained(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(state, "forget") == EXIT_USAGE
    assert main(["sessions"]) == EXIT_USAGE
    assert main(["sessions", "--help"]) == 0
    assert "forget NAME" in capsys.readouterr().out


def test_there_may_be_nothing_to_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "list") == 0
    assert "0 sessions" in capsys.readouterr().out


def test_sessions_of_running_servers_are_listed_with_principal_and_state(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = {
        "session": "s-abcdefghijkl",
        "name": "work",
        "principal": "ada\n",
        "state": "idle",
        "memory_bytes": 3 << 20,
        "age_s": 125.0,
        "cells": 1,
    }
    http = {"pid": 7, "http": "127.0.0.1:8000", "folder": "/srv", "sessions": [session]}
    stdio = {"pid": 8, "http": "", "folder": "/home/ada", "sessions": []}
    asked: list[Path] = []

    def ask_all(place: Path) -> list[dict[str, object]]:
        asked.append(place)
        return [http, stdio]

    monkeypatch.setattr(sessions, "ask_all", ask_all)
    assert run(state, "list") == 0
    shown = capsys.readouterr().out
    assert asked == [state]
    assert "idle, 3 MiB, 1 cell, 2 min old" in shown
    assert "server 7 on 127.0.0.1:8000 in /srv: 1 session now, 3 MiB" in shown
    assert "server 8 on stdin and stdout in /home/ada: 0 sessions now, 0 MiB" in shown
    assert "ada\n" not in shown


@pytest.mark.parametrize("words", [["list"], ["join"]])
def test_servers_are_not_looked_for_where_others_could_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(sessions, "default_base", lambda: tmp_path)
    with pytest.raises(ConfigError, match="not a folder of this user alone"):
        sessions.run_sessions([*words, "--persist", "off"])
    tmp_path.chmod(0o700)
    sessions.run_sessions([*words, "--persist", "off"])
