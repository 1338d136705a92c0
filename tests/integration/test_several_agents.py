"""Several clients and agents in one default session: who ran a cell, and calls that overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.httpclient import ACCEPT, META, PATIENCE_S, Wire, bearer
from tests.integration.httpserver import HttpServer
from tests.integration.principals import two_principals
from tests.integration.task_client import TASKS, TaskClient, shown, task_client, text_of
from tests.integration.test_tasks import UNTIL

pytestmark = [pytest.mark.anyio]
OVERLAPS = "Agents that work side by side take a session each"
SHARED = "default session, last used by another client"


class Program:
    """A client of HTTP that names itself, with a connection of its own for each call."""

    def __init__(self, server: HttpServer, token: str, name: str, *, tasks: bool = False) -> None:
        self._server = server
        self._headers = {**bearer(token), "user-agent": name}
        self._meta = {
            **META,
            "io.modelcontextprotocol/clientInfo": {"name": name, "version": "7"},
            "io.modelcontextprotocol/clientCapabilities": {
                "extensions": {TASKS: {}} if tasks else {}
            },
        }

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        named = {
            "tools/call": {"mcp-name": params.get("name", "")},
            "resources/read": {"mcp-name": params.get("uri", "")},
        }
        async with httpx2.AsyncClient(headers=self._headers, timeout=PATIENCE_S) as http:
            wire = Wire(http, self._server.mcp)
            body, headers = wire.request(method, **params)
            body["params"]["_meta"] = self._meta
            return (await wire.post(body, {**ACCEPT, **headers, **named.get(method, {})})).result

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        return await self.ask("tools/call", name=tool, arguments=arguments)

    async def run(self, code: str, **arguments: Any) -> str:
        return text_of(await self.call("execute", code=code, **arguments))


async def test_a_client_is_told_once_and_by_name_that_its_cell_waits_for_that_of_another(
    tmp_path: Path,
) -> None:
    with two_principals(tmp_path) as (server, token, _):
        one, other = Program(server, token, "one"), Program(server, token, "other")
        assert await one.run("1", wait=60) == "1"
        assert f"{SHARED} (one 7)" in await other.run("2", wait=60)
        running = await one.call("execute", code=UNTIL, wait=0)
        assert "goes on" in text_of(running), shown(running)
        queued = await other.run("3", wait=0)
        assert "cell 3, of another call (one 7)" in queued
        assert OVERLAPS in queued
        await other.call("write_file", path="go", content="")
        assert OVERLAPS not in text_of(await other.call("wait", wait=60))
        await one.call("execute", code="import os; os.remove('go')", wait=60)
        await one.call("execute", code=UNTIL, wait=0)
        assert OVERLAPS not in await other.run("4", wait=0)
        await other.call("write_file", path="go", content="")
        assert OVERLAPS not in await one.run("5", wait=60)


async def test_a_client_whose_first_call_is_a_task_is_told_that_the_session_is_shared(
    tmp_path: Path,
) -> None:
    with two_principals(tmp_path) as (server, token, _):
        one, other = Program(server, token, "one"), Program(server, token, "other", tasks=True)
        await one.run("1", wait=60)
        task = await other.call("execute", code=UNTIL, wait=0)
        assert task["resultType"] == "task", shown(task)
        assert SHARED in text_of(await other.call("write_file", path="go", content=""))


async def test_agents_of_one_client_are_told_once_that_their_calls_overlap() -> None:
    async with task_client(capabilities={}) as one:
        await one.run("execute", code="1")

        async def overlapping(code: str) -> str:
            """The answer to a call that is made while another one waits for its cell."""
            calls: list[tuple[str, dict[str, Any]]] = [
                ("execute", {"code": f"import os\n{UNTIL}os.remove('go')"}),
                ("execute", {"code": code}),
                ("write_file", {"path": "go", "content": ""}),
            ]
            for number, (tool, arguments) in enumerate(calls):
                params = {"name": tool, "arguments": arguments, "_meta": one.meta()}
                request = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
                await one.raw.send(json.dumps(request).encode() + b"\n")
            return text_of((await one.raw.answer(1))["result"])

        first = await overlapping("2")
        assert OVERLAPS in first
        assert "cell 2, of another call (tasks 1)" in first
        assert OVERLAPS not in await overlapping("3")


async def test_a_cell_that_the_same_client_left_running_is_no_overlap() -> None:
    async with task_client(capabilities={}) as one:
        await one.call("execute", code=UNTIL, wait=0)
        assert OVERLAPS not in text_of(await one.call("execute", code="1", wait=0))
        await one.call("write_file", path="go", content="")
        assert OVERLAPS not in text_of(await one.call("wait", wait=60, cell=2))


async def test_the_record_of_a_cell_names_the_client_that_ran_it(tmp_path: Path) -> None:
    trail = tmp_path / "audit.jsonl"
    kept = ("--persist", "1G,1d", "--state-dir", str(tmp_path / "state"))

    async def record(client: TaskClient) -> dict[str, Any]:
        uri = "kernel://default/cells/1.json"
        found = await client.ask("resources/read", uri=uri)
        about: dict[str, Any] = json.loads(found["contents"][0]["text"])
        return about

    (tmp_path / "state").mkdir(mode=0o700)
    async with task_client("--audit-log", str(trail), *kept) as one:
        await one.run("execute", code="x = 1")
        assert (await record(one))["client"] == "tasks 1"
        task = await one.call("run_script", script=f"print('on')\n{UNTIL}")
        await one.ask("tasks/cancel", taskId=task["taskId"])
        await one.ended(task)
    async with task_client(*kept) as one:
        assert (await record(one))["client"] == "tasks 1"
    events = [json.loads(line) for line in trail.read_text().splitlines()]
    assert {each["client"] for each in events if each["event"] == "cell"} == {"tasks 1"}
