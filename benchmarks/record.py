"""Keeps the results of a run: docs/benchmarks.md and its plot."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import anyio
from mcp_types import ImageContent

from benchmarks import checks, crowds, field, ours, over_http, sessions, sleep
from benchmarks.connection import answer, call
from benchmarks.crowds import PANDAS_ALL
from benchmarks.floor import FLOOR
from benchmarks.machine import Machine
from benchmarks.report import markdown, number, times
from benchmarks.results import BenchmarkError, Figure, Results, Series
from benchmarks.sessions import STDIO

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/benchmarks.md"
PICTURE = ROOT / "docs/benchmarks.png"
PLOT_CELL = Path(__file__).with_name("plot_cell.py")

POOLED = f"{STDIO}, pooled"
FORKED = f"{STDIO}, forked"

HEADLINES: tuple[tuple[str, Figure, str, int], ...] = (
    ("New session → first result, from the reserve", sessions.NEW_SESSION, POOLED, 0),
    ("the same, reserve used up", sessions.NEW_SESSION, FORKED, 0),
    ("Warm cell", sessions.WARM, STDIO, 0),
    ("First pandas cell", sessions.PANDAS, STDIO, 0),
    ("First plot", sessions.PICTURE, STDIO, 0),
    ("1,000,000 printed lines", sessions.LINES, STDIO, 0),
    ("16 sessions at once, each with pandas", crowds.BURST, STDIO, 16),
    ("Cells a second in 64 sessions", crowds.ROBIN, STDIO, 64),
    ("Memory of one of 16 sessions, pandas used", crowds.PANDAS_EACH, STDIO, 16),
)
"""Figures of the plot and the summary: name there, figure, subject and number of sessions."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """Some figures with what has to be known about them."""

    title: str
    text: str
    figures: tuple[Figure, ...]


CHAPTERS = (
    Chapter(
        "Start",
        """\
From exec of the server. The floor of its first answer is an MCP server of the same SDK that has \
one tool and nothing to do; that of the first result is a stock kernel, which has no server.""",
        (sessions.START, sessions.FIRST_ANSWER, sessions.FIRST_PANDAS, sessions.DOCTOR),
    ),
    Chapter(
        "Sessions",
        """\
*cold*: started through the sandbox alone; *forked*: from the template, the reserve empty; \
*pooled*: from the reserve, as by default. *no MCP*: the parts of the server in the process that \
measures, as the floor is. A warm cell is measured in rows of 30. It is measured again with a \
cell of every other subject before it, when the processor's caches hold something else.""",
        (
            sessions.NEW_SESSION,
            sessions.WARM,
            sessions.WARM_ALONE,
            sessions.PANDAS,
            sessions.PICTURE,
            sessions.PLOT_FIRST,
            sessions.PLOT_AGAIN,
            sessions.LINES,
            sessions.INTERRUPT,
            sessions.CLOSE,
            sleep.WAKE,
            sleep.WAKE_LARGE,
            sleep.SAVE,
            sleep.SAVE_LARGE,
        ),
    ),
    Chapter(
        "Over HTTP",
        """\
Streamable HTTP on loopback, with a token. The floor is the cost of a call over stdio plus the \
cost that HTTP adds to an idle MCP server of the same SDK. All are measured in turns.""",
        (over_http.NEWEST, over_http.HANDSHAKE),
    ),
    Chapter(
        "Many sessions",
        """\
Memory is the proportional set size of the whole process tree: server, template, reserve and every \
process of a session. What *one session adds* leaves out all that is there before the first. \
*no control groups*: a server that can have none, as most users' servers.""",
        (
            crowds.BURST,
            crowds.BUSY,
            *checks.FIGURES.values(),
            crowds.ROBIN,
            crowds.SPREAD,
            crowds.PANDAS_EACH,
            crowds.PANDAS_ALL,
            crowds.ALIVE_EACH,
            crowds.ALIVE_ALL,
            crowds.ALIVE_IDLE,
            crowds.ALIVE_WARM,
        ),
    ),
    Chapter(
        "Other MCP servers",
        """\
Each in an environment of its own, through the same client, in the same run. None of them confines \
its kernels as started here. jupyter-mcp-server needs a Jupyter server, which runs already; ipybox \
has one session, and a new one is its `reset`.""",
        (field.START, field.SESSION, field.WARM, field.PICTURE),
    ),
)

ABOUT = """\
Every figure stands beside a floor that was measured in the same run, taking turns with it: \
*jupyter_client and a stock ipykernel*, used as their documentation says, without MCP and without \
any sandbox. Sessions of kernel-mcp are sandboxed throughout. Compare ratios, not milliseconds: \
those belong to the machine.

A new session gets a kernel from a reserve of kernels that are already in their sandboxes. \
Without one, its kernel is forked from a process that has imported everything. The kernel itself \
is ipykernel, tuned. `make bench ARGS='--compare REV'` measures a revision and your tree in turns \
and prints ratios."""


async def record(results: Results, machine: Machine, date: datetime) -> None:
    """Write all of it. Raises BenchmarkError when figures are missing that are shown."""
    headlines = _headlines(results)
    picture = await _plot(results, headlines)
    document = _document(results, _summary(headlines, machine, date), machine, date)
    PICTURE.write_bytes(picture)
    DOCUMENT.write_text(document, encoding="utf-8")


Headline = tuple[str, Figure, Series, Series, float]


def _headlines(results: Results) -> list[Headline]:
    found = []
    for name, figure, subject, at in HEADLINES:
        series = results.find(figure.name, subject, at)
        floor = results.find(figure.name, figure.floor, at)
        if series is None or floor is None:
            raise BenchmarkError(f"{name!r} was not measured; record a whole run")
        found.append((name, figure, series, floor, results.ratio(figure, series) or 0.0))
    return found


def _document(results: Results, summary: str, machine: Machine, date: datetime) -> str:
    chapters = [
        f"## {chapter.title}\n\n{chapter.text}\n\n{markdown(results, measured)}"
        for chapter in CHAPTERS
        if (measured := [figure for figure in chapter.figures if figure in results.figures])
    ]
    return (
        "\n\n".join(
            [
                "# Benchmarks",
                f"Written by `make bench ARGS='--record'` on {date:%Y-%m-%d}.",
                machine.describe().replace("\n", "  \n"),
                ABOUT,
                "![Ratios to the floor, and memory by number of sessions](benchmarks.png)",
                summary,
                *chapters,
            ]
        )
        + "\n"
    )


def _summary(headlines: Sequence[Headline], machine: Machine, date: datetime) -> str:
    lines = ["| | kernel-mcp, sandboxed, over MCP | jupyter_client + ipykernel | |",
             "|---|--:|--:|--:|"]  # fmt: skip
    for name, figure, series, floor, ratio in headlines:
        values = (f"{number(it.median)} {figure.unit}" for it in (series, floor))
        lines.append(f"| {name} | {' | '.join(values)} | {times(ratio)} |")
    measured = f"Medians of one run on {machine.cores} cores, {date:%Y-%m-%d}."
    return "\n".join([*lines, "", measured])


async def _plot(results: Results, headlines: Sequence[Headline]) -> bytes:
    """The plot as a PNG, drawn in a session of our own server. Raises BenchmarkError."""
    growth = {
        subject: [
            (series.at, series.median * series.at)
            for series in results.of(PANDAS_ALL)
            if series.subject == subject and series.values
        ]
        for subject in (STDIO, FLOOR)
    }
    bars = [(name, ratio) for name, _, _, _, ratio in headlines]
    data = {
        "bars": bars,
        "growth": {name.removeprefix("floor: "): it for name, it in growth.items()},
    }
    with tempfile.TemporaryDirectory(prefix="kb-") as scratch:
        async with ours.over_stdio(Path(scratch)) as server:
            await call(server.client, "write_file", path="data.json", content=json.dumps(data))
            code = await anyio.Path(PLOT_CELL).read_text(encoding="utf-8")
            result = await call(server.client, "execute", code=code)
    for block in result.content:
        if isinstance(block, ImageContent) and block.mime_type == "image/png":
            return base64.b64decode(block.data)
    raise BenchmarkError(f"the plot was not drawn: {answer(result).text[-500:]}")
