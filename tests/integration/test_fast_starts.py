"""Sessions as servers start them by default: forked from a template, or taken from the reserve."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from tests.integration.agent import ANALYSIS, Agent
from tests.integration.servers import Servers
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]


@asynccontextmanager
async def ready(servers: Servers, *flags: str) -> AsyncIterator[Agent]:
    """A server whose template is up: a kernel forked from it has the preloaded module already."""
    async with servers.agent(*flags, "--allow", f"{ANALYSIS},sys") as notebook:
        await notebook.run("1")  # takes as long as its environment is being built
        with anyio.fail_after(120):
            while not await is_forked(notebook):
                pass
        yield notebook


async def is_forked(notebook: Agent) -> bool:
    session = (await notebook.call("create_session")).data["session"]
    await notebook.run("1", session=session)
    loaded = await notebook.run("import sys; 'numpy' in sys.modules", session=session)
    await notebook.call("close_session", session=session)
    return loaded.text == "True"


@pytest.mark.parametrize("warm", sampled(["0", "2"], "2"))
async def test_sessions_from_a_template_are_separate_and_keep_their_state(
    warm: str, servers: Servers
) -> None:
    async with ready(servers, "--warm", warm) as notebook:
        handles = [(await notebook.call("create_session")).data["session"] for _ in range(4)]
        for number, handle in enumerate(handles):
            await notebook.run(f"n = {number}; open('n.txt', 'w').write(str(n))", session=handle)
        for number, handle in enumerate(handles):
            answer = await notebook.run("open('n.txt').read() + str(n)", session=handle)
            assert answer.text == repr(f"{number}{number}")


@pytest.mark.parametrize("warm", sampled(["0", "2"], "2"))
async def test_files_written_before_the_first_cell_are_there(warm: str, servers: Servers) -> None:
    async with ready(servers, "--warm", warm) as notebook:
        handle = (await notebook.call("create_session")).data["session"]
        await notebook.call("write_file", path="a/b.txt", content="early", session=handle)
        answer = await notebook.run("open('a/b.txt').read()", session=handle)
        assert answer.text == "'early'"
        await notebook.run("open('a/b.txt', 'w').write('late')", session=handle)
        found = await notebook.call("read_file", path="a/b.txt", session=handle)
        assert found.text == "late"


@pytest.mark.parametrize("warm", sampled(["0", "2"], "2"))
async def test_a_new_session_has_its_kernel_before_its_first_cell(
    warm: str, servers: Servers
) -> None:
    async with ready(servers, "--warm", warm) as notebook:
        handle = (await notebook.call("create_session")).data["session"]
        with anyio.fail_after(60):
            while True:
                listed = (await notebook.call("list_sessions")).data["sessions"]
                (state,) = [each["state"] for each in listed if each["session"] == handle]
                if state != "new":
                    break
        assert state == "idle"
        assert (await notebook.run("6 * 7", session=handle)).text == "42"


async def test_a_session_from_the_reserve_outlives_its_kernel(servers: Servers) -> None:
    async with ready(servers, "--warm", "2", "--allow", "*") as notebook:
        await notebook.run("open('kept.txt', 'w').write('x')")
        answer = await notebook.run("import os; os._exit(3)")
        assert answer.status == "killed"
        assert "code 3" in answer.text
        assert (await notebook.run("open('kept.txt').read()")).text == "'x'"


TRACES = """
shell, hook = get_ipython(), get_ipython().displayhook
print(shell.execution_count, sorted(shell.user_ns), In[:1], Out, repr(_), repr(hook._))
print(shell.last_execution_result, shell.history_manager.input_hist_parsed[:-1])
"""


@pytest.mark.ways
async def test_a_kernel_from_the_reserve_looks_as_if_it_had_never_run_a_cell(
    servers: Servers,
) -> None:
    seen = []
    async with ready(servers, "--warm", "2", "--allow", "*") as notebook:
        handle = (await notebook.call("create_session")).data["session"]
        seen.append((await notebook.run(TRACES, session=handle)).text)
    async with servers.agent("--allow", "*") as notebook:
        seen.append((await notebook.run(TRACES)).text)
    assert seen[0] == seen[1]
    assert "get_ipython" in seen[0]


THREADS = "int(open('/proc/self/status').read().partition('Threads:')[2].split()[0])"
MULTIPLY = """
import numpy, time
def threads():
    return int(open('/proc/self/status').read().partition('Threads:')[2].split()[0])
before, spent = threads(), time.process_time()
one = numpy.ones((400, 400))
while threads() == before and time.process_time() < spent + 5:
    one @ one
threads() - before
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor needs no threads")
@pytest.mark.parametrize("warm", sampled(["0", "2"], "2"))
async def test_matrices_get_threads_when_a_cell_works_and_not_before(
    warm: str, servers: Servers
) -> None:
    async with ready(servers, "--warm", warm) as notebook:
        for _ in range(10):  # on a busy machine an import, too, can take as long as work does
            handle = (await notebook.call("create_session")).data["session"]
            few = int((await notebook.run(THREADS, session=handle)).text)
            imported = await notebook.run("import numpy\n" + THREADS, session=handle)
            if int(imported.text) == few:
                break
            await notebook.call("close_session", session=handle)
        assert int(imported.text) == few
        more = int((await notebook.run(MULTIPLY, session=handle)).text)
        assert more == min(4, len(os.sched_getaffinity(0))) - 1


async def test_random_numbers_differ_between_sessions(servers: Servers) -> None:
    async with ready(servers, "--warm", "0") as notebook:
        code = "import random, uuid, numpy\n(random.random(), uuid.uuid4(), numpy.random.rand())"
        drawn = set()
        for _ in range(3):
            handle = (await notebook.call("create_session")).data["session"]
            drawn.add((await notebook.run(code, session=handle)).text)
        assert len(drawn) == 3


async def last_results(notebook: Agent) -> list[str]:
    handle = (await notebook.call("create_session")).data["session"]
    cells = ("1 + 1", "_", "_ * 5", "__", "___", "_1, Out")
    return [(await notebook.run(cell, session=handle)).text for cell in cells]


RESULTS = ["2", "2", "10", "2", "2", "(2, {1: 2, 2: 2, 3: 10, 4: 2, 5: 2})"]


@pytest.mark.parametrize("warm", sampled(["0", "2"], "2"))
async def test_names_of_last_results_work_in_forked_kernels(warm: str, servers: Servers) -> None:
    async with ready(servers, "--warm", warm) as notebook:
        for _ in range(3):
            assert await last_results(notebook) == RESULTS


@pytest.mark.ways
async def test_names_of_last_results_work_in_cold_kernels(servers: Servers) -> None:
    async with servers.agent("--no-template", "--warm", "0") as notebook:
        assert await last_results(notebook) == RESULTS
