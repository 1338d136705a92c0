"""Output that comes after a cell's end: of threads, tasks, subprocesses and forks."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

import anyio
import pytest
from mcp.shared.exceptions import MCPError

from tests.integration.agent import PREFIX, Agent
from tests.integration.httpclient import bearer
from tests.integration.httpserver import READY_S, http_server
from tests.integration.lives import Place
from tests.integration.servers import Servers
from tests.integration.test_http_one_shot import called, hang_up, with_urllib

pytestmark = [pytest.mark.anyio]

WAITS = "while not os.path.exists('go'): time.sleep(0.01)"
THREAD = f"""
import os, threading, time
def later():
    {WAITS}
    print('said', 'late')
threading.Thread(target=later).start()
print('begun')
"""
TASK = """
import asyncio, os
async def later():
    while not os.path.exists('go'):
        await asyncio.sleep(0.01)
    print('said', 'late')
task = asyncio.ensure_future(later())
print('begun')
"""
SUBPROCESS = f"""
import subprocess, sys
code = '''
import os, time
{WAITS}
print('said', 'late')
'''
child = subprocess.Popen([sys.executable, '-c', code])
print('begun')
"""
FORK = f"""
import warnings
warnings.simplefilter('ignore')  # of Python 3.12 and later, about threads
import os, time
if os.fork() == 0:
    {WAITS}
    print('said', 'late')
    os._exit(0)
print('begun')
"""
PICTURE = f"""
import asyncio, base64, os, threading, time
from IPython.display import Image, display
data = ('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA'
        'AABJRU5ErkJggg==')
def later():
    {WAITS}
    display(Image(data=base64.b64decode(data)))
    print('said', 'late')
threading.Thread(target=later).start()
print('begun')
"""
TASK_PICTURE = (
    PICTURE.replace("def later", "async def later")
    .replace("time.sleep(0.01)", "await asyncio.sleep(0.01)")
    .replace("threading.Thread(target=later).start()", "task = asyncio.ensure_future(later())")
)
LONG = THREAD.replace("print('said'", "print('long ' * 20_000, 'said'")
FLAGS = ("--allow", "*", "--warm", "0", "--max-output", "10000")
KINDS = {"thread": THREAD, "task": TASK, "subprocess": SUBPROCESS, "fork": FORK}


def mark(cell: int = 1) -> str:
    """The notice before the late output of a cell; 0 for what goes on since an undo or branch."""
    who = f"Since its end, cell {cell}" if cell else "Background code"
    return f"{PREFIX}{who} has put out:"


async def come(agent: Agent, session: str, *, cell: int = 1, go: str = "go") -> None:
    """Let the code go on that waits for the file `go`, and wait until the server has its output."""
    await agent.call("write_file", path=go, content="", session=session)
    found = ""
    with anyio.fail_after(60):
        while "said late" not in found:
            with suppress(MCPError):  # cell 0 is none before its first output
                read = await agent.client.read_resource(f"kernel://{session}/cells/{cell}")
                found = getattr(read.contents[0], "text", "")


async def begun(agent: Agent, code: str) -> str:
    """Run code that goes on after its cell, and return the session."""
    answer = await agent.run(code)
    assert answer.text == "begun"
    return str(answer.cell["session"])


@pytest.mark.parametrize("kind", KINDS)
async def test_output_after_a_cells_end_is_told_once_by_the_next_answer(
    servers: Servers, kind: str
) -> None:
    async with servers.agent(*FLAGS) as agent:
        session = await begun(agent, KINDS[kind])
        await come(agent, session)
        assert (await agent.run("6 * 7")).text == f"42\n{mark()}\nsaid late"
        assert (await agent.run("6 * 8")).text == "48"


async def test_an_error_that_ends_a_fork_is_told_and_is_its_status(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        session = await begun(agent, FORK.replace("print('said', 'late')", "1 / 0  # said late"))
        await come(agent, session)
        told = (await agent.run("os.waitstatus_to_exitcode(os.wait()[1])")).text
        assert told.startswith(f"1\n{mark()}\nTraceback")
        assert told.endswith("ZeroDivisionError: division by zero")
        code = (
            "import sys\nif os.fork() == 0: sys.exit({})\nos.waitstatus_to_exitcode(os.wait()[1])"
        )
        assert (await agent.run(code.format(0))).text == "0"
        assert (await agent.run(code.format(7))).text.splitlines()[-1] == "7"


async def test_a_picture_of_a_thread_is_told_once(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        await come(agent, await begun(agent, PICTURE))
        told = await agent.run("raise ValueError('own')")
        kinds = [block.type for block in told.result.content]
        assert (kinds, len(told.images)) == (["text", "text", "image", "text"], 1)
        assert not (await agent.run("6 * 8")).images


async def test_what_wait_has_shown_is_not_told_again(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        await come(agent, await begun(agent, THREAD))
        assert (await agent.call("wait", cell=1)).text == "begun\nsaid late"
        assert (await agent.run("6 * 7")).text == "42"


async def test_what_no_answer_had_is_told_by_the_end_of_the_session(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        session = await begun(agent, THREAD)
        await come(agent, session)
        closed = await agent.call("close_session", session=session)
        assert "The session is closed" in closed.text
        assert closed.text.endswith(f"{mark()}\nsaid late")
        session = await begun(agent, THREAD)
        await come(agent, session)
        assert "said late" not in (await agent.call("reset", session=session)).text
        assert (await agent.run("6 * 7")).text == f"42\n{mark()}\nsaid late"
        assert mark() not in (await agent.call("close_session", session=session)).text


async def test_late_output_is_bounded_and_leaves_room_for_the_cell(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        await come(agent, await begun(agent, LONG))
        told = await agent.run("print('own ' * 20_000)")
        assert len(told.text) < 11_000
        assert told.text.count("own") > 1000
        assert told.text.count("long") > 800
        assert told.text.endswith("said late")
        assert [link.uri.rsplit("/", 1)[-1] for link in told.links] == ["2", "1"]


async def test_a_failed_cell_tells_it_too(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        await come(agent, await begun(agent, LONG))
        told = await agent.run("1 / 0")
        assert (told.failed, told.text.endswith("said late")) == (True, True)
        assert "ZeroDivisionError" in told.text
        assert len(told.text) < 9000


async def test_a_reset_loses_nothing_of_it(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        session = await begun(agent, THREAD)
        await come(agent, session)
        await agent.call("reset", session=session)
        assert (await agent.run("6 * 7")).text.endswith(f"{mark()}\nsaid late")
        assert (await agent.run("6 * 8")).text == "48"


@pytest.mark.ways
async def test_the_next_server_tells_what_came_before_it_ended(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.life() as first:
        await come(first, await begun(first, TASK.replace("'late')", "'late', 'x' * 200_000)")))
    async with place.life() as second:
        told = (await second.run("6 * 7")).text
        assert f"{mark()}\nsaid late" in told
        assert told.startswith("42\n")
        assert "said late" not in (await second.run("6 * 8")).text
        assert (await second.call("wait", cell=1)).text.startswith("begun\nsaid late")


async def test_cells_that_run_in_one_call_tell_it_once(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        await come(agent, await begun(agent, THREAD))
        cells: list[dict[str, object]] = [
            {
                "id": f"c{number}",
                "cell_type": "code",
                "metadata": {},
                "outputs": [],
                "execution_count": None,
                "source": str(number),
            }
            for number in range(20)
        ]
        book = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        await agent.call("write_file", path="book.ipynb", content=json.dumps(book))
        told = await agent.call("run_cells", path="book.ipynb", cells="all")
        assert told.text.count("said late") == 1
        assert (await agent.run("6 * 8")).text == "48"


@pytest.mark.ways
async def test_what_goes_on_after_an_undo_and_in_a_branch_is_told(servers: Servers) -> None:
    async with servers.agent("--allow", "*", "--warm", "0") as agent:
        root = await begun(agent, TASK)
        await agent.run("x = 1", checkpoint=True)
        await agent.call("undo")
        await come(agent, root, cell=0)
        assert (await agent.run("6 * 7")).text == f"42\n{mark(0)}\nsaid late"
        assert (await agent.run("6 * 8")).text == "48"
        await agent.run("import os; os.remove('go')")
        await agent.run(TASK_PICTURE)
        (branch,) = (await agent.call("branch", n=1)).data["branches"]
        await come(agent, branch["session"], cell=0)
        told = await agent.run("6 * 7", session=branch["session"])
        assert (told.text, len(told.images)) == (f"42\n{mark(0)}\nsaid late", 1)
        assert (await agent.run("6 * 8", session=branch["session"])).text == "48"


async def test_an_adoption_tells_what_the_branch_had_not(servers: Servers) -> None:
    async with servers.agent("--allow", "*", "--warm", "0") as agent:
        root = (await agent.run("x = 1")).cell["session"]
        (made,) = (await agent.call("branch", n=1, session=root)).data["branches"]
        branch = made["session"]
        await agent.run(TASK, session=branch)
        await come(agent, branch)
        told = await agent.call("adopt", branch=branch)
        late = "since its end, cell 1 has put out: said late"
        assert f"Of branch {branch}: {late}" in told.text
        assert (await agent.run("6 * 7", session=root)).text == "42"


@pytest.mark.ways
def test_over_http_it_is_told_until_an_answer_has_arrived() -> None:
    with http_server() as server:
        session = str(called(server, with_urllib, "create_session").data["session"])
        call = partial(called, server, with_urllib, session=session)
        assert call("execute", code=THREAD).text == "begun"
        call("write_file", path="go", content="")
        whole = Request(f"{server.url}/sessions/{session}/cells/1", headers=bearer(server.token))
        found = b""
        while b"said late" not in found:
            with urlopen(whole, timeout=READY_S) as answer:
                found = answer.read()
        hang_up(server, "close", "'unread'", session)
        assert f"{mark()}\nsaid late" in call("execute", code="'read'").text
        assert call("wait", cell=2).text == "'unread'"
        assert call("execute", code="6 * 8").text == "48"
