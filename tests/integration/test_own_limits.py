"""Sessions that ask for less than the operator permits, in real kernels of every kind."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

import pytest
from mcp import StdioServerParameters
from mcp.client import Client

from tests.integration.agent import Agent, agent
from tests.integration.bombs import HUNGRY_CHILDREN, QUIET
from tests.integration.unprivileged import as_ordinary_user
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

HUNGRY = "held = [b'x' * 10_000_000 for _ in range(60)]\nlen(held)"
BURN = (
    QUIET
    + """
import os, time
began = time.monotonic()
for _ in range(2):
    if os.fork() == 0:
        while time.monotonic() < began + 1.5: pass
        os._exit(0)
used = [os.wait3(0)[2] for _ in range(2)]
print(sum(each.ru_utime + each.ru_stime for each in used) / (time.monotonic() - began))
"""
)
FLAGS = ("--memory", "1G")


@asynccontextmanager
async def ordinary_user() -> AsyncIterator[Agent]:
    argv = as_ordinary_user([sys.executable, "-m", "kernel_mcp", *FLAGS, "--warm", "1"])
    server = StdioServerParameters(command=argv[0], args=argv[1:], env=dict(os.environ))
    async with Client(server) as client:
        yield Agent(client)


KINDS = {
    "cold": lambda: agent(*FLAGS),
    "forked, with spares of other limits": lambda: agent(*FLAGS, "--warm", "1"),
    "an ordinary user's": ordinary_user,
}


@pytest.mark.parametrize("kind", sampled(KINDS, "an ordinary user's"))
async def test_a_session_that_asks_for_less_gets_no_more(kind: str) -> None:
    async with KINDS[kind]() as notebook:
        assert (await notebook.run(HUNGRY)).text == "60"  # which also has the template made
        told = (await notebook.call("info")).data
        assert (told["limits"]["memory_mb"], told["limits"]["cpus"]) == (1024, 2)
        processors = any("2 processors by" in line for line in told["sandbox_enforces"])
        weak = [gap for gap in told["sandbox_gaps"] if "processors" in gap]
        assert processors or weak

        made = (await notebook.call("create_session", name="small", memory="200M")).data
        assert "Limits: memory 200 MiB, 2 processors." in made["note"]
        for _ in range(2):
            assert "MemoryError" in (await notebook.run(HUNGRY, session="small")).text
            assert not (await notebook.call("reset", session="small")).failed
        children = await notebook.run(HUNGRY_CHILDREN, session="small")
        assert "out of memory (limit 200 MiB" in children.text
        told = (await notebook.call("info", session="small")).data
        assert told["limits"]["memory_mb"] == 200
        assert any("memory 200 MiB by RLIMIT_AS" in line for line in told["sandbox_enforces"])
        script = await notebook.call("run_script", script=HUNGRY, memory="150M")
        assert "MemoryError" in script.text

        cpu = await notebook.call("create_session", name="half", cpu="0.5")
        if processors:
            share = float((await notebook.run(BURN, session="half")).text)
            assert share < 0.7
            script = await notebook.call("run_script", script=BURN, cpu=0.5)
            assert float(script.text) < 0.7
        else:
            assert cpu.failed
            assert "cpu=0.5 cannot be enforced: no control group limits" in cpu.text
        await notebook.call("create_session", name="brief", cpu="500ms")
        burnt = await notebook.run("while True: pass", session="brief")
        assert "it used up its 0.5 s of processor time" in burnt.text
        assert "larger timeout" not in burnt.text

        await notebook.call("create_session", name="quick", timeout="300ms")
        slow = await notebook.run("import time; time.sleep(60)", session="quick")
        assert "it reached its time limit of 0.3 s" in slow.text
        longer = await notebook.run("time.sleep(0.4)", session="quick", timeout=30)
        assert longer.status == "ok"
        script = await notebook.call("run_script", script="import time; time.sleep(60)", timeout=1)
        assert "it reached its time limit of 1 s" in script.text
        assert (await notebook.run("len(held)")).text == "60"


async def test_no_call_gets_more_than_the_operator_permits() -> None:
    flags = ("--timeout", "2s", "--memory", "512M", "--cpus", "1", "--cpu", "1m")
    async with agent(*flags, "--max-output", "2000") as notebook:
        for tool, arguments, words in (
            ("execute", {"code": "1", "timeout": 3}, "at most 2 s (--max-timeout)"),
            ("create_session", {"timeout": "1h"}, "at most 2 s (--max-timeout)"),
            ("run_script", {"script": "1", "timeout": "1h"}, "at most 2 s (--max-timeout)"),
            ("create_session", {"memory": "2G"}, "2 GiB is more than the operator permits. Ask"),
            ("run_script", {"script": "1", "memory": "0"}, "at most 512 MiB (--memory)"),
            ("create_session", {"cpu": "1.5"}, "at most 1 (--cpus)"),
            ("create_session", {"cpu": "2m"}, "at most 60 s (--cpu)"),
        ):
            assert words in await notebook.refused(tool, **arguments), (tool, arguments)
        assert not (await notebook.call("list_sessions")).data["sessions"]
        stopped = await notebook.run("import time; time.sleep(60)")
        assert "No call may ask for more (--max-timeout)" in stopped.text
        long = await notebook.run("print('x' * 5000)")
        assert len(long.text) < 2500
        told = (await notebook.call("info")).data
        limits = told["limits"]
        assert (limits["max_cell_timeout_s"], limits["output_chars"]) == (2, 2000)
        assert (await notebook.run("import sys; print(sys.executable)")).text == told["interpreter"]
        assert told["uv_version"] == version("uv")
