"""`asyncio.run` and its kin in cells and scripts, beside `await` at top level."""

from __future__ import annotations

import pytest

from tests.integration.agent import Agent
from tests.integration.servers import Servers
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

DEFINITIONS = """
import asyncio, contextlib
async def main(value):
    await asyncio.sleep(0.001)
    return value
"""
WAYS = """
found = [asyncio.run(main(1))]
loop = asyncio.new_event_loop()
found.append(loop.run_until_complete(main(2)))
loop.close()
with asyncio.Runner() if hasattr(asyncio, "Runner") else contextlib.nullcontext() as runner:
    found.append(3 if runner is None else runner.run(main(3)))
try:
    found.append(asyncio.get_running_loop())
except RuntimeError:
    found.append(asyncio.run(main(4)))
found
"""
STARTED = """
loop = asyncio.get_event_loop()
later = asyncio.create_task(main(5))
now = loop.create_task(main(6))
loop.is_running(), loop.run_until_complete(now)
"""
TOGETHER = """
loop = asyncio.get_event_loop()
loop.run_until_complete(asyncio.gather(main(7), main(8)))
"""
LEFT = """
loop = asyncio.get_event_loop()
late = [asyncio.ensure_future(main(12)), asyncio.gather(main(13), main(14)), loop.create_future()]
late.append(loop.run_in_executor(None, lambda: 15))
timer = loop.call_later(0.01, late[2].set_result, 16)
"""
SETS = """
import contextvars
number = contextvars.ContextVar("number", default=0)
await asyncio.sleep(0)
token = number.set(17)
"""
HANDLES = """
import os, signal
came = asyncio.Event()
asyncio.get_event_loop().add_signal_handler(signal.SIGUSR1, came.set)
"""
STUCK = "async def stuck():\n    await asyncio.sleep(600)\n"
EVERY = {
    WAYS: "[1, 2, 3, 4]",
    STARTED: "(False, 6)",
    "await later, await main(9)": "(5, 9)",
    "loop.close(); loop.is_closed()": "True",
    TOGETHER: "[7, 8]",
    "async with contextlib.AsyncExitStack(): print(await main(10))": "10",
    "asyncio.run(main(11))": "11",
    LEFT: "(no output)",
    "[await each for each in late]": "[12, [13, 14], 16, 15]",
    SETS: "(no output)",
    "number.get()": "17",
    "_ = loop.call_later(0, loop.stop)": "(no output)",
    "await main(18)": "18",
    "asyncio.run(main(0)); late = asyncio.ensure_future(main(19))": "(no output)",
    "await late": "19",
    HANDLES: "(no output)",
    "os.kill(os.getpid(), signal.SIGUSR1); await came.wait()": "True",
}


async def every_way(notebook: Agent, session: str) -> None:
    await notebook.run(DEFINITIONS, session=session)
    for code, shown in EVERY.items():
        assert (await notebook.run(code, session=session)).text == shown


async def test_coroutines_run_in_every_usual_way(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await every_way(notebook, "")


@pytest.mark.parametrize("python", sampled(["3.10", "3.12", "3.13"]))
async def test_every_python_runs_coroutines_in_every_usual_way(
    python: str, servers: Servers
) -> None:
    async with servers.agent("--allow-install", "tabulate") as notebook:
        opened = await notebook.call("create_session", python=python, packages=["tabulate"])
        if opened.failed:
            assert "no Python" in opened.text
        else:
            await every_way(notebook, opened.data["session"])


async def test_a_cell_in_which_a_loop_runs_can_be_stopped(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run(f"{DEFINITIONS}\n{STUCK}\nkept = 1")
        for run in ("asyncio.run", "asyncio.get_event_loop().run_until_complete", "await "):
            answer = await notebook.call("execute", code=f"{run}(stuck())", timeout=0.5)
            assert (answer.status, answer.cell["state_kept"]) == ("timeout", True)
        left = "loop = asyncio.get_event_loop()\nlen(asyncio.all_tasks(loop))"
        await notebook.run("asyncio.get_event_loop().run_until_complete(main(1))")
        assert (await notebook.run(left)).text == "0"
        assert (await notebook.run("asyncio.run(main(kept))")).text == "1"


async def test_tasks_that_block_are_all_stopped_and_variables_stay(servers: Servers) -> None:
    blocking = """
import time
async def block():
    time.sleep(0.5)
kept = 1
before = asyncio.create_task(asyncio.sleep(3600))
await asyncio.gather(*(block() for _ in range(40)))
"""
    async with servers.agent() as notebook:
        answer = await notebook.call("execute", code=f"{DEFINITIONS}{blocking}", timeout=1)
        assert (answer.status, answer.cell["state_kept"]) == ("timeout", True)
        assert (await notebook.run("kept, before.done()")).text == "(1, True)"


async def test_a_coroutine_is_timed(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run(DEFINITIONS)
        for code in ("%time await main(5)", "%%time\nx = await main(4)\nx + 1", "%time 2 + 3"):
            text = (await notebook.run(code)).text
            assert text.startswith("CPU times: "), code
            assert text.endswith("\n5"), code
        refused = await notebook.call("execute", code="await main(1)\n%time await main(5)")
        assert "needs a cell of its own" in refused.text
        assert (await notebook.run("await main(x)")).text == "4"


async def test_code_that_wants_a_running_loop_is_told_what_has_one(servers: Servers) -> None:
    async with servers.agent() as notebook:
        answer = await notebook.run(f"{DEFINITIONS}asyncio.get_running_loop()")
        assert "RuntimeError: no running event loop" in answer.text
        assert "[kernel-mcp] No event loop runs while a cell awaits nothing" in answer.text
        assert (
            await notebook.run("await main(asyncio.get_running_loop() is None)")
        ).text == "False"


async def test_a_script_may_run_loops_until_its_very_end(servers: Servers) -> None:
    script = f"""
import atexit
{DEFINITIONS}
loop = asyncio.get_event_loop()
try:
    print(loop.run_until_complete(main(1)))
finally:
    loop.close()
done = atexit.register(lambda: print(asyncio.run(main(2))))
"""
    async with servers.agent() as notebook:
        assert (await notebook.call("run_script", script=script)).text == "1\n2"


async def test_code_that_asks_a_person_is_told_what_to_do_instead(servers: Servers) -> None:
    async with servers.agent() as notebook:
        for code in ("input('Name? ')", "from getpass import getpass\ngetpass()", "breakpoint()"):
            answer = await notebook.call("execute", code=code)
            assert answer.status == "error"
            assert "put the value into the code instead" in answer.text
        answer = await notebook.call("run_script", script="name = input()")
        assert "put the value into the code instead" in answer.text
