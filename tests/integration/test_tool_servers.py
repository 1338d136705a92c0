"""Code of cells calls the tools of a real MCP server, through a real client of ours."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp.client import Client
from mcp.client.session import ClientRequestContext

from tests import crm
from tests.integration.agent import ERAS, Agent, agent, command
from tests.integration.httpclient import http_agent
from tests.integration.httpserver import LEAN, http_server
from tests.integration.principals import add
from tests.integration.servers import Servers
from tests.integration.task_client import shown, task_client, text_of
from tests.integration.test_questions import BOTH, asked, give

pytestmark = [pytest.mark.anyio]

JOIN = """
from tools import crm
customers = crm.list_customers()
orders = {each["id"]: crm.list_orders(each["id"]) for each in customers}
totals = {number: sum(each["amount"] for each in rows) for number, rows in orders.items()}
best = sorted(customers, key=lambda each: -totals[each["id"]])[:3]
for each in best:
    print(each["name"], totals[each["id"]])
"""
JOINED = "Customer 199 5973\nCustomer 198 5943\nCustomer 197 5913\n"


def listed(folder: Path, **facts: Any) -> str:
    """Write the file of `--tool-servers` for the customers of the tests, and return its path."""
    row = {
        "command": sys.executable,
        "args": ["-m", "tests.crm", str(folder / "log")],
        "cwd": str(Path(crm.__file__).parents[1]),
        **facts,
    }
    file = folder / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"crm": row}}))
    return str(file)


async def test_customers_are_joined_with_their_orders_in_one_cell(
    servers: Servers, tmp_path: Path
) -> None:
    flags = ("--tool-servers", listed(tmp_path), "--allow-tool", "crm.list_*")
    async with servers.agent(*flags) as agent:
        answer = await agent.run(JOIN)
        assert JOINED in answer.text
        assert "The code called tools: crm 201 times" in answer.text
        assert len(JOIN) + len(answer.text) <= 2500


RENAME = "from tools import crm\nprint(crm.rename({}, 'B'))"
CHOICES = ["once", "always in this session", "no"]


class Person:
    """Answers each question about a call with the next of `answers`."""

    def __init__(self, *answers: str) -> None:
        self.answers = [*answers]
        self.questions: list[str] = []

    async def elicit(
        self, context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult:
        assert isinstance(params, types.ElicitRequestFormParams)
        assert params.requested_schema["properties"]["answer"]["enum"] == CHOICES
        self.questions.append(params.message)
        return types.ElicitResult(action="accept", content={"answer": self.answers.pop(0)})


@asynccontextmanager
async def asking(person: Person, era: str, *flags: str) -> AsyncIterator[Agent]:
    started = command(*flags, "--warm", "0", "--no-template")
    async with Client(started, mode=era, elicitation_callback=person.elicit) as client:
        yield Agent(client)


@pytest.mark.parametrize("era", ERAS)
async def test_a_person_decides_on_calls_that_are_not_allowed(era: str, tmp_path: Path) -> None:
    person = Person("once", "no", "always in this session")
    async with asking(person, era, "--tool-servers", listed(tmp_path)) as one:
        first = await one.run(RENAME.format(1))
        assert first.text.startswith("1 is B\n"), first.text
        assert person.questions == [
            (
                "kernel-mcp asks: may the code in notebook cell 1 call the tool crm.rename with "
                '{"customer": 1, "name": "B"}?'
            )
        ]
        refused = await one.run(RENAME.format(2))
        assert "ToolRefused: the person has declined the call of crm.rename" in refused.text
        for number in (3, 4):
            again = await one.run(RENAME.format(number))
            assert again.text.startswith(f"{number} is B\n"), again.text
        assert len(person.questions) == 3
        await one.call("reset")
        assert (await one.run(RENAME.format(5))).text.startswith("5 is B\n")
    assert "renamed 2 to B" not in (tmp_path / "log").read_text()


async def test_a_task_waits_for_the_person_who_decides(tmp_path: Path) -> None:
    flags = ("--tool-servers", listed(tmp_path))
    async with task_client(*flags, capabilities=BOTH) as one:
        task = await one.call("execute", code=RENAME.format(7))
        assert task["resultType"] == "task", shown(task)
        key, request = await asked(one, task)
        assert request["params"]["requestedSchema"]["properties"]["answer"]["enum"] == CHOICES
        await give(one, task, key, "once")
        assert text_of((await one.ended(task))["result"]).startswith("7 is B\n")


async def test_a_client_that_asks_nobody_is_told_the_flag(tmp_path: Path) -> None:
    async with agent("--tool-servers", listed(tmp_path)) as one:
        refused = await one.run(RENAME.format(1))
        assert "ToolRefused: crm.rename needs a person's approval" in refused.text
        assert "--allow-tool crm.rename" in refused.text
        info = (await one.call("info")).data
        assert info["tools"].startswith("reaches: crm (crm: programs that run as the server's")
        thread = await one.run("from threading import Thread\nt = Thread(target=print)\n'x'")
        assert "called tools" not in thread.text


async def test_an_interrupt_cancels_calls_of_threads_and_of_the_cell(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = """
from concurrent.futures import ThreadPoolExecutor
from tools import crm
with ThreadPoolExecutor() as pool:
    waiting = [pool.submit(crm.wait_long) for _ in range(3)]
    crm.wait_long()
"""
    async with agent("--tool-servers", listed(tmp_path), "--allow-tool", "*") as one:
        assert (await one.run(code, wait=0)).status == "running"
        with anyio.fail_after(60):
            while not log.exists() or log.read_text().count("waits") < 4:
                await one.call("wait", wait=0.05)
        stopped = await one.call("interrupt")
        assert stopped.status == "interrupted", stopped.text
        with anyio.fail_after(60):
            while log.read_text().count("cancelled") < 4:
                await one.call("list_sessions")
        assert "970" in (await one.run("crm.list_orders(97)")).text
        died = await one.run("crm.die()")
        assert "ToolUnavailable" in died.text
        assert "970" in (await one.run("crm.list_orders(97)")).text


async def test_calls_are_in_the_audit_trail_without_their_arguments(tmp_path: Path) -> None:
    trail = tmp_path / "audit.jsonl"
    flags = ("--tool-servers", listed(tmp_path), "--allow-tool", "crm.list_*")
    async with agent(*flags, "--audit-log", str(trail)) as one:
        await one.run("from tools import crm\ncrm.list_orders(4711)")
        await one.run(RENAME.format(4711))
    rows = [json.loads(line) for line in trail.read_text().splitlines()]
    calls = [row for row in rows if row["event"] == "tool"]
    assert [(row["tool"], row["end"], row["cell"]) for row in calls] == [
        ("crm.list_orders", "ok", 1),
        ("crm.rename", "refused", 2),
    ]
    assert all(len(row["arguments"]) == 64 for row in calls)
    assert "4711" not in "".join(json.dumps(row) for row in calls)


async def test_a_session_may_ask_for_fewer_servers(servers: Servers, tmp_path: Path) -> None:
    flags = ("--tool-servers", listed(tmp_path), "--allow-tool", "crm.list_*")
    async with servers.agent(*flags) as one:
        none = (await one.call("create_session", tools=[])).data["session"]
        assert (await one.call("info", session=none)).data["tools"] == "none"
        closed = await one.run("from tools import crm", session=none)
        assert "Error" in closed.text
        own = (await one.call("create_session", tools=["crm"])).data["session"]
        assert (
            "970" in (await one.run("from tools import crm\ncrm.list_orders(97)", session=own)).text
        )
        refused = await one.refused("create_session", tools=["git"])
        assert refused == "tools: this server has no tool server 'git'; it has crm."


KEY = "key-that-no-kernel-has-4711"
LOOK = """
import os
from pathlib import Path
found = []
for path in Path("/proc").glob("[0-9]*/*"):
    if path.name in ("environ", "cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            pass
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
    for line in maps:
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if "r" in line.split()[1] and end < 2**47 and "[v" not in line:
            memory.seek(start)
            try:
                found.append(memory.read(end - start))
            except OSError:
                pass
word = b"key-that-no-kernel" + b"-has-" + b"47" + b"11"
print(len(found) > 100, any(word in each for each in found), dict(os.environ).get("CRM_KEY"))
"""


async def test_no_kernel_has_the_credentials_of_a_server(tmp_path: Path) -> None:
    flags = ("--tool-servers", listed(tmp_path, env={"CRM_KEY": KEY}), "--allow-tool", "crm.*")
    async with agent(*flags) as one:
        used = await one.run("from tools import crm\ncrm.list_customers()[0]['id']")
        assert used.text.startswith("0\n")
        assert (await one.run(LOOK)).text.startswith("True False None")


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "reset", "close_session"])
async def test_the_end_of_a_kernel_cancels_its_calls(end: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = """
import os, signal, threading
from tools import crm
threading.Thread(target=crm.wait_long, daemon=True).start()
"""
    async with agent("--tool-servers", listed(tmp_path), "--allow-tool", "*") as one:
        await one.run(code)
        with anyio.fail_after(60):
            while not log.exists() or "waits" not in log.read_text():
                await one.call("list_sessions")
        await (one.run(end) if "os." in end else one.call(end))
        with anyio.fail_after(60):
            while "cancelled" not in log.read_text():
                await one.call("list_sessions")
        assert "970" in (await one.run("from tools import crm\ncrm.list_orders(97)")).text


async def test_branches_and_restored_kernels_call_tools(tmp_path: Path) -> None:
    flags = ("--tool-servers", listed(tmp_path), "--allow-tool", "crm.*", "--warm", "1")
    async with agent(*flags) as one:
        await one.run("from tools import crm\nx = crm.list_orders(1)")
        made = (await one.call("branch", n=2)).data
        for handle in [each["session"] for each in made["branches"]]:
            found = await one.run("crm.list_orders(97)[0]['amount']", session=handle)
            assert found.text.startswith("970\n"), found.text
        await one.run("x = crm.list_orders(2)", checkpoint=True)
        await one.call("undo")
        found = await one.run("x[0]['amount'], crm.list_orders(97)[0]['amount']")
        assert found.text.startswith("(10, 970)\n"), found.text


async def test_a_principal_has_the_servers_of_its_row(tmp_path: Path) -> None:
    tokens, log = tmp_path / "tokens", tmp_path / "log"
    door = ("--door", "tools:crm")
    first, second, poor = add(tokens, "a", *door), add(tokens, "b", *door), add(tokens, "poor")
    flags = ("--tool-servers", listed(tmp_path), "--allow-tool", "crm.*", "--tokens", str(tokens))
    with http_server(*LEAN, *flags, token=first) as server:
        pids = []
        for token in (first, second, first):
            async with http_agent(server, token=token) as one:
                found = await one.run("from tools import crm\nprint(crm.process())")
                pids.append(found.text.split()[0])
        assert pids[0] == pids[2] != pids[1]
        assert log.read_text().split() == ["started"] * 2
        async with http_agent(server, token=poor) as one:
            assert "ModuleNotFoundError" in (await one.run("import tools")).text
            info = (await one.client.call_tool("info", {})).structured_content
            assert info is not None
            assert info["tools"] == "none"
