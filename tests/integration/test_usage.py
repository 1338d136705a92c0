"""Processor time and memory of each cell, in the answer's `_meta` and, near a limit, in words."""

from __future__ import annotations

import pytest

from tests.integration.agent import notices
from tests.integration.servers import Servers

MIB = 1024 * 1024
pytestmark = [pytest.mark.anyio]

FLAGS = ("--allow", "*", "--warm", "0", "--memory", "1G")
FAILS = """
def fail():
    data = bytearray(480 << 20)
    raise ValueError('no')
fail()
"""


async def test_each_cell_has_its_own_processor_time_and_peak(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        used = await agent.run(
            "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
        )
        assert 0.5 <= used.cell["cpu_s"] < 5
        large = await agent.run("data = bytearray(300 << 20); del data")
        assert 300 * MIB <= large.cell["peak_memory_bytes"] < 400 * MIB
        small = await agent.run("x = 1")
        assert small.cell["peak_memory_bytes"] < 100 * MIB
        assert small.cell["cpu_s"] < 0.5
        kept = await agent.run("kept = bytearray(200 << 20)")
        assert 200 * MIB <= (await agent.run("x = 2")).cell["peak_memory_bytes"] < 300 * MIB
        assert not any(notices(each) for each in (used, large, small, kept))


async def test_processor_time_of_children_counts(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'sum(range(10**7))'])"
        assert (await agent.run(code)).cell["cpu_s"] > 0.05


async def test_the_peak_of_a_child_counts_where_it_is_larger(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        begun = "import subprocess, sys\nkept = bytearray(100 << 20)\nsubprocess.run(['true'])"
        assert 100 * MIB <= (await agent.run(begun)).cell["peak_memory_bytes"] < 150 * MIB
        child = "subprocess.run([sys.executable, '-c', 'bytearray(400 << 20)'])"
        assert 400 * MIB <= (await agent.run(child)).cell["peak_memory_bytes"] < 500 * MIB
        later = await agent.run("subprocess.run(['true'])")
        assert later.cell["peak_memory_bytes"] < 150 * MIB


async def test_what_a_failed_call_holds_is_cleared_where_it_is_much(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        (told,) = notices(await agent.run(FAILS))
        assert "Local variables of the failed call held 480 MiB; they were cleared" in told
        after = await agent.run("len(bytearray(800 << 20))")
        assert (after.status, after.text.splitlines()[0]) == ("ok", str(800 << 20))


async def test_near_the_limit_the_answer_says_what_holds_how_much(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        await agent.run("first = bytearray(100 << 20)\nbytearray(200 << 20)")
        held = "most by last (600 MiB), Out[1] (200 MiB), first (100 MiB): `del` what is not needed"
        (told,) = notices(await agent.run("last = bytearray(600 << 20)"))
        assert "Memory: this cell needed up to 9" in told
        assert held in told
        failed = await agent.run("more = bytearray(600 << 20)")
        assert "MemoryError" in failed.text
        assert held in notices(failed)[0]
        assert not notices(await agent.run("%reset -f out\ndel last"))


@pytest.mark.ways
async def test_near_the_processor_limit_the_answer_says_so(servers: Servers) -> None:
    async with servers.agent("--allow", "*", "--warm", "0", "--cpu", "2s") as agent:
        burn = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"
        (told,) = notices(await agent.run(burn.format(1.7)))
        assert " of its 2 s of processor time" in told
        assert not notices(await agent.run(burn.format(0.2)))
