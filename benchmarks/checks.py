"""How long all other sessions wait while the code of one is checked."""

from __future__ import annotations

import ast
from collections.abc import Awaitable, Callable
from functools import partial
from time import process_time

import anyio
from anyio.lowlevel import checkpoint

from benchmarks import notebooks, ours
from benchmarks.bench import Bench
from benchmarks.notebooks import Notebook
from benchmarks.processes import settle
from benchmarks.results import Figure, Measurement, interleave

PARSING = "floor: ast.parse on the event loop"
OURS = "kernel-mcp, no MCP"
SMALL = "kernel-mcp, no MCP, a cell `1`"
FIGURES = {
    lines: Figure(f"check-{lines}", f"Event loop held by a cell of {lines:,} lines", PARSING)
    for lines in (30, 300, 3000)
}
WORK = '''\
def work_{number}(folder):
    import pandas as pd
    import numpy as np
    from pathlib import Path

    frame = pd.read_csv(folder / "sales.csv", parse_dates=["date"])
    frame["month"] = frame["date"].dt.to_period("M")
    totals = frame.groupby("month")["amount"].agg(["sum", "mean", "count"])

    def clean(column, *, lower=True):
        """Strip a column of text."""
        text = column.astype(str).str.strip()
        return text.str.lower() if lower else text

    for name in ("region", "product", "customer"):
        frame[name] = clean(frame[name])
        print(f"{{name}}: {{frame[name].nunique()}} values")
    share = {{key: value / totals["sum"].sum() for key, value in totals["sum"].items()}}
    weights = np.linspace(0, 1, len(totals)) ** 2
    score = float((weights * totals["mean"].to_numpy()).sum() / weights.sum())
    if score > 100 and not frame.empty:
        frame = frame.assign(rank=range(1, len(frame) + 1))
    else:
        frame = frame.iloc[0:0]
    try:
        Path("out.json").write_text(frame.to_json(orient="records"))
    except OSError as error:
        print("not written:", error)
    return frame, share

'''
"""30 lines as they are in notebooks, which do nothing until they are called."""


async def check(bench: Bench) -> None:
    """The event loop's longest absence from others while a cell is checked and run."""
    async with ours.in_process(bench.folder(), profile="guarded") as server:
        notebook = await server.open()
        for lines, figure in FIGURES.items():
            code = "".join(WORK.format(number=number) for number in range(lines // 30))
            subjects: dict[str, Measurement] = {
                PARSING: partial(longest_wait, partial(_parse, code)),
                SMALL: partial(_cell, notebook, notebooks.ONE),
                OURS: partial(_cell, notebook, code),
            }
            await notebook.run(code)
            await settle()
            await interleave(bench.results, figure, bench.rounds(30), subjects)


async def longest_wait(action: Callable[[], Awaitable[object]]) -> float:
    """The most processor time of this process between two turns of a task that asks for nothing
    else, in milliseconds.

    Wall time would tell of other processes on the same cores, too.
    """
    longest = 0.0

    async def look() -> None:
        nonlocal longest
        last = process_time()
        while True:
            await checkpoint()
            now = process_time()
            longest = max(longest, now - last)
            last = now

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        await checkpoint()
        await action()
        await checkpoint()
        tasks.cancel_scope.cancel()
    return longest * 1000


async def _cell(notebook: Notebook, code: str) -> float:
    return await longest_wait(lambda: notebook.run(code))


async def _parse(code: str) -> None:
    ast.parse(code)
