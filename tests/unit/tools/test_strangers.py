"""Principals are strangers to each other: to one, what another has is what is not there."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest
from mcp.shared.exceptions import MCPError

import kernel_mcp
from kernel_mcp.errors import SessionNotFound
from kernel_mcp.identity import Principal
from kernel_mcp.sessions import history
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import ResponseContext
from kernel_mcp.sessions.session import Session
from kernel_mcp.tools.app import VIEW
from kernel_mcp.tools.resources import TEMPLATES
from tests.unit.fake_kernels import Handed
from tests.unit.sessions.test_persistence import persistence
from tests.unit.tools.served import Served, served

pytestmark = pytest.mark.anyio

SHARED: dict[str, Any] = {"http": ("127.0.0.1", 0), "tokens": Path("/tokens")}
UNKNOWN = {"s-": "s-unknown00000", "": "unknown"}
"""A handle and a name that nobody has."""
ARGUMENTS: dict[str, Any] = {
    "code": "a = 1",
    "path": "there.txt",
    "content": "taken",
    "packages": ["kmtest"],
    "n": 1,
    "cell": 1,
}
"""Those that calls of tools get where a tool takes them."""


class Turns:
    """Callers of one client who take turns: `name` makes the next call."""

    def __init__(self) -> None:
        self.name = "ada"

    @property
    def caller(self) -> Caller:
        return Caller(
            self.name, who=Principal(self.name, grants=()), response=ResponseContext(Handed())
        )

    def of(self, context: object) -> Caller:
        return self.caller


@asynccontextmanager
async def theirs(folder: Path) -> AsyncIterator[tuple[Served, Turns, dict[str, str]]]:
    """A server that `ben` calls next, and by what they are sessions of `ada` in each state."""
    turns = Turns()
    kept = persistence(folder)
    kept.by_principal = True
    async with served(folder, callers=turns, persistence=kept, **SHARED) as server:

        async def opened(name: str) -> Session:
            made = (await server.call("create_session", name=name)).data["session"]
            await server.call("execute", code="say treasure", session=made)
            await server.call("write_file", path="there.txt", content="treasure", session=made)
            return server.session

        found = {"default": (await server.manager.resolve(turns.caller, "")).handle}
        open_ = await opened("lasting")
        asleep = await opened("asleep")
        assert await asleep.hibernate()
        ended = await opened("ended")
        await server.manager.close(ended, "had been idle for long")
        script = await opened("")
        await server.manager.close(script, keep_record=True)
        before = await opened("kept")
        with anyio.fail_after(30):
            while await before.persistence.save() is None:
                await anyio.lowlevel.checkpoint()
        before.close()
        await before.ended.wait()
        for each in (open_, asleep, ended, script, before):
            found[f"handle of {each.name or 'script'}"] = each.handle
        for name in ("lasting", "asleep", "ended", "kept"):
            found[f"name of {name}"] = name
        turns.name = "ben"
        yield server, turns, found


def tried(properties: dict[str, Any], key: str) -> dict[str, Any]:
    """Arguments for a tool, about the session `key`."""
    given = {name: ARGUMENTS[name] for name in properties if name in ARGUMENTS}
    return {**given, ("session" if "session" in properties else "branch"): key}


def unknown(key: str) -> str:
    return UNKNOWN["s-" if key.startswith("s-") else ""]


async def test_tools_answer_for_foreign_sessions_as_for_unknown_ones(tmp_path: Path) -> None:
    async with theirs(tmp_path) as (server, _, keys):
        tools = (await server.agent.client.list_tools()).tools
        about = {
            tool.name: tool.input_schema["properties"]
            for tool in tools
            if {"session", "branch"} & {*tool.input_schema["properties"]}
        }
        assert {each.name for each in tools} - {*about} == {
            "create_session",
            "list_sessions",
            "run_script",
        }
        before = [state(each) for each in server.manager.sessions]
        for tool, properties in about.items():
            for which, key in keys.items():
                for extra in ({}, {"nonsense": 1}):
                    answers = [
                        (await server.call(tool, **tried(properties, each), **extra)).result
                        for each in (key, unknown(key))
                    ]
                    said, expected = [each.model_dump_json() for each in answers]
                    assert said.replace(key, unknown(key)) == expected, (tool, which)
                    assert answers[0].is_error
                    assert "treasure" not in said
        assert [state(each) for each in server.manager.sessions] == before


def state(session: Session) -> tuple[object, ...]:
    """Return the state of a session that a stranger could change."""
    return (
        session.handle,
        session.state,
        len(session.cells),
        len(session.queue),
        session.family.last_used,
        len(session.notifications.pending),
        session.closing.is_set(),
        session.origin,
    )


async def test_resources_answer_for_foreign_sessions_as_for_unknown_ones(tmp_path: Path) -> None:
    async with theirs(tmp_path) as (server, _, keys):
        parts = {"{+path}": "there.txt", "{n}": "1", "{k}": "1"}
        for template in TEMPLATES:
            place = template
            for name, part in parts.items():
                place = place.replace(name, part)
            for which, key in keys.items():
                answers = []
                for each in (key, unknown(key)):
                    uri = place.replace("{session}", each)
                    with pytest.raises(MCPError) as raised:
                        await server.agent.client.read_resource(uri)
                    answers.append(raised.value.error.model_dump_json())
                    answers.append((await server.call("read_file", path=uri)).text)
                for said, expected in zip(answers[:2], answers[2:], strict=True):
                    assert said.replace(key, unknown(key)) == expected, (template, which)
                    assert "There is no session" in said


async def test_owners_are_answered_where_strangers_are_not(tmp_path: Path) -> None:
    async with theirs(tmp_path) as (server, turns, keys):
        turns.name = "ada"
        for which, key in keys.items():
            answer = await server.call("read_file", path=f"kernel://{key}/cells/1")
            expected = {
                "default": "it has run none so far",
                "handle of ended": "had been idle for long",
                "name of ended": "had been idle for long",
                "handle of kept": "Session",
            }
            assert expected.get(which, "treasure") in answer.text, which
            assert "There is no session" not in answer.text


async def test_lists_have_nothing_of_others(tmp_path: Path) -> None:
    async with theirs(tmp_path) as (server, _, keys):
        listed = await server.call("list_sessions")
        assert listed.data["sessions"] == []
        told = await server.call("info")
        own = server.session.handle
        assert told.data["session"] == own
        listed = await server.call("list_sessions")
        assert [each["session"] for each in listed.data["sessions"]] == [own]
        for answer in (told, listed):
            text = answer.result.model_dump_json()
            assert not [key for key in keys.values() if key in text and key.startswith("s-")]
        views = (await server.agent.client.list_resources()).resources
        assert [each.uri for each in views if not each.uri.startswith("skill://")] == [VIEW]


async def test_names_of_others_are_free(tmp_path: Path) -> None:
    async with theirs(tmp_path) as (server, _, keys):
        for name in ("lasting", "asleep", "ended", "kept"):
            answer = await server.call("create_session", name=name)
            assert answer.data["session"] not in keys.values()
            listed = await server.call("list_files", session=name)
            assert listed.data["entries"] == []
            assert len(server.session.cells) == 0


async def test_sessions_of_others_are_looked_for_in_as_many_steps(tmp_path: Path) -> None:
    async with theirs(tmp_path) as (server, turns, keys):
        for which, key in keys.items():
            foreign, there = [await steps(server, turns, each) for each in (key, unknown(key))]
            assert foreign == there, which


async def steps(server: Served, turns: Turns, key: str) -> list[tuple[str, int]]:
    """The lines of the server that run until a session is not found."""
    found = []
    folder = str(Path(kernel_mcp.__file__).parent)

    def look(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename.startswith(folder):
            found.append((frame.f_code.co_name, frame.f_lineno))
            return look
        return None

    former = sys.gettrace()
    gc.disable()
    sys.settrace(look)
    try:
        with pytest.raises(SessionNotFound):
            await server.manager.cells_of(turns.caller, key)
    finally:
        sys.settrace(former)
        gc.enable()
    return found


async def test_scripts_of_one_push_out_no_record_of_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_KEPT", 3)
    turns = Turns()
    async with served(tmp_path, callers=turns, **SHARED) as server:
        hers = (await server.call("run_script", script="say treasure")).cell["session"]
        turns.name = "ben"
        his = [(await server.call("run_script", script="say x")).cell["session"] for _ in range(5)]
        read = [await server.call("read_file", path=f"kernel://{each}/cells/1") for each in his]
        assert [each.failed for each in read] == [True, True, False, False, False]
        turns.name = "ada"
        found = await server.call("read_file", path=f"kernel://{hers}/cells/1")
        assert found.text == "treasure"


async def test_calls_that_compute_in_the_server_take_turns_among_those_of_a_principal(
    tmp_path: Path,
) -> None:
    turns = Turns()
    async with served(tmp_path, callers=turns, **SHARED) as server:
        for name in ("ada", "ben"):
            turns.name = name
            await server.call("execute", code="a = 1")
        his = server.manager.principals.call_limiter(turns.caller.principal)
        handle = server.session.handle
        answers: list[Any] = []

        async def ask(tool: str, **arguments: Any) -> None:
            answers.append(await server.call(tool, **arguments))

        async def read() -> None:
            uri = f"kernel://{handle}/cells/1"
            answers.append(await server.agent.client.read_resource(uri))

        async with anyio.create_task_group() as tasks, his:
            tasks.start_soon(ask, "list_files")
            tasks.start_soon(partial(ask, "check_syntax", code="1"))
            tasks.start_soon(read)
            with anyio.fail_after(30):
                while his.statistics().tasks_waiting < 3:
                    await anyio.lowlevel.checkpoint()
            for tool in ("interrupt", "wait", "list_sessions"):
                assert not (await server.call(tool)).failed
            turns.name = "ada"
            assert not (await server.call("list_files")).failed
            assert answers == []
        assert len(answers) == 3
