"""How long a session takes to hibernate, and to come back."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

import anyio

from benchmarks import ours
from benchmarks.bench import Bench
from benchmarks.connection import call
from benchmarks.floor import FLOOR, floor
from benchmarks.notebooks import Notebook
from benchmarks.processes import settle
from benchmarks.results import BenchmarkError, Figure, Measurement, interleave, timed
from benchmarks.sessions import DIRECT, STDIO

WAKE = Figure("wake", "Hibernated session → first result", FLOOR)
WAKE_LARGE = Figure("wake-large", "Hibernated session with a frame of 100 MB → first result", FLOOR)
SAVE = Figure("save", "Hibernation of a session with a frame of 100 MB", FLOOR)
SAVE_LARGE = Figure("save-large", "Hibernation of a session with a frame of 1 GB", FLOOR)
IDLE_S = 1
ASLEEP_S = 60.0
"""How long a session that is idle may take until it is hibernated."""
LOOK_S = 0.02
SMALL = "value = 41"
FRAME = """\
import numpy, pandas
value = pandas.DataFrame(numpy.random.rand({rows}, 10))"""
LARGE = FRAME.format(rows=1_250_000)
HUGE = FRAME.format(rows=12_500_000)
DUMP = "import pickle\nwith open('value', 'wb') as file: pickle.dump(value, file, protocol=5)"
LOAD = "with open('value', 'rb') as file: value = pickle.load(file)"


async def wake(bench: Bench) -> None:
    """From a call to its result; the floor reads the same value from a pickle in a live kernel."""
    async with AsyncExitStack() as stack:
        stock = await stack.enter_async_context(floor(bench.folder()))
        served = await stack.enter_async_context(
            ours.over_stdio(bench.folder(), "--idle-timeout", f"{IDLE_S}s")
        )
        for figure, code in ((WAKE, SMALL), (WAKE_LARGE, LARGE)):
            awake, asleep = await stock.open(), await served.open()
            for notebook in (awake, asleep):
                await notebook.run(code)
            await awake.run(DUMP)
            subjects: dict[str, Measurement] = {
                FLOOR: partial(_use, awake, LOAD),
                STDIO: partial(_wake, served, asleep),
            }
            await interleave(bench.results, figure, bench.rounds(8), subjects)
            await awake.close()
            await asleep.close()


async def save(bench: Bench) -> None:
    """From the decision to hibernate to the end of the kernel; the floor writes a pickle."""
    sizes = ((SAVE, LARGE),) if bench.quick else ((SAVE, LARGE), (SAVE_LARGE, HUGE))
    async with AsyncExitStack() as stack:
        stock = await stack.enter_async_context(floor(bench.folder()))
        served = ours.in_process(bench.folder())
        direct = await stack.enter_async_context(served)
        for figure, code in sizes:
            awake = await stock.open()
            await awake.run(code)
            subjects: dict[str, Measurement] = {
                FLOOR: partial(_use, awake, DUMP),
                DIRECT: partial(_save, direct, code),
            }
            await interleave(bench.results, figure, bench.rounds(4), subjects)
            await awake.close()


async def _save(server: ours.DirectServer, code: str) -> float:
    """Of a session that has made its value itself: one that came back has it as a copy."""
    notebook = await server.open()
    await notebook.run(code)
    await settle()
    took = await timed(notebook.hibernate)
    await notebook.close()
    return took


async def _use(notebook: Notebook, code: str) -> float:
    await settle()
    return await timed(lambda: notebook.run(code))


async def _wake(server: ours.McpServer, notebook: ours.McpNotebook) -> float:
    with anyio.move_on_after(ASLEEP_S):
        while True:
            listed = await call(server.client, "list_sessions")
            found = (listed.structured_content or {})["sessions"]
            if any(each["state"] == "hibernated" for each in found):
                return await _use(notebook, "value is not None")
            await anyio.sleep(LOOK_S)
    raise BenchmarkError(f"the session was not hibernated within {ASLEEP_S:g} s")
