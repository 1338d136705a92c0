"""Cells that run long, are stopped, or take their kernel with them."""

from __future__ import annotations

from functools import partial
from time import monotonic

import anyio
import pytest

from tests.integration.agent import ERAS, Agent, Answer
from tests.integration.servers import Servers
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

QUICK = ("--grace", "1")
PATIENT = ("--grace", "60")
"""For cells that an interrupt ends, however busy the machine is."""


async def cancelled(notebook: Agent, code: str) -> None:
    """Call `execute` and cancel the call once the cell has put out something."""
    with anyio.CancelScope() as scope:
        await notebook.run(code, on_progress=lambda *_: scope.cancel())
    assert scope.cancelled_caught


@pytest.mark.parametrize("era", sampled(ERAS, "auto"))
async def test_new_output_streams_as_progress_while_the_cell_runs(
    era: str, servers: Servers
) -> None:
    code = (
        "from pathlib import Path\nimport time\n"
        "for i in range(4):\n    print('line', i, flush=True)\n"
        "    while not Path(f'line {i}').exists(): time.sleep(0.01)"
    )
    async with servers.agent(era=era) as notebook, anyio.create_task_group() as tasks:
        await notebook.run("1")  # an environment that is built would tell of it
        seen: list[tuple[float, str]] = []

        def take(value: float, _total: float | None, text: str | None) -> None:
            seen.append((value, text or ""))
            if text:
                # the cell goes on only when this line has reached the client
                tasks.start_soon(partial(notebook.call, "write_file", path=text, content=""))

        answer = await notebook.run(code, on_progress=take)
        assert [text for _, text in seen if text] == [f"line {i}" for i in range(4)]
        values = [value for value, _ in seen]
        assert values == sorted(set(values))
        assert answer.text.splitlines() == [f"line {i}" for i in range(4)]


async def test_progress_comes_at_most_ten_times_a_second_and_ends_with_the_last_line(
    servers: Servers,
) -> None:
    async with servers.agent() as notebook:
        await notebook.run("import time")
        seen: list[str | None] = []
        start = monotonic()
        await notebook.run(
            "for i in range(2000):\n    print(i)\n    time.sleep(0.0005)",
            on_progress=lambda _value, _total, text: seen.append(text),
        )
        assert len(seen) <= 10 * (monotonic() - start) + 2
        assert (seen[-1] or "").endswith("1999")


async def test_a_long_cell_answers_running_and_wait_returns_only_what_is_new(
    servers: Servers,
) -> None:
    async with servers.agent() as notebook:
        await notebook.run("import time")
        code = "print('first', flush=True)\ntime.sleep(1.5)\nprint('second')\n'end'"
        first = await notebook.run(code, wait=0.8)
        assert first.status == "running"
        assert "first" in first.text
        assert "wait" in first.text
        second = await notebook.call("wait", wait=20)
        assert second.status == "ok"
        assert "first" not in second.text
        assert "second" in second.text
        assert "end" in second.text
        assert "Nothing is running" in (await notebook.call("wait")).text


async def test_a_second_cell_queues_and_says_its_place(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run("import time")
        await notebook.run("time.sleep(30)", wait=0.5)
        queued = await notebook.run("1", wait=0.2)
        assert queued.status == "queued"
        assert "after 1 other cell" in queued.text
        state = (await notebook.call("list_sessions")).data["sessions"][0]
        assert state["state"] == "busy"
        assert state["running_cell"] == 2
        assert state["running_s"] > 0.3
        assert (await notebook.call("interrupt")).status == "interrupted"
        assert (await notebook.call("wait", wait=10)).text == "1"


async def test_a_queued_cell_can_be_cancelled(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run("import time; ran = False")
        await notebook.run("time.sleep(30)", wait=0.5)
        with anyio.move_on_after(0.5):
            await notebook.run("ran = True", wait=30)
        await notebook.call("interrupt")
        assert (await notebook.run("ran")).text == "False"


SLOW = {
    "a sleep": "import time\ntime.sleep(1000)",
    "a loop": "while True: pass",
    "a regex that holds the interpreter": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
    "an awaiting cell": "import asyncio\nawait asyncio.sleep(1000)",
}


@pytest.mark.parametrize("code", SLOW.values(), ids=SLOW.keys())
async def test_a_deadline_interrupts_and_keeps_variables(code: str, servers: Servers) -> None:
    async with servers.agent(*PATIENT) as notebook:
        await notebook.run("x = 1")
        answer = await notebook.run("print('begun')\n" + code, timeout=1)
        assert answer.status == "timeout"
        assert answer.cell["state_kept"] is True
        assert "begun" in answer.text
        assert (await notebook.run("x")).text == "1"


STUBBORN = {
    "swallows KeyboardInterrupt": (
        "import time\n"
        "while True:\n    try:\n        time.sleep(0.01)\n    except BaseException: pass"
    ),
    "one long C call": "sum(range(10**11))",
}


@pytest.mark.parametrize("code", STUBBORN.values(), ids=STUBBORN.keys())
async def test_a_deadline_kills_what_does_not_react_and_says_so(
    code: str, servers: Servers
) -> None:
    async with servers.agent(*QUICK) as notebook:
        await notebook.run("x = 1; open('kept.txt', 'w').write('y')")
        answer = await notebook.run("print('begun')\n" + code, timeout=1)
        assert answer.status == "killed"
        assert answer.cell["state_kept"] is False
        assert "begun" in answer.text
        assert "lost" in answer.text
        assert "NameError" in (await notebook.run("x")).text
        assert (await notebook.run("open('kept.txt').read()")).text == "'y'"


@pytest.mark.ways
async def test_a_kernel_that_stops_itself_is_brought_back_by_the_deadline(servers: Servers) -> None:
    async with servers.agent(*QUICK, "--allow", "*") as notebook:
        answer = await notebook.run(
            "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", timeout=1
        )
        assert answer.status in ("timeout", "killed", "ok")
        assert (await notebook.run("1 + 1")).text == "2"


async def test_a_cancelled_call_interrupts_its_cell_and_delays_nobody(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run("import time; x = 5")
        await cancelled(notebook, "print('begun', flush=True)\ntime.sleep(1000)")
        answer = await notebook.run("x")
        assert answer.text.startswith("5\n[kernel-mcp] cell 2, whose call was cancelled, has ended")
        assert (await notebook.run("x")).text == "5"


DEATHS = {
    "SIGKILL": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "exit": ("import os\nos._exit(3)", "code 3"),
    "segfault": ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    "abort": ("import os\nos.abort()", "SIGABRT"),
}


@pytest.mark.parametrize(("code", "cause"), DEATHS.values(), ids=DEATHS.keys())
async def test_a_death_is_reported_without_waiting_for_a_deadline_with_its_cause(
    code: str, cause: str, servers: Servers
) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("x = 1")
        answer = await notebook.run("print('before', flush=True)\n" + code)
        assert answer.status == "killed"
        assert cause in answer.text
        assert "before" in answer.text
        assert "lost" in answer.text
        assert "NameError" in (await notebook.run("x")).text


async def test_a_death_between_cells_is_reported_by_the_next_call(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("x = 1")
        await notebook.run(
            "import os, threading\nthreading.Timer(0.2, lambda: os._exit(7)).start()"
        )
        await wait_until_dead(notebook)
        answer = await notebook.run("1 + 1")
        assert "code 7" in answer.text
        assert "2" in answer.text
        assert answer.cell["state_kept"] is False


async def wait_until_dead(notebook: Agent) -> None:
    with anyio.fail_after(60):
        while (await notebook.call("list_sessions")).data["sessions"][0]["memory_mb"] > 0:
            await anyio.sleep(0.05)


@pytest.mark.ways
async def test_running_out_of_memory_is_an_error_and_keeps_the_kernel(servers: Servers) -> None:
    async with servers.agent("--memory", "512M") as notebook:
        await notebook.run("x = 1")
        answer = await notebook.run("data = bytearray(10**10)")
        assert answer.status == "error"
        assert "MemoryError" in answer.text
        assert (await notebook.run("x")).text == "1"


async def test_variables_can_be_listed_while_a_cell_runs(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run("import time; step = 7")
        await notebook.run("time.sleep(30)", wait=0.3)
        names = [v["name"] for v in (await notebook.call("list_variables")).data["variables"]]
        assert "step" in names
        await notebook.call("interrupt")


async def test_what_a_cancelled_cell_costs_is_told_by_the_next_answer(servers: Servers) -> None:
    async with servers.agent(*QUICK) as notebook:
        await notebook.run("x = 1")
        await cancelled(notebook, "print('begun', flush=True)\nsum(range(10**11))")
        answer = await notebook.run("1 + 1")
        assert answer.cell["state_kept"] is False
        assert "lost" in answer.text
        assert "2" in answer.text


async def test_wait_does_not_tell_of_a_cell_whose_call_was_cancelled(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run("import time")
        await cancelled(notebook, "print('A', flush=True)\ntime.sleep(1000)")
        await notebook.run("1")
        running = await notebook.call("execute", code="time.sleep(0.5); 'B'", wait=0)
        answer = await notebook.call("wait")
        assert answer.cell["cell"] == running.cell["cell"]
        assert answer.text == "'B'"


async def test_wait_does_not_tell_of_a_cell_that_a_reset_has_stopped(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.call("execute", code="import time; time.sleep(30)", wait=0)
        await notebook.call("reset")
        await notebook.call("execute", code="import time; time.sleep(0.5); 'B'", wait=0)
        assert (await notebook.call("wait")).text == "'B'"


async def test_an_answer_about_an_earlier_cell_says_so(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.call("execute", code="import time; time.sleep(0.2); 'A'", wait=0)
        second = await notebook.run("'short'")
        assert second.text == (
            "'short'\n[kernel-mcp] cell 1, which was running, has ended: ok; `wait` with cell=1 "
            "shows it"
        )
        await notebook.call("execute", code="time.sleep(0.5); 'C'", wait=0)
        assert (await notebook.call("wait")).text == "'C'"
        first = await notebook.call("wait")
        assert first.text == "[kernel-mcp] This is cell 1, which an earlier call had started\n'A'"


@pytest.mark.parametrize("end", ["reset", "close_session"])
async def test_a_cell_that_ends_with_its_session_promises_nothing(
    end: str, servers: Servers
) -> None:
    async with servers.agent() as notebook, anyio.create_task_group() as tasks:
        handle = (await notebook.call("create_session")).data["session"]
        begun, answers = anyio.Event(), list[Answer]()

        async def run() -> None:
            code = "print('begun', flush=True)\nwhile True: pass"
            answers.append(
                await notebook.call(
                    "execute", code=code, session=handle, on_progress=lambda *_: begun.set()
                )
            )
            assert answers[0].status == "killed"
            assert "are lost" in answers[0].text
            assert "kept" not in answers[0].text

        tasks.start_soon(run)
        await begun.wait()
        await notebook.call(end, session=handle)
