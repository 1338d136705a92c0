"""A kernel whose own code was broken by a cell is recognised, and the answer says what to do."""

from __future__ import annotations

import anyio
import pytest

from tests.integration.agent import Agent, agent

pytestmark = [pytest.mark.anyio]

BROKEN = {
    "a builtin": "import builtins; builtins.isinstance = None",
    "an import": "import builtins; builtins.__import__ = None",
    "json": "import json; json.dumps = None; json.loads = None; json.JSONEncoder = None",
    "the session": "get_ipython().kernel.session.send = None",
    "handlers": "get_ipython().kernel.shell_handlers.clear()",
    "a handler": "type(get_ipython().kernel).do_execute = None",
    "the channel": "type(get_ipython().kernel.shell_stream).receive = None",
    "the output": "type(get_ipython().kernel.iopub)._pump = lambda *a: 1/0",
    "IPython": "get_ipython().events.trigger = None",
    "the loop's tasks": "import asyncio\nfor task in asyncio.all_tasks(): task.cancel()",
}
HARMLESS = {
    "streams": "import sys; sys.stdout = None; sys.stderr = None",
    "print": "import builtins; builtins.print = None",
    "a failing cell": "1/0",
    "a syntax error": "x = (",
    "a failing display": "class D:\n    def __repr__(self): return None\nD()",
}


async def test_broken_kernels_are_recognised_and_reset_mends_them() -> None:
    async with agent("--profile", "open", "--max-sessions", "20") as notebook:
        async with anyio.create_task_group() as tasks:
            for code in BROKEN.values():
                tasks.start_soon(_breaks, notebook, code)
        for name, code in HARMLESS.items():
            await notebook.run("kept = [42]")
            answer = await notebook.run(code)
            assert "Call reset" not in answer.text, name
            assert (await notebook.run("kept")).text == "[42]", name


async def _breaks(notebook: Agent, code: str) -> None:
    session = (await notebook.call("create_session")).data["session"]
    await notebook.run("kept = [42]", session=session)
    answers = [await notebook.call("execute", session=session, code=c) for c in (code, "kept")]
    assert answers[1].status == "error", code
    assert "Call reset" in answers[1].text, f"{code}: {answers[1].text}"
    assert answers[1].cell["state_kept"], code
    await notebook.call("reset", session=session)
    assert (await notebook.run("1 + 1", session=session)).text.startswith("2"), code


async def test_a_cell_that_sleeps_or_waits_is_not_taken_for_a_broken_kernel() -> None:
    async with agent("--profile", "open") as notebook:
        await notebook.run("import asyncio, subprocess, threading, time")
        for code in ("time.sleep(6)", "await asyncio.sleep(6)", "subprocess.run(['sleep', '6'])"):
            assert (await notebook.run(f"{code}\n'done'")).text == "'done'", code
