"""Calls that outlive their requests, by a client of the specification (SEP-2663)."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.sessions.cell import FOLLOWED_S
from tests.integration.task_client import (
    MOST_POLLS_S,
    TASKS,
    RefusedError,
    TaskClient,
    shown,
    task_client,
    text_of,
)

pytestmark = [pytest.mark.anyio]
UNKNOWN, UNDECLARED, NO_METHOD = -32602, -32021, -32601
UNTIL = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\n"


@asynccontextmanager
async def life(place: Path, *flags: str) -> AsyncIterator[TaskClient]:
    """One of the servers of a folder, which keep their sessions."""
    async with task_client("--persist", "1G,1d", "--state-dir", str(place), *flags) as found:
        yield found


async def go(client: TaskClient) -> None:
    """Let the cell of `UNTIL` end."""
    await client.call("write_file", path="go", content="")


async def notebook(client: TaskClient, *sources: str) -> None:
    """Write a notebook with these cells."""
    cells: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "source": source,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for source in sources
    ]
    document = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    await client.call("write_file", path="a.ipynb", content=json.dumps(document))


async def test_a_long_cell_is_a_task_and_its_result_is_whole() -> None:
    async with task_client() as one:
        about = await one.ask("server/discover")
        assert about["capabilities"]["extensions"][TASKS] == {}
        await one.run("execute", code="x = 6")
        short = await one.call("execute", code="x * 7")
        assert short["resultType"] == "complete", shown(short)
        assert text_of(short) == "42"
        task = await one.call("execute", code=f"print('begun')\n{UNTIL}print('done', x)", wait=0)
        assert task["resultType"] == "task", shown(task)
        assert task["status"] == "working"
        assert task["ttlMs"] is None
        state = await one.shows(task, "begun")
        assert state["createdAt"] == task["createdAt"]
        await go(one)
        state = await one.ended(task)
        assert state["status"] == "completed", shown(state)
        assert text_of(state["result"]) == "begun\ndone 6"
        assert not state["result"]["isError"]
        assert "kernel-mcp/lasting" not in state["result"]["_meta"]
        again = await one.get(task["taskId"])
        assert text_of(again["result"]) == "begun\ndone 6"
        after = await one.run("execute", code="'next'")
        assert after == "'next'", "the end was told by the task"


async def test_models_of_clients_with_tasks_are_not_told_to_wait() -> None:
    async with task_client() as one:
        for client, tasks in ((one, True), (TaskClient(one.raw, {}), False)):
            about = (await client.ask("server/discover"))["instructions"]
            tools = (await client.ask("tools/list"))["tools"]
            [execute] = [each["description"] for each in tools if each["name"] == "execute"]
            for text in (about, execute):
                assert ("result comes by itself" in text) is tasks
                assert ("`running`" in text) is not tasks


async def test_a_client_that_does_not_declare_tasks_gets_none() -> None:
    async with task_client(capabilities={}) as one:
        answer = await one.call("execute", code=UNTIL, wait=0)
        assert answer["resultType"] == "complete"
        assert "running" in text_of(answer)
        for method in ("tasks/get", "tasks/cancel"):
            with pytest.raises(RefusedError) as refused:
                await one.ask(method, taskId="cell-1:::0:0")
            assert refused.value.code == UNDECLARED
        await one.call("interrupt")
        for method in ("tasks/list", "tasks/result"):
            with pytest.raises(RefusedError) as refused:
                await one.ask(method, taskId="x")
            assert refused.value.code == NO_METHOD


async def test_a_cancelled_task_is_interrupted_and_what_it_printed_can_be_read() -> None:
    async with task_client() as one:
        code = "kept = 1\nprint('so far', flush=True)\nwhile True: pass"
        task = await one.call("execute", code=code, wait=0)
        await one.shows(task, "so far")
        assert await one.ask("tasks/cancel", taskId=task["taskId"]) | {"_meta": 0} == {
            "resultType": "complete",
            "_meta": 0,
        }
        told = await one.run("execute", code="kept")
        assert "cell 1" in told, "its end is told, as the client may not ask again"
        waited = await one.call("wait", cell=1)
        assert "so far" in text_of(waited)
        state = await one.get(task["taskId"])
        assert state["status"] == "completed"
        assert "so far" in text_of(state["result"])
        assert "interrupted" in text_of(state["result"])


async def test_forged_and_foreign_ids_are_unknown() -> None:
    async with task_client() as one, task_client() as other:
        task = await one.call("execute", code=UNTIL, wait=0)
        forged = task["taskId"][:-1] + ("0" if task["taskId"][-1] != "0" else "1")
        for client, name in ((one, forged), (one, "x"), (one, ""), (other, task["taskId"])):
            for method in ("tasks/get", "tasks/cancel", "tasks/update"):
                with pytest.raises(RefusedError) as refused:
                    await client.ask(method, taskId=name, inputResponses={})
                assert refused.value.code == UNKNOWN, (method, name)
        assert (await one.get(task["taskId"]))["status"] == "working"
        await one.ask("tasks/update", taskId=task["taskId"], inputResponses={"q": {"action": "x"}})
        await go(one)
        assert (await one.ended(task))["status"] == "completed"


async def test_a_result_outlives_a_killed_server(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        task = await first.call(
            "execute", code="print('first')\nimport time; time.sleep(1)", wait=0
        )
        ended = await first.ended(task)
        cut = await first.call("execute", code=f"print('second', flush=True)\n{UNTIL}", wait=0)
        await first.shows(cut, "second")
        os.kill(first.raw.process.pid, signal.SIGKILL)
        await first.raw.process.wait()
    async with life(tmp_path) as second:
        state = await second.get(task["taskId"])
        assert state["status"] == "completed", shown(state)
        assert text_of(state["result"]).startswith("first\n") or text_of(state["result"]) == "first"
        assert state["createdAt"] == ended["createdAt"]
        state = await second.get(cut["taskId"])
        assert state["status"] == "completed", shown(state)
        assert state["result"]["isError"]
        assert text_of(state["result"]).startswith("second\n")
        assert "the server ended" in text_of(state["result"])


@pytest.mark.ways
async def test_a_task_of_a_session_that_was_replaced_says_so(tmp_path: Path) -> None:
    async with life(tmp_path) as one:
        await one.call("create_session", name="work")
        task = await one.call(
            "execute", session="work", code="1\nimport time; time.sleep(.5)", wait=0
        )
        await one.ended(task)
        await one.call("close_session", session="work")
        await one.call("create_session", name="work", fresh=True)
        await one.run("execute", session="work", code="'another cell 1'")
        state = await one.get(task["taskId"])
        assert state["status"] == "completed"
        assert state["result"]["isError"]
        assert "closed" in text_of(state["result"])


@pytest.mark.ways
async def test_handles_stay_those_of_sessions_that_are_kept(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        await first.run("execute", code="x = 5")
        made = await first.call("wait", cell=1)
        handle = made["_meta"]["kernel-mcp/cell"]["session"]
    async with life(tmp_path) as second:
        assert (await second.run("execute", code="x")).startswith("5")
        assert await second.run("execute", code="x + 1", session=handle) == "6"


@pytest.mark.ways
async def test_scripts_and_notebooks_are_tasks_in_memory(tmp_path: Path) -> None:
    async with life(tmp_path) as one:
        script = await one.call(
            "run_script", script="import time\nprint('on', flush=True)\ntime.sleep(7)"
        )
        assert script["resultType"] == "task", shown(script)
        assert (await one.ended(script))["status"] == "completed"
        await notebook(one, "print('one')", f"{UNTIL}print('two')")
        task = await one.call("run_cells", path="a.ipynb", cells="all", wait=0)
        assert task["resultType"] == "task", shown(task)
        with pytest.raises(RefusedError) as refused:
            await one.get(task["taskId"][:-1] + "_")
        assert refused.value.code == UNKNOWN
        await go(one)
        text = text_of((await one.ended(task))["result"])
        assert "one" in text
        assert "two" in text


async def test_what_a_cancelled_script_has_put_out_can_be_read() -> None:
    async with task_client() as one:
        task = await one.call("run_script", script=f"print('so far', flush=True)\n{UNTIL}")
        await one.shows(task, "so far")
        await one.ask("tasks/cancel", taskId=task["taskId"])
        state = await one.ended(task)
        assert state["status"] == "cancelled"
        assert "default session" in state["statusMessage"]
        told = await one.run("execute", code="1")
        assert told.count("put out whose call was cancelled") == 1
        (address,) = [word for word in told.split() if word.startswith("kernel://")]
        assert "so far" in await one.run("read_file", path=address)
        assert await one.run("execute", code="2") == "2"


async def test_a_cancelled_notebook_stops_and_no_other_cell_does(tmp_path: Path) -> None:
    async with life(tmp_path) as one:
        await notebook(one, "print('one')", f"print('two', flush=True)\n{UNTIL}")
        task = await one.call("run_cells", path="a.ipynb", cells="all", wait=0)
        await one.shows(task, "two")
        await one.ask("tasks/cancel", taskId=task["taskId"])
        assert (await one.ended(task))["status"] == "cancelled"
        told = await one.run("execute", code="'after'")
        assert "cell 1, which was running, has ended: ok" in told
        assert "cell 2, whose call was cancelled, has ended: interrupted" in told
        assert await one.run("execute", code="'later'") == "'later'", "it is told once"
        assert "two" in await one.run("wait", cell=2)
        other = await one.call("execute", code=UNTIL, wait=0)
        queued = await one.call("run_cells", path="a.ipynb", cells="all", wait=0)
        await one.ask("tasks/cancel", taskId=queued["taskId"])
        assert (await one.ended(queued))["status"] == "cancelled"
        assert (await one.get(other["taskId"]))["status"] == "working"
        await go(one)
        assert (await one.ended(other))["status"] == "completed"


@pytest.mark.ways
async def test_a_session_can_be_reset_while_a_task_runs(tmp_path: Path) -> None:
    async with life(tmp_path) as one:
        await one.run("execute", code="import time")
        task = await one.call("execute", code="print('on', flush=True); time.sleep(600)", wait=0)
        await one.shows(task, "on")
        with anyio.fail_after(60):
            await one.call("reset")
        state = await one.ended(task)
        assert "the session was reset" in text_of(state["result"])
        assert await one.run("execute", code="1") == "1"


async def test_code_that_says_that_it_never_began_is_told_as_what_it_was(tmp_path: Path) -> None:
    code = f"# never begun\nx = 1; print('begun')\n{UNTIL}"
    async with life(tmp_path) as first:
        task = await first.call("execute", code=code, wait=0)
        await first.shows(task, "begun")
        os.kill(first.raw.process.pid, signal.SIGKILL)
        await first.raw.process.wait()
    async with life(tmp_path) as second:
        state = await second.ended(await second.get(task["taskId"]))
        text = text_of(state["result"])
        assert "killed: the server ended before what this cell did was saved" in text, text


@pytest.mark.ways
async def test_numbers_of_queued_tasks_are_not_given_away(tmp_path: Path) -> None:
    async with life(tmp_path) as first:
        task = await first.call("execute", code="print('on', flush=True)\n" + UNTIL, wait=0)
        await first.shows(task, "on")
        await first.call("execute", code="print('never')", wait=0)
        queued = await first.call("execute", code="print('it did not run')", wait=0)
        os.kill(first.raw.process.pid, signal.SIGKILL)
        await first.raw.process.wait()
    async with life(tmp_path) as second:
        told = await second.run("execute", code="'another'")
        assert told.startswith("'another'")
        assert "Cell 1 ran after that was saved" in told, "the others had not begun"
        state = await second.get(queued["taskId"])
        assert state["status"] == "completed", shown(state)
        assert "interrupted: the server ended before this cell began" in text_of(state["result"])
        assert "another" not in text_of(state["result"])
        record = await second.ask("resources/read", uri="kernel://default/cells/3.json")
        assert '"execution_count": null' in record["contents"][0]["text"]
        book = await second.ask("resources/read", uri="kernel://default/notebook")
        assert "it did not run" in book["contents"][0]["text"]
        assert "never begun" not in book["contents"][0]["text"]


@pytest.mark.ways
async def test_polls_of_an_old_task_tell_nothing_of_a_new_session_of_its_name(
    tmp_path: Path,
) -> None:
    async with life(tmp_path) as one:
        await one.call("create_session", name="z")
        old = await one.call("execute", session="z", code="import time; time.sleep(.5)", wait=0)
        await one.ended(old)
        await one.call("close_session", session="z")
        await one.call("create_session", name="z", fresh=True)
        assert "new" in await one.run("execute", session="z", code="'new'")
        await one.get(old["taskId"])
        assert "has ended" not in await one.run("execute", session="z", code="'later'")


@pytest.mark.ways
@pytest.mark.parametrize("wait", [None, pytest.param("30s", marks=pytest.mark.ways)])
async def test_a_longer_wait_is_no_longer_call(wait: object) -> None:
    async with task_client() as one:
        task = await one.call("execute", code=UNTIL, wait=wait)
        assert task["resultType"] == "task", shown(task)
        await go(one)
        await one.ended(task)


@pytest.mark.ways
async def test_a_server_that_ends_ends_the_scripts_of_its_tasks(tmp_path: Path) -> None:
    async with life(tmp_path) as one:
        task = await one.call("run_script", script="while True: pass", timeout="1h")
        assert task["status"] == "working"
    async with life(tmp_path) as two:  # the first ended well, see `task_client`
        state = await two.get(task["taskId"])
        assert state["status"] == "completed"
        assert "run_script has no result" in text_of(state["result"])
        with pytest.raises(RefusedError) as refused:
            await two.get(task["taskId"].replace("run_script", "install"))
        assert refused.value.code == UNKNOWN


@pytest.mark.ways
async def test_wait_is_no_second_task_of_a_cell_that_is_followed() -> None:
    async with task_client() as one:
        task = await one.call("execute", code=UNTIL, wait=0)
        waited = await one.call("wait", wait=0)
        assert waited["resultType"] == "complete", shown(waited)
        await go(one)
        await one.ended(task)


async def test_a_cell_that_nobody_polls_any_more_is_told_once() -> None:
    async with task_client() as one:
        await one.run("execute", code="import time")
        await one.call("execute", code="time.sleep(1); print('the end')", wait=0)
        await one.call("execute", code=f"print('on', flush=True)\n{UNTIL}", wait=0)
        await anyio.sleep(FOLLOWED_S)
        told = await one.run("list_files")
        assert "cell 2, which was running, has ended: ok" in told
        await go(one)
        told = await one.run("execute", code="3", wait=60)
        assert "cell 2" not in told
        assert "cell 3, which was running, has ended: ok" in told
        assert await one.run("execute", code="4") == "4"
        assert "the end" in await one.run("wait", cell=2)


async def test_a_client_may_poll_its_tasks_one_after_the_other() -> None:
    async with task_client() as one:
        first, last = [await one.call("execute", code=UNTIL, wait=0) for _ in range(2)]
        await go(one)
        assert (await one.ended(last))["status"] == "completed"
        for _ in range(2):
            await anyio.sleep(FOLLOWED_S * 0.6)
            assert "has ended" not in text_of((await one.get(last["taskId"]))["result"])
        assert "has ended" not in text_of((await one.ended(first))["result"])


async def test_wait_is_a_task_once_no_cell_is_followed() -> None:
    async with task_client() as one:
        await one.run("execute", code="import time")
        await one.ended(await one.call("execute", code="time.sleep(.1)", wait=0))
        plain = TaskClient(one.raw, {})
        await plain.call("execute", code=UNTIL, wait=0)
        task = await one.call("wait", wait=0)
        assert task["resultType"] == "task", shown(task)
        await go(one)
        assert (await one.ended(task))["status"] == "completed"


async def test_the_operator_sees_which_cells_are_followed(tmp_path: Path) -> None:
    async with life(tmp_path) as one:
        await one.run("execute", code="1")
        for _ in range(2):
            await one.call("execute", code=UNTIL, wait=0)
        words = ("-m", "kernel_mcp", "sessions", "list", "--state-dir", str(tmp_path))
        listed = await anyio.run_process([sys.executable, *words])
        assert "3 cells" in listed.stdout.decode()
        assert listed.stdout.decode().count(", followed by tasks: 2, 3\n") == 1
        await go(one)


@pytest.mark.ways
async def test_fifty_tasks_at_once() -> None:
    async with task_client("--max-sessions", "4") as one:
        tasks = [
            await one.call("execute", code=f"import time; time.sleep(0.02); {number}", wait=0)
            for number in range(50)
        ]
        assert len({each["taskId"] for each in tasks}) == len(tasks)
        found: dict[str, str] = {}
        with anyio.fail_after(MOST_POLLS_S):
            while len(found) < len(tasks):  # a client polls all of its tasks
                for name in [each["taskId"] for each in tasks if each["taskId"] not in found]:
                    state = await one.get(name)
                    if state["status"] == "completed":
                        found[name] = text_of(state["result"])
        assert [found[each["taskId"]] for each in tasks] == [str(number) for number in range(50)]


@pytest.mark.ways
async def test_a_key_that_cannot_be_kept_costs_no_task(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o700)
    (tmp_path / "kept" / "secret").mkdir()
    async with life(tmp_path) as one:
        task = await one.call("execute", code=UNTIL, wait=0)
        assert task["resultType"] == "task", shown(task)
        await go(one)
        assert (await one.ended(task))["status"] == "completed"
