"""Sessions that call tools, through their whole life: each way to end one, and to copy it."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from tests.integration.agent import Agent
from tests.integration.agent import agent as serving
from tests.integration.processes import descendants
from tests.integration.servers import Servers
from tests.integration.sleepers import IDLE, asleep, state_of, woken
from tests.integration.test_tool_servers import listed

pytestmark = [pytest.mark.anyio]

WAITS = "from tools import crm\ncrm.wait_long()"
ENDS = {"interrupt": "interrupt", "reset": "reset", "close": "close_session"}
WORKS = "from tools import crm\nprint(len(crm.list_customers()))"


def flags(folder: Path) -> tuple[str, ...]:
    return ("--tool-servers", listed(folder), "--allow-tool", "crm.*")


async def noted(folder: Path, word: str, count: int = 1) -> None:
    """Wait until the server of the tool has noted something so often."""
    log = folder / "log"
    with anyio.fail_after(60):
        while not log.exists() or log.read_text().splitlines().count(word) < count:
            await anyio.sleep(0.01)


async def works(agent: Agent, session: str = "") -> None:
    """Check that the next call in a session has its answer."""
    assert (await agent.run(WORKS, session=session)).text.startswith("200\n")


async def test_threads_processes_and_coroutines_of_a_cell_get_their_own_answers(
    servers: Servers, tmp_path: Path
) -> None:
    async with servers.agent(*flags(tmp_path)) as agent:
        answer = await agent.run(
            "import asyncio, multiprocessing, os\n"
            "from concurrent.futures import ThreadPoolExecutor\n"
            "from tools import crm\n"
            "def first(customer):\n"
            "    from tools import crm\n"
            "    return crm.list_orders(customer, most=1)[0]['amount']\n"
            "right = [10 * each for each in range(60)]\n"
            "with ThreadPoolExecutor(50) as pool:\n"
            "    print(list(pool.map(first, range(60))) == right)\n"
            "for way in ('fork', 'spawn'):\n"
            "    with multiprocessing.get_context(way).Pool(3) as pool:\n"
            "        print(pool.map(first, range(60), chunksize=1) == right)\n"
            "found = await asyncio.gather(*(crm.list_orders.aio(n, most=1) for n in range(60)))\n"
            "print([each[0]['amount'] for each in found] == right)\n"
        )
        assert answer.text.startswith("True\n" * 4), answer.text
        assert "crm 240 times" in answer.text


DIES = (
    "import os, pathlib, threading\n"
    "def end():\n"
    "    while not pathlib.Path('go').exists(): pass\n"
    "    os.kill(os.getpid(), 9)\n"
    "threading.Thread(target=end).start()\n"
)


@pytest.mark.parametrize("way", ["interrupt", "time limit", "reset", "killed", "close"])
async def test_a_call_is_cancelled_with_its_cell(
    way: str, servers: Servers, tmp_path: Path
) -> None:
    async with servers.agent(*flags(tmp_path)) as agent:
        await works(agent)
        limit = {"timeout": 1} if way == "time limit" else {"wait": 0}
        await agent.run(DIES * (way == "killed") + WAITS, **limit)
        await noted(tmp_path, "waits")
        if way == "killed":
            await agent.call("write_file", path="go", content="")
        elif way in ENDS:
            await agent.call(ENDS[way])
        await noted(tmp_path, "cancelled")
        await agent.call("wait")
        await works(agent)


async def test_an_interrupt_cancels_the_calls_of_threads(servers: Servers, tmp_path: Path) -> None:
    async with servers.agent(*flags(tmp_path)) as agent:
        await agent.run(
            "from concurrent.futures import ThreadPoolExecutor\n"
            "from tools import crm\n"
            "with ThreadPoolExecutor(3) as pool:\n"
            "    list(pool.map(lambda _: crm.wait_long(), range(3)))",
            wait=0,
        )
        await noted(tmp_path, "waits", 3)
        await agent.call("interrupt")
        await noted(tmp_path, "cancelled", 3)
        assert "KeyboardInterrupt" in (await agent.call("wait")).text
        await works(agent)


@pytest.mark.parametrize("way", ["reset", "close"])
async def test_all_calls_are_in_the_audit_trail_that_end_with_their_kernel(
    way: str, tmp_path: Path
) -> None:
    trail = tmp_path / "audit.jsonl"
    async with serving(*flags(tmp_path), "--audit-log", str(trail), *IDLE) as agent:
        session = (await agent.call("create_session")).data["session"]
        await works(agent, session)
        await agent.run(
            "import threading\n"
            "from tools import crm\n"
            "each = [threading.Thread(target=crm.wait_long) for _ in range(5)]\n"
            "for thread in each: thread.start()\n"
            "for thread in each: thread.join()",
            session=session,
            wait=0,
        )
        await noted(tmp_path, "waits", 5)
        await agent.call(ENDS[way], session=session)
        await noted(tmp_path, "cancelled", 5)
        with anyio.fail_after(60):
            while trail.read_text().count('"end": "cancelled"') < 5:
                await anyio.sleep(0.01)
        if way == "reset":
            await agent.run("x = 1", session=session)
            await asleep(agent, session)


async def test_copies_of_a_kernel_call_by_themselves(tmp_path: Path) -> None:
    async with serving(*flags(tmp_path), "--warm", "0") as agent:
        await agent.run(f"{WORKS}\norders = crm.list_orders", checkpoint=True)
        await agent.run("x = 2", checkpoint=True)
        assert not (await agent.call("undo")).failed
        await works(agent)
        assert "[{'customer': 3, 'amount': 30}]" in (await agent.run("orders(3, most=1)")).text
        branches = (await agent.call("branch", n=2)).data["branches"]
        handles = [each if isinstance(each, str) else each["session"] for each in branches]
        async with anyio.create_task_group() as tasks:
            for handle in handles:
                tasks.start_soon(works, agent, handle)
        await works(agent)


async def test_a_variable_with_a_tool_comes_back_from_hibernation(
    servers: Servers, tmp_path: Path
) -> None:
    async with servers.agent(*flags(tmp_path), *IDLE) as agent:
        await agent.run(
            "import tools\nfrom tools import crm\n"
            "orders, rows, text = crm.list_orders, crm.list_orders(3), crm.long_text(3)"
        )
        answer = await woken(agent, "print(orders(3) == rows, text, tools.servers().keys())")
        assert answer.text.startswith("True xxx dict_keys(['crm'])"), answer.text
        assert "lost" not in answer.text


async def test_an_open_call_prevents_hibernation(servers: Servers, tmp_path: Path) -> None:
    async with servers.agent(*flags(tmp_path), *IDLE) as agent:
        await agent.run(
            "import threading\nfrom tools import crm\n"
            "threading.Thread(target=crm.wait_long, daemon=True).start()"
        )
        await noted(tmp_path, "waits")
        first = (await state_of(agent))["session"]
        second = (await agent.call("create_session")).data["session"]
        await agent.run("x = 1", session=second)
        await asleep(agent, second)  # long after the first one could have been
        assert (await state_of(agent, first))["state"] != "hibernated"
        await agent.call("close_session", session=first)
        await noted(tmp_path, "cancelled")


async def test_a_gateway_that_was_killed_is_an_error_and_starts_again(tmp_path: Path) -> None:
    others = gateways()
    async with serving(*flags(tmp_path)) as agent:
        await works(agent)
        await agent.run(WAITS, wait=0)
        await noted(tmp_path, "waits")
        [pid] = set(gateways()).difference(others)
        os.kill(pid, signal.SIGKILL)
        assert "ToolUnavailable" in (await agent.call("wait")).text
        await works(agent)
        [pid] = set(gateways()).difference(others)
        os.kill(pid, signal.SIGKILL)  # while no call is open
        await works(agent)


def gateways() -> list[int]:
    """Return the gateways that this process has started."""
    found = []
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            found += [pid] * (b"kernel_mcp.tool_servers.gateway" in words)
    return found


async def test_errors_of_tools_name_the_cell_alone(servers: Servers, tmp_path: Path) -> None:
    async with servers.agent("--tool-servers", listed(tmp_path)) as agent:
        answer = await agent.run("from tools import crm\ncrm.rename(1, 'x')")
        assert "ToolRefused" in answer.text
        assert "--allow-tool" in answer.text
        assert "mcp_tools/" not in answer.text


async def test_a_server_that_never_starts_delays_no_other(tmp_path: Path) -> None:
    file = Path(listed(tmp_path))
    rows = json.loads(file.read_text())["mcpServers"]
    rows["mute"] = {"command": sys.executable, "args": ["-c", "import signal; signal.pause()"]}
    file.write_text(json.dumps({"mcpServers": rows}))
    async with serving("--tool-servers", str(file), "--allow-tool", "crm.*") as agent:
        await works(agent)
        answer = await agent.run("import tools\ntools.mute")
        assert "<mute: the tool server mute is still starting>" in answer.text


@pytest.mark.parametrize("profile", ["strict", "guarded", "default"])
async def test_every_profile_lets_code_import_tools(
    profile: str, servers: Servers, tmp_path: Path
) -> None:
    async with servers.agent(*flags(tmp_path), "--profile", profile) as agent:
        await works(agent)
        answer = await agent.run("import mcp_tools\nprint(mcp_tools.crm.list_orders(1, most=1))")
        assert answer.text.startswith("[{'customer': 1, 'amount': 10}]")


@pytest.mark.parametrize("name", ["tools", "mcp_tools"])
async def test_without_tools_the_answer_names_the_flag(name: str, servers: Servers) -> None:
    async with servers.agent() as agent:
        answer = await agent.run(f"import {name}")
        assert "ModuleNotFoundError" in answer.text
        assert "--tool-servers FILE" in answer.text
        assert "--allow" not in answer.text
