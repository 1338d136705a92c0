"""Calls whose code asks a person: their time, their cancellation, and the cells behind theirs."""

from __future__ import annotations

import json
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp.client import Client
from mcp.client.session import ClientRequestContext

from tests.integration.agent import Agent, command
from tests.integration.task_client import TaskClient, shown, task_client, text_of
from tests.integration.test_questions import BOTH, FORMS, asked, give, notebook

pytestmark = [pytest.mark.anyio]


async def repeated(one: TaskClient, found: dict[str, Any], code: str, *first: str) -> str:
    """Send a call again with the answer of its question, after answers with other keys."""
    [key] = found["inputRequests"]
    answer = {"action": "accept", "content": {"answer": "Ada"}}
    params = {
        "name": "execute",
        "arguments": {"code": code},
        "requestState": found["requestState"],
        "inputResponses": dict.fromkeys([*first, key], answer),
        "_meta": one.meta(),
    }
    message = {"jsonrpc": "2.0", "id": "again", "method": "tools/call", "params": params}
    await one.raw.send(json.dumps(message).encode() + b"\n")
    return "again"


async def test_the_wait_of_a_call_rests_while_a_person_thinks() -> None:
    async def elicit(
        context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult:
        await anyio.sleep(2.5)  # longer than the wait: there is nothing to wait for
        return types.ElicitResult(action="accept", content={"answer": "Ada"})

    asking = command("--warm", "0")
    async with Client(asking, mode="legacy", elicitation_callback=elicit) as client:
        one = Agent(client)
        await one.run("1")
        answer = await one.call("execute", code="print(input('x?'))", wait=2)
        assert answer.text.startswith("Ada"), answer.text
        content = json.dumps(notebook("input('n?')"))
        await one.call("write_file", path="a.ipynb", content=content)
        cells = await one.call("run_cells", path="a.ipynb", cells="all", wait=2)
        assert "'Ada'" in cells.text, cells.text


async def test_a_repeated_call_that_is_cancelled_stops_its_cell() -> None:
    code = "print(input('Name? '), flush=True)\nwhile True: pass"
    async with task_client(capabilities=FORMS) as one:
        number = await repeated(one, await one.call("execute", code=code), code, "9-9")
        with anyio.fail_after(60):
            while "Ada" not in str(await one.call("wait", wait=0)):
                await anyio.sleep(0.05)
        gone = {"requestId": number, "_meta": one.meta()}
        cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": gone}
        await one.raw.send(json.dumps(cancelled).encode() + b"\n")
        text = text_of(await one.call("execute", code="6 * 7"))
        assert text.startswith("42"), text
        assert "cell 1, whose call was cancelled, has ended: interrupted" in text


async def test_a_cell_behind_one_that_asks_is_told_what_it_waits_for() -> None:
    async with task_client(capabilities=FORMS) as one:
        await one.call("execute", code="input('Name? ')")
        text = text_of(await one.call("execute", code="1", wait=0.1))
        assert "Cell 1 waits until a person has answered a question of its code" in text
        await one.call("interrupt")


async def test_a_signal_handler_that_asks_while_its_thread_waits_gets_an_error() -> None:
    code = (
        "import signal\n"
        "errors = []\n"
        "def alarm(*_):\n"
        "    try: input('inner?')\n"
        "    except RuntimeError as e: errors.append(str(e)); print('refused', flush=True)\n"
        "signal.signal(signal.SIGALRM, alarm); signal.setitimer(signal.ITIMER_REAL, 0.3)\n"
        "input('outer?'), errors"
    )
    async with task_client(capabilities=BOTH) as one:
        task = await one.call("execute", code=code)
        key, _ = await asked(one, task)
        with anyio.fail_after(60):
            while "refused" not in shown(await one.call("wait", wait=0)):
                await anyio.sleep(0.05)
        await give(one, task, key, "Ada")
        text = text_of((await one.ended(await one.get(task["taskId"])))["result"])
        assert "('Ada', ['reentrant call of input()'])" in text, text


async def test_a_call_asks_no_more_often_than_clients_go_along_with() -> None:
    async def elicit(
        context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={"answer": "1"})

    code = "n = 0\nfor _ in range(20): n += int(input('?'))\nprint(n)"
    async with Client(command("--warm", "0"), elicitation_callback=elicit) as client:
        one = Agent(client)
        answer = await one.run(code)
        for _ in range(2):
            assert answer.status == "running"
            assert "call wait, which has it asked" in answer.text
            answer = await one.call("wait")
        assert answer.text.startswith("20\n"), answer.text
        script = await one.call("run_script", script=code)
        assert "nobody to ask" in script.text, script.text
        assert "8 answered" in script.text
