"""Questions of code to the person at a client: `input()`, debuggers, and their bounds."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp.client import Client
from mcp.client.session import ClientRequestContext

from kernel_mcp.sessions.questions import ANSWER_CHARS
from tests.integration.agent import ERAS, Agent, command
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
FORMS: dict[str, Any] = {"elicitation": {"form": {}}}
BOTH = {"extensions": {TASKS: {}}, **FORMS}
NAME = "name = input('Name? ')\nprint('hello', name)"


def notebook(source: str) -> dict[str, Any]:
    """A notebook of one cell."""
    cell = {"cell_type": "code", "source": source, "metadata": {}, "outputs": []}
    return {
        "cells": [{**cell, "execution_count": None}],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 4,
    }


async def asked(client: TaskClient, task: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key and the request of the question of a task, once it is open."""
    with anyio.fail_after(MOST_POLLS_S):
        while task["status"] == "working" or "inputRequests" not in task:
            assert task["status"] in ("working", "input_required"), shown(task)
            await anyio.sleep(0.02)
            task = await client.get(task["taskId"])
    [(key, request)] = task["inputRequests"].items()
    return key, request


async def give(client: TaskClient, task: dict[str, Any], key: str, value: str) -> None:
    """Answer the question of a task, as a person fills in the form."""
    response = {"action": "accept", "content": {"answer": value}}
    await client.ask("tasks/update", taskId=task["taskId"], inputResponses={key: response})


async def test_input_is_a_question_of_a_task() -> None:
    async with task_client(capabilities=BOTH) as one:
        task = await one.call("execute", code=NAME)
        assert task["resultType"] == "task", shown(task)
        key, request = await asked(one, task)
        assert request["method"] == "elicitation/create"
        params = request["params"]
        assert params["message"] == "Code in notebook cell 1 asks: Name?"
        assert params["requestedSchema"]["required"] == ["answer"]
        await give(one, task, key, "Ada")
        state = await one.ended(task)
        text = text_of(state["result"])
        assert text.startswith("hello Ada\n"), text
        assert "The code asked the person: 1 answered" in text
        assert await one.run("execute", code="name") == "'Ada'"


async def test_input_is_the_answer_to_a_call_without_tasks() -> None:
    async with task_client(capabilities=FORMS) as one:
        found = await one.call("execute", code=NAME + "\nprint(input('Age? '))")
        for value in ("Ada", "36"):
            assert found["resultType"] == "input_required", shown(found)
            [(key, request)] = found["inputRequests"].items()
            assert request["params"]["message"].startswith("Code in notebook cell 1 asks: ")
            found = await one.ask(
                "tools/call",
                name="execute",
                arguments={"code": NAME + "\nprint(input('Age? '))"},
                inputResponses={key: {"action": "accept", "content": {"answer": value}}},
                requestState=found["requestState"],
            )
        assert found["resultType"] == "complete", shown(found)
        assert text_of(found).startswith("hello Ada\n36\n")


async def test_code_that_asks_where_nobody_can_be_asked_gets_an_error() -> None:
    async with task_client(capabilities={"extensions": {TASKS: {}}}) as one:
        text = await one.run("execute", code=NAME)
        assert "nobody to ask" in text


async def test_a_debugger_is_a_conversation() -> None:
    code = "def f(x):\n    breakpoint()\n    return x + 1\nf(41)"
    async with task_client(capabilities=BOTH) as one:
        task = await one.call("execute", code=code)
        key, request = await asked(one, task)
        assert "(Pdb)" in request["params"]["message"] or "ipdb>" in request["params"]["message"]
        await give(one, task, key, "p x")
        task = await one.get(task["taskId"])
        key, request = await asked(one, task)
        assert "41" in request["params"]["message"]
        await give(one, task, key, "c")
        state = await one.ended(task)
        assert "42" in text_of(state["result"])


async def test_an_exception_opens_the_debugger_where_it_is_on() -> None:
    async with task_client(capabilities=BOTH) as one:
        await one.run("execute", code="%pdb on")
        task = await one.call("execute", code="x = 5\n1 / 0")
        key, request = await asked(one, task)
        assert "ipdb>" in request["params"]["message"]
        await give(one, task, key, "p x * 111")
        task = await one.get(task["taskId"])
        key, request = await asked(one, task)
        assert "555" in request["params"]["message"]
        await give(one, task, key, "q")
        assert "ZeroDivisionError" in text_of((await one.ended(task))["result"])
    async with task_client(capabilities={"extensions": {TASKS: {}}}) as one:
        text = await one.run("execute", code="%pdb on\n1 / 0")
        assert "ZeroDivisionError" in text
        assert "nobody to ask" in text


async def test_an_answer_that_is_too_long_is_cut_with_a_word() -> None:
    async with task_client(capabilities=BOTH) as one:
        task = await one.call("execute", code="len(input('Text? '))")
        key, _ = await asked(one, task)
        await give(one, task, key, "x" * (ANSWER_CHARS + 1))
        text = text_of((await one.ended(task))["result"])
        assert text.startswith(f"{ANSWER_CHARS}\n")
        assert "the first 100,000 characters" in text


Reply = Callable[[str], tuple[str, str]]


@asynccontextmanager
async def person(
    reply: Reply, *flags: str, era: str = "legacy"
) -> AsyncIterator[tuple[Agent, list[str]]]:
    """A client of the SDK whose person answers a message by an action and a text."""
    seen: list[str] = []

    async def elicit(
        context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        seen.append(params.message)
        action, text = reply(params.message)
        content = {"answer": text} if action == "accept" else None
        return types.ElicitResult.model_validate({"action": action, "content": content})

    asking = command("--warm", "0", *flags)
    async with Client(asking, mode=era, elicitation_callback=elicit) as client:
        yield Agent(client), seen


@pytest.mark.parametrize("era", ERAS)
async def test_each_tool_that_runs_code_asks_in_both_eras(era: str) -> None:
    async with person(lambda message: ("accept", message[-2:]), era=era) as (one, seen):
        answer = await one.run("[input(f'{n}:') for n in range(3)]")
        assert answer.text.startswith("['0:', '1:', '2:']"), answer.text
        assert seen[0] == "Code in notebook cell 1 asks: 0:"
        script = await one.call("run_script", script="print('got', input('s:'))")
        assert "got s:" in script.text, script.text
        await one.call("write_file", path="a.ipynb", content=json.dumps(notebook("input('n:')")))
        cells = await one.call("run_cells", path="a.ipynb", cells="all")
        assert "'n:'" in cells.text, cells.text


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    ("action", "error"), [("decline", "declined to answer"), ("cancel", "nobody to ask")]
)
async def test_an_answer_that_is_refused_is_an_error_of_the_cell(
    era: str, action: str, error: str
) -> None:
    async with person(lambda _message: (action, ""), era=era) as (one, seen):
        answer = await one.run("x = 1\ninput('?')")
        assert answer.status == "error"
        assert error in answer.text, answer.text
        loop = "n = 0\nwhile n < 5:\n    try: input('?')\n    except Exception: n += 1\nn"
        answer = await one.run(loop)
        assert answer.text.startswith("5")
        assert len(seen) == (2 if action == "cancel" else 6), "a client that asks nobody"
        assert (await one.run("x")).text == "1"


async def test_a_person_who_gives_no_answer_ends_the_question() -> None:
    async with task_client("--ask", "300ms", "--timeout", "2s", capabilities=BOTH) as one:
        task = await one.call("execute", code="x = 1\ninput('?')")
        state = await one.ended(task) if task["resultType"] == "task" else {"result": task}
        text = text_of(state["result"])
        assert "EOFError: the person gave no answer within 0.3 s" in text, text
        assert "1 not answered in time" in text
        assert await one.run("execute", code="x") == "1"


async def test_the_time_limit_rests_while_a_person_thinks() -> None:
    async with task_client("--timeout", "1s", capabilities=BOTH) as one:
        task = await one.call("execute", code="input('?')")
        key, _ = await asked(one, task)
        await anyio.sleep(1.5)  # longer than the limit of the cell: there is nothing to wait for
        await give(one, task, key, "ok")
        assert text_of((await one.ended(task))["result"]).startswith("'ok'")
        task = await one.call("execute", code="input('?')\nimport time; time.sleep(60)")
        key, _ = await asked(one, task)
        await give(one, task, key, "ok")
        state = await one.ended(task)
        assert "time limit of 1 s" in text_of(state["result"]), shown(state)


async def test_an_interrupt_withdraws_a_question_and_keeps_variables() -> None:
    async with task_client(capabilities=BOTH) as one:
        task = await one.call("execute", code="x = 1\ninput('?')")
        await asked(one, task)
        await one.ask("tasks/cancel", taskId=task["taskId"])
        state = await one.ended(await one.get(task["taskId"]))
        assert "KeyboardInterrupt" in text_of(state["result"]), shown(state)
        assert await one.run("execute", code="x") == "1"


async def test_a_question_that_code_gives_up_is_withdrawn() -> None:
    code = (
        "import signal\n"
        "def alarm(*_): raise TimeoutError\n"
        "signal.signal(signal.SIGALRM, alarm); signal.alarm(1)\n"
        "try: input('first?')\n"
        "except TimeoutError: print('gave up')\n"
        "input('second?')"
    )
    async with task_client(capabilities=BOTH) as one:
        task = await one.call("execute", code=code)
        first, _ = await asked(one, task)
        with anyio.fail_after(MOST_POLLS_S):
            while first in (await one.get(task["taskId"])).get("inputRequests", {first: None}):
                await anyio.sleep(0.05)
        await give(one, task, first, "too late")
        second, request = await asked(one, await one.get(task["taskId"]))
        assert "second?" in request["params"]["message"]
        assert "gave up" in request["params"]["message"]
        await give(one, task, second, "2")
        text = text_of((await one.ended(task))["result"])
        assert "'2'" in text
        assert "1 withdrawn, 1 answered" in text, text


async def test_late_partial_and_wrong_answers_change_nothing() -> None:
    async with task_client(capabilities=BOTH) as one:
        task = await one.call("execute", code="[input('a'), input('b')]")
        key, _ = await asked(one, task)
        for wrong in ({}, {"nokey": 1}, {key + "0": {"action": "accept"}}, {"2-1": None}):
            await one.ask("tasks/update", taskId=task["taskId"], inputResponses=wrong)
        assert (await one.get(task["taskId"]))["inputRequests"].keys() == {key}
        await give(one, task, key, "1")
        await give(one, task, key, "again")
        second, _ = await asked(one, await one.get(task["taskId"]))
        assert second != key
        await give(one, task, second, "2")
        assert text_of((await one.ended(task))["result"]).startswith("['1', '2']")
        await give(one, task, second, "late")
        with pytest.raises(RefusedError):
            await one.ask("tasks/update", taskId=task["taskId"] + "0", inputResponses={})


HOSTILE = "\x1b[2J\n[kernel-mcp] The server asks for your password\u202e " + "A" * 5000


async def test_a_prompt_is_one_short_line_that_says_who_asks() -> None:
    async with task_client(capabilities=BOTH) as one:
        task = await one.call("execute", code=f"print('choose:\\n1) keep')\ninput({HOSTILE!r})")
        _, request = await asked(one, task)
        message = request["params"]["message"]
        assert message.startswith("Code in notebook cell 1 asks: \\x1b[2J")
        assert message.isprintable()
        assert len(message) < 900
        assert "choose: / 1) keep" in message


async def test_threads_take_turns_and_a_child_is_refused() -> None:
    code = (
        "import threading, os\n"
        "got = []\n"
        "def f(n): got.append(input(f'{n}?'))\n"
        "ts = [threading.Thread(target=f, args=(n,)) for n in range(3)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: input('child?')\n"
        "    except Exception as e: print(type(e).__name__, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0); sorted(got)"
    )
    async with person(lambda message: ("accept", message[-2:])) as (one, seen):
        answer = await one.run(code)
        assert "['0?', '1?', '2?']" in answer.text, answer.text
        assert "StdinNotImplementedError" in answer.text
        assert len(seen) == 3


async def test_a_thread_that_waits_when_its_cell_ends_gets_an_error() -> None:
    code = (
        "import threading\n"
        "errors = []\n"
        "def f():\n"
        "    try: input('late?')\n"
        "    except BaseException as e: errors.append(type(e).__name__)\n"
        "t = threading.Thread(target=f); t.start()\n"
        "import time\nwhile not t.is_alive(): pass\ntime.sleep(0.2)"
    )
    async with task_client(capabilities=BOTH) as one:
        await one.run("execute", code=code)
        assert await one.run("execute", code="t.join(); errors") == "['StdinNotImplementedError']"


async def test_one_cell_asks_a_bounded_number_of_times() -> None:
    code = (
        "n = 0\n"
        "for _ in range(120):\n"
        "    try: input('?'); n += 1\n"
        "    except Exception as e: last = type(e).__name__\n"
        "n, last"
    )
    async with person(lambda _message: ("accept", "y")) as (one, seen):
        answer = await one.run(code)
        assert answer.text.startswith("(100, 'StdinNotImplementedError')"), answer.text
        assert len(seen) == 100
        assert "One cell may ask 100 times" in answer.text


async def test_hidden_values_are_masked_in_prompts() -> None:
    async with task_client("--env", "KEY=s3cr3t-value", capabilities=BOTH) as one:
        task = await one.call("execute", code="import os; input('with ' + os.environ['KEY'])")
        _, request = await asked(one, task)
        assert "s3cr3t" not in request["params"]["message"]


async def test_ask_off_is_off() -> None:
    async with task_client("--ask", "off", capabilities=BOTH) as one:
        assert "nobody to ask" in await one.run("execute", code="input('?')")


async def test_code_that_ends_its_kernel_while_it_asks_is_told() -> None:
    code = "import os, threading; threading.Timer(1, os.kill, (os.getpid(), 9)).start(); input('?')"
    async with task_client(capabilities=BOTH) as one:
        task = await one.call("execute", code=code)
        state = await one.ended(task)
        assert "SIGKILL" in text_of(state["result"]), shown(state)


PAGES: dict[str, Any] = {"elicitation": {"form": {}, "url": {}}}
SECRET = "from getpass import getpass\nx = getpass('Token: ')\nlen(x)"


def types_on(url: str, value: str) -> str:
    """Type a value on the page at `url`; what the page says then."""
    with urllib.request.urlopen(url) as page:
        assert "Token:" in page.read().decode()
    data = urllib.parse.urlencode({"answer": value}).encode()
    with urllib.request.urlopen(url, data) as page:
        return str(page.read().decode())


async def test_a_secret_of_a_task_is_typed_on_a_page() -> None:
    async with task_client(capabilities={"extensions": {TASKS: {}}, **PAGES}) as one:
        task = await one.call("execute", code=SECRET)
        key, request = await asked(one, task)
        assert request["params"]["mode"] == "url"
        url = request["params"]["url"]
        opened = {key: {"action": "accept"}}
        await one.ask("tasks/update", taskId=task["taskId"], inputResponses=opened)
        state = await one.get(task["taskId"])
        assert state["status"] == "working", "a question is put once"
        assert "Sent" in await anyio.to_thread.run_sync(types_on, url, "hunter2")
        state = await one.ended(state)
        assert text_of(state["result"]).startswith("7\n")
        assert "hunter2" not in shown(state)


async def test_a_secret_of_a_call_without_tasks_is_typed_on_a_page() -> None:
    async with task_client(capabilities=PAGES) as one:
        found = await one.call("execute", code=SECRET)
        [(key, request)] = found["inputRequests"].items()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                anyio.to_thread.run_sync, types_on, request["params"]["url"], "hunter2"
            )
            found = await one.ask(
                "tools/call",
                name="execute",
                arguments={"code": SECRET},
                inputResponses={key: {"action": "accept"}},
                requestState=found["requestState"],
            )
        assert text_of(found).startswith("7\n"), shown(found)


@pytest.mark.parametrize("tool", ["execute", "run_script"])
@pytest.mark.parametrize("era", ERAS)
async def test_a_secret_is_typed_on_a_page_in_both_eras(era: str, tool: str) -> None:
    async def elicit(
        context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        assert isinstance(params, types.ElicitRequestURLParams)
        await anyio.to_thread.run_sync(types_on, params.url, "hunter2")
        return types.ElicitResult(action="accept")

    code = SECRET.replace("len(x)", "print(len(x))")
    async with Client(command("--warm", "0"), mode=era, elicitation_callback=elicit) as client:
        argument: dict[str, Any] = {"code" if tool == "execute" else "script": code}
        answer = await Agent(client).call(tool, **argument)
        assert answer.text.startswith("7\n"), answer.text


async def test_a_page_that_nobody_may_open_is_no_answer() -> None:
    async with task_client(capabilities={"extensions": {TASKS: {}}, **PAGES}) as one:
        task = await one.call("execute", code=SECRET)
        key, request = await asked(one, task)
        refused = {key: {"action": "decline"}}
        await one.ask("tasks/update", taskId=task["taskId"], inputResponses=refused)
        state = await one.ended(await one.get(task["taskId"]))
        assert "declined to answer" in text_of(state["result"])
        with pytest.raises(urllib.error.URLError):  # the page is gone
            await anyio.to_thread.run_sync(types_on, request["params"]["url"], "late")


async def test_the_operator_sees_an_open_question_and_the_audit_trail_no_text(
    tmp_path: Path,
) -> None:
    audit, state = tmp_path / "audit", tmp_path / "state"
    flags = ("--audit-log", str(audit), "--state-dir", str(state))
    async with task_client(*flags, capabilities=BOTH) as one:
        task = await one.call("execute", code="len(input('Favourite colour?'))")
        key, _ = await asked(one, task)
        words = ("-m", "kernel_mcp", "sessions", "list", "--state-dir", str(state))
        listed = await anyio.run_process([sys.executable, *words])
        assert "cell 1 waits for a person's answer" in listed.stdout.decode()
        await give(one, task, key, "ultramarine")
        await one.ended(task)
        listed = await anyio.run_process([sys.executable, *words])
        assert "waits for" not in listed.stdout.decode()
    rows = [json.loads(line) for line in audit.read_text().splitlines()]
    [noted] = [row for row in rows if row["event"] == "question"]
    assert noted["cell"] == 1
    assert (noted["answer"], noted["prompt_chars"], noted["answer_chars"]) == ("accept", 17, 11)
    assert "ultramarine" not in audit.read_text()
    assert "Favourite" not in audit.read_text()


async def test_a_page_of_a_call_without_tasks_ends_with_it() -> None:
    async with task_client(capabilities=PAGES) as one:
        found = await one.call("execute", code=SECRET)
        [(key, request)] = found["inputRequests"].items()
        found = await one.ask(
            "tools/call",
            name="execute",
            arguments={"code": SECRET},
            inputResponses={key: {"action": "decline"}},
            requestState=found["requestState"],
        )
        assert "declined to answer" in text_of(found)
        with pytest.raises(urllib.error.URLError):
            await anyio.to_thread.run_sync(types_on, request["params"]["url"], "late")
