"""Figures of single sessions: how long a client waits for what."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio

from benchmarks import bare, notebooks, ours
from benchmarks.bench import Bench
from benchmarks.connection import Era, call, connected
from benchmarks.floor import FLOOR, floor
from benchmarks.notebooks import Notebook, Notebooks
from benchmarks.places import clean_environ
from benchmarks.processes import settle
from benchmarks.results import BenchmarkError, Figure, Measurement, attempt, interleave, timed

BARE = "floor: MCP server that does nothing"
STDIO = "kernel-mcp, stdio"
MEMORY = "kernel-mcp, in memory"
DIRECT = "kernel-mcp, no MCP"

START = Figure("start", "Server start → first answer", BARE)
FIRST_ANSWER = Figure("first", "Server start → first result", FLOOR)
IMPORT_PANDAS = "import pandas"
FIRST_PANDAS = Figure("first-pandas", "Server start → result of `import pandas`", FLOOR)
DOCTOR = Figure("doctor", "`kernel-mcp doctor`", FLOOR)
NEW_SESSION = Figure("session", "New session → first result", FLOOR)
WARM = Figure("warm", "Warm cell `1`, one after the other", FLOOR)
WARM_ALONE = Figure("warm-alone", "Warm cell `1`, the others' in between", FLOOR)
PANDAS = Figure("pandas", "First pandas cell of a session", FLOOR)
PICTURE = Figure("picture", "First plot of a session", FLOOR)
PLOT_FIRST = Figure("plot-first", "A plot as the first cell of a new session", FLOOR)
PLOT_AGAIN = Figure("plot-again", "The same cell again", FLOOR)
LINES = Figure("lines", "1,000,000 printed lines", FLOOR)
INTERRUPT = Figure("interrupt", "Interrupt of an endless loop → it has ended", FLOOR)
CLOSE = Figure("close", "Close of a session", FLOOR)


async def start(bench: Bench) -> None:
    """From exec to the answer to the client's hello, in both eras of the protocol."""
    folder = bench.folder()
    bare_command = [sys.executable, str(Path(bare.__file__))]
    eras: tuple[tuple[str, Era], ...] = (("discover", "auto"), ("initialize", "legacy"))
    subjects: dict[str, Measurement] = {BARE: lambda: hello(bare_command, folder)}
    for word, era in eras:
        subjects[f"kernel-mcp, {word}"] = partial(hello, ours.command(), folder, era)
    await interleave(bench.results, START, bench.rounds(15), subjects)


async def first(bench: Bench) -> None:
    """From exec to the first result: what someone waits for who opens a chat and asks."""
    folder = bench.folder()
    async with floor(bench.folder()) as stock:
        for figure, code in ((FIRST_ANSWER, notebooks.ONE), (FIRST_PANDAS, IMPORT_PANDAS)):
            subjects: dict[str, Measurement] = {
                FLOOR: partial(new_session, stock, code),
                STDIO: partial(first_result, folder, code),
            }
            await interleave(bench.results, figure, bench.rounds(10), subjects)


async def doctor(bench: Bench) -> None:
    """How long an operator waits for the report on what holds; a stock kernel, to compare."""
    folder = bench.folder()
    async with floor(bench.folder()) as stock:
        subjects: dict[str, Measurement] = {
            FLOOR: partial(new_session, stock),
            "kernel-mcp doctor": lambda: timed(partial(_examine, folder)),
        }
        await interleave(bench.results, DOCTOR, bench.rounds(3), subjects)


async def _examine(folder: Path) -> None:
    await settle()
    command = [sys.executable, "-m", "kernel_mcp", "doctor"]
    done = await anyio.run_process(command, cwd=folder, env=clean_environ(), check=False)
    if done.returncode:
        raise BenchmarkError(f"doctor ends with {done.returncode}: {done.stdout[-300:]!r}")


async def session(bench: Bench) -> None:
    """From asking for a new session to its first result, pandas preloaded where possible."""
    async with AsyncExitStack() as stack:
        systems: dict[str, Notebooks] = {
            FLOOR: await stack.enter_async_context(floor(bench.folder()))
        }
        ways = {"cold": (0, True), "forked": (0, False), "pooled": (2, False)}
        for way, (warm, cold) in ways.items():
            flags = ["--warm", str(warm), *(["--no-template"] if cold else [])]
            systems[f"{STDIO}, {way}"] = await stack.enter_async_context(
                ours.over_stdio(bench.folder(), *flags)
            )
            systems[f"{DIRECT}, {way}"] = await stack.enter_async_context(
                ours.in_process(bench.folder(), warm=warm, no_template=cold)
            )
        await _prepare(systems)
        subjects = each(systems, new_session)
        await interleave(bench.results, NEW_SESSION, bench.rounds(25, 3), subjects)


async def warm(bench: Bench) -> None:
    """A cell in a session that has run cells before."""
    async with AsyncExitStack() as stack:
        stock = await stack.enter_async_context(floor(bench.folder()))
        direct = await stack.enter_async_context(ours.in_process(bench.folder()))
        memory = await stack.enter_async_context(ours.in_memory(direct))
        stdio = await stack.enter_async_context(ours.over_stdio(bench.folder()))
        nothing = await stack.enter_async_context(
            connected([sys.executable, str(Path(bare.__file__))], bench.folder())
        )
        opened: dict[str, Notebook] = {
            FLOOR: await stock.open(),
            DIRECT: await direct.open(),
            MEMORY: await memory.open(),
            STDIO: await stdio.open(),
        }
        subjects: dict[str, Measurement] = {
            BARE: lambda: timed(lambda: call(nothing, "execute", code="1"))
        }
        for name, notebook in opened.items():
            for _ in range(10):
                await notebook.run(notebooks.ONE)
            subjects[name] = warm_call(notebook)
        await settle()
        await interleave(bench.results, WARM, bench.rounds(10, 2), subjects, in_a_row=30)
        await interleave(bench.results, WARM_ALONE, bench.rounds(300, 30), subjects)


async def cells(bench: Bench) -> None:
    """The first use of pandas and of matplotlib, and a flood of output."""
    async with AsyncExitStack() as stack:
        systems = await _both(bench, stack)
        await _prepare(systems)
        rounds = bench.rounds(10)
        await interleave(bench.results, PANDAS, rounds, each(systems, _first_pandas))
        await interleave(bench.results, PICTURE, rounds, each(systems, first_picture))
        await interleave(bench.results, LINES, bench.rounds(5, 1), each(systems, _print_lines))


async def plots(bench: Bench) -> None:
    """A plot where nothing was run before, and once more."""
    async with AsyncExitStack() as stack:
        systems = await _both(bench, stack)
        await _prepare(systems)
        for _ in range(bench.rounds(10)):
            for name, system in systems.items():
                notebook = await system.open()
                await settle()
                for figure in (PLOT_FIRST, PLOT_AGAIN):
                    measure = partial(timed, partial(_plot, notebook))
                    await attempt(bench.results, figure, name, measure)
                await notebook.close()


async def _plot(notebook: Notebook) -> None:
    (await notebook.run(notebooks.PLOT_AT_ONCE)).must_show_a_picture()


async def ends(bench: Bench) -> None:
    """How long it takes to stop a cell and to end a session."""
    async with AsyncExitStack() as stack:
        systems = await _both(bench, stack)
        await _prepare(systems)
        rounds = bench.rounds(15)
        await interleave(bench.results, INTERRUPT, rounds, each(systems, _interrupt))
        await interleave(bench.results, CLOSE, rounds, each(systems, _close))


async def hello(
    command: Sequence[str],
    folder: Path,
    era: Era = "auto",
    environ: Mapping[str, str] | None = None,
) -> float:
    """From exec to the first answer, in milliseconds."""
    await settle()
    async with AsyncExitStack() as stack:
        return await timed(
            lambda: stack.enter_async_context(connected(command, folder, era, environ))
        )


async def new_session(system: Notebooks, code: str = notebooks.ONE) -> float:
    """From asking for a session to its first result, in milliseconds."""
    await settle()
    opened: list[Notebook] = []

    async def begin() -> None:
        opened.append(await system.open())
        (await opened[0].run(code)).must_hold("1" if code == notebooks.ONE else "")

    try:
        return await timed(begin)
    finally:
        for notebook in opened:
            await notebook.close()


async def first_result(folder: Path, code: str = notebooks.ONE) -> float:
    """From exec to the result of the first cell, in milliseconds."""
    await settle()
    async with AsyncExitStack() as stack:

        async def begin() -> None:
            server = await stack.enter_async_context(ours.over_stdio(folder))
            answered = await (await server.default()).run(code)
            answered.must_hold("1" if code == notebooks.ONE else "")

        return await timed(begin)


def warm_call(notebook: Notebook) -> Measurement:
    """Measures a small cell."""
    return lambda: timed(lambda: notebook.run(notebooks.ONE))


async def _first_pandas(system: Notebooks) -> float:
    async def cell(notebook: Notebook) -> None:
        (await notebook.run(notebooks.PANDAS)).must_hold(notebooks.PANDAS_ANSWER)

    return await _in_new_session(system, cell)


async def first_picture(system: Notebooks) -> float:
    """From a cell that plots to its picture, in milliseconds."""

    async def cell(notebook: Notebook) -> None:
        (await notebook.run(notebooks.PLOT)).must_show_a_picture()

    return await _in_new_session(system, cell)


async def _print_lines(system: Notebooks) -> float:
    async def cell(notebook: Notebook) -> None:
        (await notebook.run(notebooks.PRINT_LINES)).must_hold(str(notebooks.LINES - 1))

    return await _in_new_session(system, cell)


async def _interrupt(system: Notebooks) -> float:
    notebook = await system.open()
    try:
        await notebook.run(notebooks.ONE)
        await notebook.begin(notebooks.ENDLESS)
        return await timed(notebook.interrupt)
    finally:
        await notebook.close()


async def _close(system: Notebooks) -> float:
    notebook = await system.open()
    await notebook.run(notebooks.ONE)
    await settle()
    return await timed(notebook.close)


async def _in_new_session(
    system: Notebooks, action: Callable[[Notebook], Awaitable[None]]
) -> float:
    """How long an action takes in a session that has run one small cell, in milliseconds."""
    notebook = await system.open()
    try:
        await notebook.run(notebooks.ONE)
        await settle()
        return await timed(lambda: action(notebook))
    finally:
        await notebook.close()


async def _both(bench: Bench, stack: AsyncExitStack) -> dict[str, Notebooks]:
    return {
        FLOOR: await stack.enter_async_context(floor(bench.folder())),
        STDIO: await stack.enter_async_context(ours.over_stdio(bench.folder())),
    }


async def _prepare(systems: Mapping[str, Notebooks]) -> None:
    """Open and close a first session of each system, and wait for its work in the background."""
    for system in systems.values():
        notebook = await system.open()
        await notebook.run(notebooks.PANDAS)
        await notebook.close()
    await settle()


def each(
    systems: Mapping[str, Notebooks], measure: Callable[[Notebooks], Awaitable[float]]
) -> dict[str, Measurement]:
    """The same measurement of each system."""
    return {name: partial(measure, system) for name, system in systems.items()}
