"""The status that a running server reports to its operator only."""

from __future__ import annotations

import json
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.sessions import admin
from kernel_mcp.sessions.admin import KEY, SOCKET, ask_all, serving_admin, summary_of
from kernel_mcp.sessions.directory import Caller
from tests.unit.fake_kernels import FakeClock, FakeSource, new_manager

pytestmark = [pytest.mark.anyio]

ANSWER = {"pid": 7, "sessions": [{"session": "s-1"}]}


async def facts(question: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**ANSWER, **question}


@pytest.fixture
def state() -> Iterator[Path]:
    """The folder for state of servers, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


async def asked(state: Path) -> list[Mapping[str, Any]]:
    return await anyio.to_thread.run_sync(lambda: list(ask_all(state)))


def folder(state: Path, name: str) -> Path:
    path = state / name
    path.mkdir(mode=0o700)
    return path


async def test_every_running_server_answers(state: Path) -> None:
    first, second = folder(state, "s-1"), folder(state, "s-2")
    async with serving_admin(first, facts), serving_admin(second, facts):
        assert await asked(state) == [ANSWER, ANSWER]
        assert stat.S_IMODE((first / SOCKET).stat().st_mode) == 0o600
        assert stat.S_IMODE((first / KEY).stat().st_mode) == 0o600


async def test_a_question_reaches_those_who_answer(state: Path) -> None:
    async with serving_admin(folder(state, "s-1"), facts):
        question = {"join": "ü" * 500}
        answers = await anyio.to_thread.run_sync(lambda: list(ask_all(state, question)))
    assert answers == [{**ANSWER, **question}]


@pytest.mark.parametrize("question", [b"", b"no json\n", b"x" * 5000])
async def test_a_question_that_cannot_be_read_has_no_answer(state: Path, question: bytes) -> None:
    path = folder(state, "s-1")

    def ask() -> bytes:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path / SOCKET))
            client.sendall((path / KEY).read_bytes() + question)
            client.shutdown(socket.SHUT_WR)
            try:
                return client.recv(100)
            except ConnectionResetError:
                return b""

    async with serving_admin(path, facts):
        assert await anyio.to_thread.run_sync(ask) == b""
        assert await asked(state) == [ANSWER]


async def test_servers_that_have_ended_are_left_out(state: Path) -> None:
    folder(state, "s-0")
    async with serving_admin(folder(state, "s-1"), facts):
        pass
    async with serving_admin(folder(state, "s-2"), facts):
        assert await asked(state) == [ANSWER]


@pytest.mark.parametrize("key", [b"", b"0" * 32, b"short"], ids=["none", "wrong", "short"])
async def test_without_the_key_nothing_is_told(state: Path, key: bytes) -> None:
    path = folder(state, "s-1")

    def ask() -> bytes:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path / SOCKET))
            client.sendall(key)
            client.shutdown(socket.SHUT_WR)
            return client.recv(100)

    async with serving_admin(path, facts):
        assert await anyio.to_thread.run_sync(ask) == b""


async def test_another_user_is_told_nothing(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_entitled", lambda _stream: False)
    async with serving_admin(folder(state, "s-1"), facts):
        assert await asked(state) == []


async def test_a_server_that_cannot_tell_runs_all_the_same(state: Path) -> None:
    async with serving_admin(state / "missing", facts):
        assert await asked(state) == []


async def test_a_server_that_does_not_answer_is_left_out(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "ANSWER_S", 0.05)
    path = folder(state, "s-1")
    (path / KEY).write_text("x")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path / SOCKET))
        silent.listen()
        assert await asked(state) == []


async def test_a_session_is_told_by_handle_owner_state_cells_and_age(tmp_path: Path) -> None:
    clock = FakeClock()
    manager = new_manager(tmp_path, FakeSource(), clock)
    async with manager.running():
        session = await manager.create(Caller(principal="ada"), name="work")
        cell = session.submit("x = 1", 0)
        await cell.finished.wait()
        found = await summary_of(session, session.created + 12.0, Settings(network=("a.org",)))
    assert found == {
        "session": session.handle,
        "name": "work",
        "persisted_id": "",
        "principal": "ada",
        "state": found["state"],
        "memory_bytes": 0,
        "disk_bytes": 0,
        "pid": found["pid"],
        "cpu_s": 0.0,
        "cell": 0,
        "cell_s": 0.0,
        "client": "",
        "doors": {"network": ["a.org"], "ask": ["600 s"]},
        "age_s": 12.0,
        "cells": 1,
        "tasks": [],
        "asks": None,
    }
    assert found["state"] in ("idle", "busy")
    json.dumps(found)
