"""A kernel whose own code was broken by a cell is recognised, and the answer says what to do."""

from __future__ import annotations

import sys

import anyio
import pytest

from tests.integration.agent import Agent, agent

pytestmark = [pytest.mark.anyio]

BROKEN = {
    "a builtin": "import builtins; builtins.isinstance = None",
    "the session": "get_ipython().kernel.session.send = None",
    "handlers": "get_ipython().kernel.shell_handlers.clear()",
    "a handler": "type(get_ipython().kernel).do_execute = None",
    "the channel": "type(get_ipython().kernel.shell_stream).receive = None",
    "the output": "type(get_ipython().kernel.iopub)._pump = lambda *a: 1/0",
    "IPython": "get_ipython().events.trigger = None",
}
if sys.version_info >= (3, 11):  # on 3.10 nothing imports while cells run
    BROKEN["an import"] = "import builtins; builtins.__import__ = None"
HELD = "holds Python's lock"
HARMLESS = {
    "json": "import json; json.dumps = None; json.loads = None; json.JSONEncoder = None",
    "streams": "import sys; sys.stdout = None; sys.stderr = None",
    "print": "import builtins; builtins.print = None",
    "a failing cell": "1/0",
    "a syntax error": "x = (",
    "a failing display": "class D:\n    def __repr__(self): return None\nD()",
}


async def test_broken_kernels_are_recognised_and_mended() -> None:
    async with agent("--max-sessions", "30") as notebook:
        async with anyio.create_task_group() as tasks:  # most of the time is one of waiting
            for code in BROKEN.values():
                tasks.start_soon(_breaks, notebook, code)
        for name, code in HARMLESS.items():
            await notebook.run("kept = [42]")
            answer = await notebook.run(code)
            assert "Call reset" not in answer.text, name
            assert (await notebook.run("kept")).text == "[42]", name


@pytest.mark.ways
async def test_kernels_that_wait_are_not_taken_for_broken() -> None:
    async with (
        agent("--max-sessions", "30") as notebook,
        anyio.create_task_group() as tasks,
    ):
        for code, told in WAITING.items():
            tasks.start_soon(_waits, notebook, code, told)


async def _breaks(notebook: Agent, code: str) -> None:
    session = (await notebook.call("create_session")).data["session"]
    await notebook.run("kept = [42]", session=session)
    answers = [await notebook.run(each, session=session, wait=60) for each in (code, "kept")]
    assert answers[1].status == "error", code
    assert "Call reset" in answers[1].text, f"{code}: {answers[1].text}"
    assert answers[1].cell["state_kept"], code
    again = await notebook.run("open('ran', 'w')", session=session, wait=60)
    assert "Call reset" in again.text, f"{code}: {again.text}"
    assert again.cell["duration_s"] < answers[1].cell["duration_s"] / 2 + 2, code
    await notebook.call("reset", session=session)
    assert (await notebook.run("1 + 1", session=session)).text.startswith("2"), code


WAITING = {
    "time.sleep(6)": "",
    "await asyncio.sleep(6)": "",
    "subprocess.run(['sleep', '6'])": "",
    "ctypes.PyDLL(None).sleep(17)": HELD,
    "await asyncio.sleep(0.1); ctypes.PyDLL(None).sleep(17)": HELD,
    "for _ in range(5): ctypes.PyDLL(None).sleep(4)": HELD,
    "threading.Thread(target=ctypes.PyDLL(None).sleep, args=(17,)).start()": HELD,
}


async def _waits(notebook: Agent, code: str, told: str) -> None:
    session = (await notebook.call("create_session")).data["session"]
    await notebook.run("import asyncio, ctypes, subprocess, threading, time", session=session)
    answer = await notebook.run(f"{code}\nopen('done', 'w')\n'done'", session=session, wait=60)
    assert "'done'" in answer.text, f"{code}: {answer.text}"
    assert answer.status == "ok", code
    assert HELD not in answer.text or told, code
    after = await notebook.run("open('done').read(), 6 * 7", session=session, wait=60)
    assert "('', 42)" in after.text, f"{code}: {after.text}"
