"""Tasks over HTTP: each principal has its own, and they outlive the connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from tests.integration.httpclient import ACCEPT, META, PATIENCE_S, Said, Wire, bearer
from tests.integration.httpserver import HttpServer
from tests.integration.principals import two_principals
from tests.integration.task_client import TASKS, shown
from tests.integration.test_tasks import UNKNOWN, UNTIL

pytestmark = [pytest.mark.anyio]
DECLARED = {
    **META,
    "io.modelcontextprotocol/clientCapabilities": {"extensions": {TASKS: {}}},
}


async def ask(server: HttpServer, token: str, method: str, **params: Any) -> Said:
    """One request of a client that takes tasks, on a connection of its own."""
    named = {"mcp-name": params["name"]} if method == "tools/call" else {}
    async with httpx2.AsyncClient(headers=bearer(token), timeout=PATIENCE_S) as http:
        wire = Wire(http, server.mcp)
        body, headers = wire.request(method, **params)
        body["params"]["_meta"] = DECLARED
        return await wire.post(body, {**ACCEPT, **headers, **named})


async def call(server: HttpServer, token: str, tool: str, **arguments: Any) -> dict[str, Any]:
    return (await ask(server, token, "tools/call", name=tool, arguments=arguments)).result


async def test_a_task_belongs_to_its_principal_and_outlives_connections(tmp_path: Path) -> None:
    with two_principals(tmp_path) as (server, one, other):
        task = await call(server, one, "execute", code=f"print('on')\n{UNTIL}", wait=0)
        assert task["resultType"] == "task", shown(task)
        for method in ("tasks/get", "tasks/cancel"):
            said = await ask(server, other, method, taskId=task["taskId"])
            assert said.message["error"]["code"] == UNKNOWN
        await call(server, one, "write_file", path="go", content="")
        state = task
        with anyio.fail_after(PATIENCE_S):
            while state["status"] == "working":
                await anyio.sleep(0.1)
                state = (await ask(server, one, "tasks/get", taskId=task["taskId"])).result
        assert state["status"] == "completed", shown(state)
        assert state["result"]["content"][0]["text"] == "on"
        later = await call(server, one, "execute", code="1", wait=60)
        assert "has ended" not in str(later), "the task has told it"


@pytest.mark.ways
async def test_a_server_that_drains_ends_the_calls_of_tasks_too(tmp_path: Path) -> None:
    with two_principals(tmp_path, "--drain", "2s") as (server, one, _):
        task = await call(server, one, "run_script", script="while True: pass", timeout="1h")
        assert task["resultType"] == "task", shown(task)
