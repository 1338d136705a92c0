"""Fronts over HTTP: any number of them, with the same principals and the same sessions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import anyio
import pytest

from tests.fleet.machines import HEAD, Machines
from tests.integration.httpclient import PATIENCE_S, http_agent
from tests.integration.httpserver import HttpServer, http_server
from tests.integration.principals import add
from tests.integration.task_client import shown
from tests.integration.test_http_tasks import ask, call
from tests.integration.test_tasks import UNKNOWN, UNTIL

pytestmark = [pytest.mark.anyio]


@contextmanager
def fronts(machines: Machines, tokens: Path) -> Iterator[tuple[HttpServer, HttpServer]]:
    flags = ["--fleet", machines.address, "--fleet-place", f"127.0.0.{HEAD}"]
    flags += ["--tokens", str(tokens)]
    with (
        http_server(*flags, token="-", environ=machines.environ) as one,
        http_server(*flags, token="-", environ=machines.environ) as two,
    ):
        yield one, two


@pytest.mark.parametrize("era", ["legacy", "auto"])
async def test_a_principal_has_its_sessions_through_any_front_and_nobody_elses(
    era: str, whole: Machines, tmp_path: Path
) -> None:
    ada, ben = add(tmp_path / "tokens", "ada"), add(tmp_path / "tokens", "ben")
    with fronts(whole, tmp_path / "tokens") as (one, two):
        async with http_agent(one, era, ada) as agent:
            await agent.run("x = 'of ada'")
            handle = str((await agent.call("info")).data["session"])
        async with http_agent(two, era, ada) as agent:
            assert "'of ada'" in (await agent.run("x")).text
            assert (await agent.call("info")).data["session"] == handle
            listed = (await agent.call("list_sessions")).data["sessions"]
            assert [each["session"] for each in listed] == [handle]
        async with http_agent(two, era, ben) as agent:
            assert "There is no session" in await agent.refused("execute", code="x", session=handle)
            assert (await agent.call("list_sessions")).data["sessions"] == []
        async with http_agent(one, era, ada) as agent:
            await agent.call("close_session")


async def test_a_front_shows_the_metrics_of_all_nodes(whole: Machines, tmp_path: Path) -> None:
    ada = add(tmp_path / "tokens", "ada")
    prometheus = add(tmp_path / "tokens", "prometheus", "--scope", "kernel:metrics")
    with fronts(whole, tmp_path / "tokens") as (one, _):
        async with http_agent(one, "auto", ada) as agent:
            await agent.run("x = 1")
            name = str((await agent.call("info")).data["session"]).rpartition(".")[2]
            asked = Request(
                one.url.removesuffix("/mcp") + "/metrics",
                headers={"Authorization": f"Bearer {prometheus}"},
            )
            with await anyio.to_thread.run_sync(urlopen, asked) as answer:
                lines = answer.read().decode().splitlines()
            await agent.call("close_session")
    assert 'kernel_mcp_nodes{state="ready"} 3.0' in lines
    for each in ("n2", "n3", "n4"):
        assert f'kernel_mcp_sessions_limit{{node="{each}"}} 100.0' in lines
    (cells,) = (line for line in lines if f'cells_total{{node="{name}",outcome="ok"}}' in line)
    assert float(cells.split()[1]) >= 1


async def test_a_task_is_answered_and_cancelled_by_any_front(
    whole: Machines, tmp_path: Path
) -> None:
    ada, ben = add(tmp_path / "tokens", "ada"), add(tmp_path / "tokens", "ben")
    with fronts(whole, tmp_path / "tokens") as (one, two):
        task = await call(one, ada, "execute", code=f"print('on')\n{UNTIL}'the end'", wait=0)
        assert task["resultType"] == "task", shown(task)
        assert (await polled(two, ada, task))["status"] == "working"
        for method in ("tasks/get", "tasks/cancel"):
            said = await ask(two, ben, method, taskId=task["taskId"])
            assert said.message["error"]["code"] == UNKNOWN
        await call(two, ada, "write_file", path="go", content="")
        state = await ended(two, ada, task)
        assert "'the end'" in state["result"]["content"][0]["text"], shown(state)
        assert "has ended" not in str(await call(one, ada, "execute", code="1", wait=60))
        endless = "print('so far', flush=True)\nwhile True: pass"
        task = await call(two, ada, "execute", code=endless, wait=0)
        await ask(one, ada, "tasks/cancel", taskId=task["taskId"])
        state = await ended(two, ada, task)
        assert "interrupted" in str(state["result"]), shown(state)
        script = await call(one, ada, "run_script", script="import time; time.sleep(7); print(42)")
        assert script["resultType"] == "complete", "no other front could answer it"
        assert "42" in str(script["content"])
        await call(one, ada, "close_session")


async def polled(server: HttpServer, token: str, task: dict[str, Any]) -> dict[str, Any]:
    """The state of a task."""
    return (await ask(server, token, "tasks/get", taskId=task["taskId"])).result


async def ended(server: HttpServer, token: str, task: dict[str, Any]) -> dict[str, Any]:
    """Poll a task until it has ended; its last state."""
    with anyio.fail_after(PATIENCE_S):
        while (state := await polled(server, token, task))["status"] == "working":
            await anyio.sleep(0.1)
    return state
