"""People work in a session beside its agent, with programs that speak Jupyter's protocol."""

from __future__ import annotations

import json
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import zmq.asyncio

from tests.integration.agent import Agent, agent, notices
from tests.integration.person import Person, brief, join, person
from tests.integration.servers import Servers

pytestmark = pytest.mark.anyio

FOREVER = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.01)"


@pytest.fixture
def state() -> Iterator[Path]:
    """A folder for state with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """The one of the server that most tests share."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


def flags(state: Path, *more: str) -> tuple[str, ...]:
    return ("--state-dir", str(state), "--allow", "*", *more)


async def begun(them: Person) -> None:
    """Wait until a cell of `FOREVER` runs."""
    while (await them.hear())["content"].get("text") != "begun\n":
        pass


async def test_both_see_the_same_variables_and_each_hears_of_the_other(
    shared: Path, servers: Servers
) -> None:
    async with servers.agent(*flags(shared)) as notebook:
        await notebook.run("x = 1")
        async with person(shared) as them:
            reply = await them.reply(run := them.run("x += 41\nprint('hi')\nx"))
            assert (reply["status"], reply["execution_count"]) == ("ok", 2)
            assert brief(await them.until_idle(run)) == [
                ("status", "busy"),
                ("execute_input", "x += 41\nprint('hi')\nx"),
                ("stream", "hi\n"),
                ("execute_result", "42"),
                ("status", "idle"),
            ]
            answer = await notebook.run("print(x)")
            assert answer.text.startswith("42\n")
            assert notices(answer) == [
                "[kernel-mcp] a person ran cell 2 (ok): x += 41; `wait` with cell=2 shows it"
            ]
            assert not notices(await notebook.run("0"))
            seen = await them.until_idle(code="print(x)")
            assert brief(seen)[1:3] == [("execute_input", "print(x)"), ("stream", "42\n")]
            assert {m["parent_header"]["username"] for m in seen} == {"agent"}
        shown = await notebook.call("wait", cell=2)
        assert shown.text == "hi\n42"


@pytest.mark.parametrize("code", ["exit", "quit()\n"])
async def test_a_person_leaves_a_console_and_the_session_goes_on(
    shared: Path, servers: Servers, code: str
) -> None:
    async with servers.agent(*flags(shared)) as notebook:
        await notebook.run("x = 1")
        async with person(shared) as them:
            reply = await them.reply(run := them.run(code))
            assert (reply["status"], reply["execution_count"]) == ("ok", 1)
            assert reply["payload"] == [{"source": "ask_exit", "keepkernel": True}]
            assert brief(await them.until_idle(run)) == [("status", "busy"), ("status", "idle")]
        assert (await notebook.run("x")).text == "1"


@pytest.mark.ways
async def test_a_front_outlives_resets_hibernation_and_the_death_of_kernels(state: Path) -> None:
    async with agent(*flags(state), "--idle-timeout", "1s") as notebook:
        await notebook.run("x = 1")
        async with person(state) as them:
            await notebook.call("reset")
            reply = await them.reply(run := them.run("x"))
            assert reply["ename"] == "NameError"
            told = "".join(
                m["content"]["text"]
                for m in await them.until_idle(run)
                if m["msg_type"] == "stream"
            )
            assert "The session was reset" in told
            assert "Lost: x." in told
            await them.reply(them.run("y = 5"))
            with anyio.fail_after(60):
                while (await notebook.call("list_sessions")).data["sessions"][0][
                    "state"
                ] != "hibernated":
                    await anyio.lowlevel.checkpoint()
            assert (await them.ask("kernel_info_request"))["status"] == "ok"
            assert (await them.reply(them.run("assert y == 5")))["status"] == "ok"
            reply = await them.reply(run := them.run("import os; os._exit(3)"))
            assert (reply["status"], reply["ename"]) == ("error", "Killed")
            assert "error" in [kind for kind, _ in brief(await them.until_idle(run))]
            answer = await notebook.run("1")
            assert "a person ran cell" in answer.text
            assert "was killed" in answer.text
            assert (await them.reply(them.run("1")))["status"] == "ok"


async def test_neither_stops_or_receives_the_cells_of_the_other(
    shared: Path, servers: Servers
) -> None:
    async with servers.agent(*flags(shared)) as notebook:
        await notebook.run("mine = 1\nprint('of the agent')")
        async with person(shared) as them:
            theirs = them.run(FOREVER)
            await begun(them)
            stopped = await notebook.call("interrupt")
            assert "cell 2 is, which a person has started" in stopped.text
            assert "begun" not in (await notebook.call("wait", wait=0.1)).text
            queued = await notebook.call("execute", code="mine", wait=0.1)
            assert "of which a person runs one" in queued.text
            given_up = await notebook.call("interrupt")
            assert given_up.cell["cell"] == 3
            assert given_up.status == "interrupted"
            waiting = them.run("'never run'")
            assert (await them.ask("interrupt_request", "control"))["status"] == "ok"
            assert (await them.reply(waiting))["status"] == "aborted"
            assert "KeyboardInterrupt" in str(await them.until_idle(theirs))
            async with anyio.create_task_group() as tasks:
                agents = "import time\nfor _ in range(20): time.sleep(0.05)\n'done'"
                tasks.start_soon(expect_done, notebook, agents)
                while (await them.hear())["content"].get("code") != agents:
                    pass
                waiting = them.run("'never run either'")
                assert (await them.ask("interrupt_request", "control"))["status"] == "ok"
                assert (await them.reply(waiting))["status"] == "aborted"


async def expect_done(notebook: Agent, code: str) -> None:
    assert "done" in (await notebook.run(code)).text


async def test_a_person_stops_the_cell_of_the_agent_on_purpose(
    shared: Path, servers: Servers
) -> None:
    async with servers.agent(*flags(shared)) as notebook:
        await notebook.run("0")
        async with person(shared) as them, anyio.create_task_group() as tasks:

            async def run() -> None:
                answer = await notebook.run(FOREVER)
                assert answer.status == "interrupted"
                assert "A person has stopped this cell" in answer.text

            tasks.start_soon(run)
            await begun(them)
            assert (await them.ask("interrupt_request", "control"))["status"] == "ok"


@pytest.mark.ways
async def test_an_interrupt_that_comes_too_late_for_a_persons_cell_spares_the_agents(
    state: Path,
) -> None:
    async with agent(*flags(state), pauses=False) as notebook:
        await notebook.run("0")
        async with person(state) as them:
            mine = them.run(FOREVER)
            await begun(them)
            async with anyio.create_task_group() as tasks:
                agents = "import time\nfor _ in range(20): time.sleep(0.05)\n'done'"
                tasks.start_soon(expect_done, notebook, agents)
                while (await notebook.call("list_sessions")).data["sessions"][0]["queued"] != 1:
                    pass
                assert (await them.ask("interrupt_request", "control"))["status"] == "ok"
                while (await them.hear())["content"].get("code") != agents:
                    pass
                late = them.send("interrupt_request", "control")
                assert (await them.reply(late, "control"))["status"] == "ok"
                assert "cell 3, not yours, runs now" in str(await them.until_idle(late))
            assert (await them.reply(mine))["ename"] == "KeyboardInterrupt"


async def test_what_programs_without_the_key_send_leaves_listeners_alone(
    shared: Path, servers: Servers
) -> None:
    async with servers.agent(*flags(shared)) as notebook, person_of_new(shared, notebook) as them:
        facts = json.loads((await join(shared)).read_text())
        with zmq.asyncio.Context() as context, context.socket(zmq.XSUB) as peer:
            peer.connect(f"ipc://{facts['ip']}-{facts['iopub_port']}")
            await peer.send(b"\x01peer")
            assert b"iopub_welcome" in (await peer.recv_multipart())[3]
            await peer.send(b"\x02")
            await peer.send(b"\x00peer")
            for _ in range(3):
                await them.until_idle(them.run("1"))


async def test_limits_record_export_and_trail_hold_for_cells_of_people(state: Path) -> None:
    log = state / "audit.jsonl"
    async with agent(*flags(state, "--timeout", "1s", "--audit-log", str(log))) as notebook:
        async with person_of_new(state, notebook) as them:
            reply = await them.reply(run := them.run("import time; time.sleep(60)"))
            assert reply["ename"] == "KeyboardInterrupt"
            assert "it reached its time limit of 1 s" in str(await them.until_idle(run))
        await notebook.call("export_notebook", path="a.ipynb")
        book = json.loads((await notebook.call("read_file", path="a.ipynb")).text)
        assert book["cells"][1]["metadata"]["kernel-mcp"]["author"] == "person"
        assert "author" not in book["cells"][0]["metadata"]["kernel-mcp"]
    cells = [json.loads(line) for line in log.read_text().splitlines() if '"cell"' in line]
    assert '"event": "join"' in log.read_text()
    ran = [(each["cell"], each["author"]) for each in cells if each["event"] == "cell"]
    assert ran == [(1, ""), (2, "person")]


@asynccontextmanager
async def person_of_new(state: Path, notebook: Agent) -> AsyncIterator[Person]:
    """A person in the session that the first cell of an agent makes."""
    await notebook.run("0")
    async with person(state) as them:
        yield them


@pytest.mark.ways
async def test_what_front_ends_ask_besides_is_answered(shared: Path, servers: Servers) -> None:
    async with servers.agent(*flags(shared)) as notebook:
        await notebook.run("number = 3")
        async with person(shared) as them:
            found = await them.ask("complete_request", code="number.bit_l", cursor_pos=12)
            assert "bit_length" in str(found["matches"])
            found = await them.ask("inspect_request", code="number", cursor_pos=3, detail_level=0)
            assert "int" in found["data"]["text/plain"]
            assert (await them.ask("is_complete_request", code="if 1:"))["status"] == "incomplete"
            found = await them.ask("history_request", hist_access_type="tail", n=5, output=False)
            assert found["history"] == [[1, 1, "number = 3"]]
            assert (await them.ask("comm_info_request"))["comms"] == {}
            assert (await them.ask("shutdown_request", "control"))["ename"] == "Refused"
            assert (await them.ask("debug_request", "control"))["status"] == "error"
            assert (await them.reply(them.run("")))["execution_count"] == 1
            found = await them.reply(them.run("1", user_expressions={"a": "number", "b": "1"}))
            expressions = found["user_expressions"]
            assert {name: each["status"] for name, each in expressions.items()} == {
                "a": "error",
                "b": "error",
            }
            there = them.send("execute_request", "control", code="2", silent=True)
            assert (await them.reply(there, "control"))["status"] == "ok"
            silent = them.run("print('unheard')", silent=True)
            assert (await them.reply(silent))["status"] == "ok"
            kinds = [kind for kind, _ in brief(await them.until_idle(silent))]
            assert kinds == ["status", "status"]
            running = them.run(FOREVER)
            await begun(them)
            found = await them.ask("complete_request", code="number.bit_l", cursor_pos=12)
            assert found["matches"] == []
            await them.ask("interrupt_request", "control")
            await them.reply(running)
            hostile = "class Slow:\n    def __dir__(self):\n        while True: pass\nslow = Slow()"
            await them.reply(them.run(hostile))
            with anyio.fail_after(30):
                await them.ask("complete_request", code="slow.", cursor_pos=5)
            assert "3" in (await notebook.run("number")).text


async def test_what_is_queued_behind_a_failure_is_not_run(shared: Path, servers: Servers) -> None:
    async with servers.agent(*flags(shared)) as notebook:
        async with person_of_new(shared, notebook) as them:
            failing = them.run("import time; time.sleep(0.2); 1/0")
            behind = them.run("behind = 1")
            assert (await them.reply(failing))["ename"] == "ZeroDivisionError"
            assert (await them.reply(behind))["status"] == "aborted"
            failing = them.run("import time; time.sleep(0.2); 1/0", stop_on_error=False)
            behind = them.run("behind = 2")
            assert (await them.reply(failing))["ename"] == "ZeroDivisionError"
            assert (await them.reply(behind))["status"] == "ok"
        assert "2" in (await notebook.run("behind")).text


async def test_only_who_has_the_key_is_served(shared: Path, servers: Servers) -> None:
    async with servers.agent(*flags(shared)) as notebook:
        async with person_of_new(shared, notebook) as them:
            file = await join(shared)
            assert await join(shared) == file
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
            them.client.session.key = b"not the key"
            request = them.run("forged = 1")
            with anyio.move_on_after(1):
                while True:
                    assert (await them.hear())["parent_header"].get("msg_id") != request
        answer = await notebook.run("'forged' in globals()")
        assert answer.text == "False"
        assert "Errno" in (await notebook.run(f"open({str(file)!r})")).text
        await notebook.call("close_session")
        with anyio.fail_after(30):
            while list(file.parent.iterdir()):
                await anyio.lowlevel.checkpoint()


@pytest.mark.ways
async def test_joining_says_what_is_missing(state: Path) -> None:
    async def said(*words: str) -> str:
        command = [sys.executable, "-m", "kernel_mcp", "sessions", "join", *words]
        done = await anyio.run_process([*command, "--state-dir", str(state)], check=False)
        assert done.returncode == 1
        assert not done.stdout
        return done.stderr.decode()

    assert "no server of this user runs" in await said()
    async with agent(*flags(state)) as notebook:
        assert "There is no session." in await said()
        for name in ("one", "two"):
            await notebook.call("create_session", name=name)
        assert "several sessions" in await said()
        assert "There is no session 'three'" in await said("three")
        assert (await join(state, "two")).exists()
