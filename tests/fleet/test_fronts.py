"""Fronts: programs on stdin and stdout that have no sessions of their own."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from mcp import StdioServerParameters
from mcp.client import Client

from tests.fleet.machines import HEAD, Machines, stopped
from tests.integration.agent import Agent

pytestmark = [pytest.mark.anyio]

TELL = 'echo $$ > "$0"; exec "$@"'


@asynccontextmanager
async def front(machines: Machines, name: str = "front") -> AsyncIterator[tuple[Agent, int]]:
    """A client of a front, and the process of that."""
    pid = machines.root / f"{name}.pid"
    command = [sys.executable, "-m", "kernel_mcp", "--fleet", machines.address]
    command += ["--fleet-place", f"127.0.0.{HEAD}"]
    started = StdioServerParameters(
        command="sh", args=["-c", TELL, str(pid), *command], env=machines.environ, cwd=machines.root
    )
    with anyio.fail_after(120):
        async with Client(started) as client:
            yield Agent(client), int(pid.read_text())


async def test_a_front_has_all_tools_and_keeps_variables_between_calls(whole: Machines) -> None:
    async with front(whole) as (agent, _):
        names = {tool.name for tool in (await agent.client.list_tools()).tools}
        assert {"execute", "install", "undo", "branch", "open_notebook"} <= names
        await agent.run("x = 40")
        assert (await agent.run("x + 2")).text == "42"
        said: list[str] = []

        async def hear(progress: float, total: float | None, message: str | None) -> None:
            said.append(str(message))

        code = "import time\nfor n in range(3): print('step', n, flush=True); time.sleep(0.2)"
        await agent.client.call_tool("execute", {"code": code}, progress_callback=hear)
        assert any("step 1" in text for text in said)
        handle = str((await agent.call("info")).data["session"])
        await agent.call("write_file", path="a.txt", content="from a front")
        found = await agent.client.read_resource(f"kernel://{handle}/files/a.txt")
        assert found.contents[0].text == "from a front"  # type: ignore[union-attr]


async def killed_in_a_call(machines: Machines, handles: list[str]) -> None:
    """Kill a front while a cell runs in the session whose handle is added."""
    async with front(machines, "first") as (agent, pid), anyio.create_task_group() as tasks:
        handle = str((await agent.call("create_session")).data["session"])
        handles.append(handle)
        await agent.run("x = 1", session=handle)
        heard = anyio.Event()

        async def hear(progress: float, total: float | None, message: str | None) -> None:
            heard.set()

        async def call() -> None:
            code = "import time\nprint('begun', flush=True); time.sleep(3); x += 1; 'done'"
            arguments = {"code": code, "session": handle}
            await agent.client.call_tool("execute", arguments, progress_callback=hear)

        tasks.start_soon(call)
        await heard.wait()
        os.kill(pid, signal.SIGKILL)


async def test_a_session_is_reached_through_another_front_after_its_own_was_killed_in_a_call(
    whole: Machines,
) -> None:
    handles: list[str] = []
    with pytest.raises(BaseException):  # noqa: B017, PT011  # however the client puts it
        await killed_in_a_call(whole, handles)
    async with front(whole, "second") as (agent, _):
        answer = await agent.call("wait", session=handles[0])
        assert answer.status == "ok", answer.text
        assert "'done'" in answer.text
        assert "2" in (await agent.run("x", session=handles[0])).text.splitlines()
        await agent.call("close_session", session=handles[0])


async def test_packages_undo_and_branches_go_through_a_front(whole: Machines) -> None:
    async with front(whole) as (agent, _):
        handle = str((await agent.call("create_session")).data["session"])
        await agent.run("x = 1", session=handle)
        await agent.call("execute", code="x = 2", session=handle, checkpoint=True)
        undone = await agent.call("undo", session=handle)
        assert undone.data["state_as_of"] == 1
        assert "1" in (await agent.run("x", session=handle)).text.splitlines()
        branches = (await agent.call("branch", session=handle, n=2)).data["branches"]
        for number, each in enumerate(branches):
            await agent.run(f"x = {10 + number}", session=each["session"])
        await agent.call("adopt", branch=branches[1]["session"])
        assert "11" in (await agent.run("x", session=handle)).text.splitlines()
        packages = (await agent.call("list_packages", session=handle)).data["packages"]
        assert isinstance(packages, list)
        book: dict[str, Any] = {"path": "a.ipynb", "session": handle}
        await agent.call("open_notebook", **book)
        await agent.run("'in the notebook'", session=handle)
        assert "in the notebook" in (await agent.call("read_notebook", **book)).text
        await agent.call("close_session", session=handle)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, "without authentication runs any program"),
        ({"RAY_AUTH_TOKEN": "short"}, "at least 32 random ones"),
        ({"RAY_AUTH_TOKEN": "w" * 48}, "InvalidAuthToken: Authentication token is missing or inc"),
    ],
    ids=["none", "short", "wrong"],
)
@pytest.mark.parametrize("words", [["fleet", "status"], ["node", "--fleet-store", "/var/tmp/x"]])
def test_who_has_not_the_token_is_refused(
    words: list[str], variables: dict[str, str], why: str, whole: Machines
) -> None:
    done = whole.run(*words, "--fleet", whole.address, variables=variables)
    assert done.returncode != 0
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_the_state_of_a_fleet_can_be_read_by_programs(whole: Machines) -> None:
    done = whole.run("fleet", "status", "--json", "--fleet", whole.address)
    assert [(each["name"], each["lost"]) for each in json.loads(done.stdout)] == [
        ("n2", False), ("n3", False), ("n4", False)
    ]  # fmt: skip


def test_a_head_that_hangs_or_is_not_there_ends_a_command(whole: Machines) -> None:
    with stopped(whole.of_ray("gcs_server")):
        done = whole.run("fleet", "status", "--fleet", whole.address)
    assert done.returncode == 1
    assert "has not answered for 5 s" in done.stderr
    done = whole.run("fleet", "status", "--fleet", "127.0.0.2:6398")
    assert done.returncode == 1
    assert "nobody listens at 127.0.0.2:6398" in done.stderr
