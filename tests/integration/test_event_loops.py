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
STUCK = "async def stuck():\n    await asyncio.sleep(600)\n"
EVERY = {
    WAYS: "[1, 2, 3, 4]",
    STARTED: "(False, 6)",
    "await later, await main(9)": "(5, 9)",
    "loop.close(); loop.is_closed()": "True",
    TOGETHER: "[7, 8]",
    "async with contextlib.AsyncExitStack(): print(await main(10))": "10",
    "asyncio.run(main(11))": "11",
}


async def every_way(notebook: Agent, session: str) -> None:
    await notebook.run(DEFINITIONS, session=session)
    for code, shown in EVERY.items():
        assert (await notebook.run(code, session=session)).text == shown


async def test_coroutines_run_in_every_usual_way(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await every_way(notebook, "")


@pytest.mark.parametrize("python", sampled(["3.10", "3.12", "3.13"], "3.13"))
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
