"""A server that is made to hold too much: who gives way, what it is told, who is not hurt.

The server is a real one whose bounds are close to what it takes anyway.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest
from mcp import StdioServerParameters
from mcp.client import Client

from tests.integration.agent import Agent, Answer, command

pytestmark = pytest.mark.anyio

BOUNDED = """
import sys
from kernel_mcp import server
from kernel_mcp.cli import main
from kernel_mcp.sessions import bounds
MIB = 1 << 20
bounds.RELIEF_S = 0.5
server.memory_bound = lambda _sessions: bounds.OwnMemory()() + 64 * MIB
server.ServerBounds.__init__.__kwdefaults__["most_records"] = 4 * MIB
sys.exit(main(sys.argv[1:]))
"""
PAYLOAD = "\U0001f600" + "a" * 990_000
"""Four bytes for each character in the server's memory."""
SHOW = """
import time
from IPython.display import display
for number in range(8):
    display({"text/plain": "\U0001f600" + "a" * 1_000_000}, raw=True)
time.sleep(600)
"""


def bounded(log: Path) -> StdioServerParameters:
    usual = command("--allow", "*", "--warm", "0", "--no-template")
    script = f"import os\nos.dup2(os.open({str(log)!r}, os.O_CREAT | os.O_WRONLY), 2)\n{BOUNDED}"
    return StdioServerParameters(
        command=sys.executable, args=["-c", script, *usual.args[2:]], env=usual.env, cwd=usual.cwd
    )


@pytest.mark.ways
async def test_the_session_that_makes_the_server_hold_most_gives_way_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Client(bounded(log), mode="auto") as client:
        notebook = Agent(client)
        victim = await opened(notebook)
        await notebook.run("kept = 40", session=victim)

        hoarder = await opened(notebook)
        await notebook.run("mine = 1", session=hoarder)
        await notebook.run("import time; time.sleep(600)", session=hoarder, wait=0)
        answers = [
            await notebook.run(f"{number}  # {PAYLOAD}", session=hoarder, wait=0)
            for number in range(3, 43)
        ]
        with anyio.fail_after(30):
            while "waiting cells ended" not in log.read_text():
                await anyio.sleep(0.2)
        answers.append(await notebook.call("interrupt", session=hoarder))
        told = [answer.text for answer in answers if "were not run" in answer.text]
        assert told
        assert "were not run: the server's memory ran short (it holds " in told[0]
        assert "this session held much of it" in told[0]
        with anyio.fail_after(30):  # one that waits behind large ones may have to go with them
            while (kept := await notebook.run("mine + 40", session=hoarder)).status != "ok":
                assert "memory ran short" in kept.text
        assert "41" in kept.text.splitlines(), kept.text

        showers = [await opened(notebook) for _ in range(4)]
        killed: list[Answer] = []
        with anyio.fail_after(60):
            for session in showers:
                await notebook.run(SHOW, session=session, wait=0)
            while not killed:
                answers = [
                    await notebook.call("wait", session=session, wait=1) for session in showers
                ]
                killed += [answer for answer in answers if answer.cell["status"] == "killed"]
        for answer in killed:
            assert answer.cell["state_kept"] is False
            assert "killed by SIGKILL: the server's memory ran short" in answer.cell["cause"]
        assert (await notebook.run("kept + 2", session=victim)).text.startswith("42")
        kept = await notebook.run("mine + 40", session=hoarder)
        assert "41" in kept.text.splitlines(), kept.text
    text = log.read_text()
    assert f"session {hoarder}, which held" in text
    assert "lost its kernel" in text
    assert victim not in text


@pytest.mark.ways
async def test_the_records_of_all_sessions_have_one_bound(tmp_path: Path) -> None:
    async with Client(bounded(tmp_path / "log"), mode="auto") as client:
        notebook = Agent(client)
        small, large = await opened(notebook), await opened(notebook)
        await notebook.run("print('s' * 200_000)", session=small)
        for _ in range(8):
            await notebook.run("print('l' * 1_000_000)", session=large)
        with anyio.fail_after(30):
            while "removed to make room" not in await text_of(notebook, large, 1):
                await anyio.sleep(0.2)
        assert (await text_of(notebook, large, 8)).startswith("llll")
        assert (await text_of(notebook, small, 1)).count("s") == 200_000


async def opened(notebook: Agent) -> str:
    return str((await notebook.call("create_session")).data["session"])


async def text_of(notebook: Agent, session: str, cell: int) -> str:
    """Return the stored output of a cell."""
    found = await notebook.client.read_resource(f"kernel://{session}/cells/{cell}")
    return "".join(getattr(content, "text", "") for content in found.contents)
