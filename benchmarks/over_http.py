"""Figures over HTTP: what a warm call costs there, beside what HTTP alone costs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import httpx2
from anyio.streams.text import TextReceiveStream
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

from benchmarks import bare, notebooks, ours
from benchmarks.bench import Bench
from benchmarks.connection import ANEW, ANSWER_S, Era, call, connected
from benchmarks.notebooks import Notebook
from benchmarks.places import clean_environ
from benchmarks.processes import settle
from benchmarks.results import BenchmarkError, Figure, Measurement, Results, interleave, timed
from benchmarks.sessions import STDIO, warm_call

HTTP = "kernel-mcp, HTTP"
BARE_HTTP = "MCP server that does nothing, HTTP"
BARE_STDIO = "MCP server that does nothing, stdio"
EXPECTED = "floor: our stdio, and what HTTP adds to a server that does nothing"
MOST = 1.15
"""The goal: a warm call over HTTP takes at most so many times the floor."""
NEWEST = Figure("http", "Warm cell `1` over HTTP, newest era", EXPECTED)
HANDSHAKE = Figure("http-handshake", "Warm cell `1` over HTTP, handshake era", EXPECTED)
ERAS: tuple[tuple[Figure, Era], ...] = ((NEWEST, "auto"), (HANDSHAKE, "legacy"))
_SERVING = re.compile(r"serving (\S+/mcp)")
_TOKEN = re.compile(r"Bearer (kmcp_\S+?)\"")


@asynccontextmanager
async def connected_by_http(
    argv: Sequence[str], folder: Path, era: Era = "auto"
) -> AsyncIterator[Client]:
    """A client of a server process that says on stderr where it serves. Raises BenchmarkError."""
    process = await anyio.open_process(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={**clean_environ(), **ANEW},
    )
    async with process, anyio.create_task_group() as tasks:
        try:
            with anyio.fail_after(ANSWER_S):
                url, token = await tasks.start(_listen, process)
            headers = {"authorization": f"Bearer {token}"} if token else {}
            async with (
                httpx2.AsyncClient(headers=headers, timeout=ANSWER_S) as http,
                Client(streamable_http_client(url, http_client=http), mode=era) as client,
            ):
                yield client
        finally:
            process.terminate()


async def _listen(
    process: anyio.abc.Process, *, task_status: anyio.abc.TaskStatus[tuple[str, str]]
) -> None:
    """Hear all that a server says; starts with where it is and the token that it has made."""
    assert process.stderr is not None
    said, started = "", False
    async for part in TextReceiveStream(process.stderr, errors="replace"):
        if started:
            continue
        said += part
        found, token = _SERVING.search(said), _TOKEN.search(said)
        if found and (token or said.startswith("bare")):
            task_status.started((found[1], token[1] if token else ""))
            started = True
    if not started:
        raise BenchmarkError(f"the server says nowhere that it serves: {said[-300:]}")


async def warm(bench: Bench) -> None:
    """A cell in a session that has run cells before, over HTTP and stdio, in both eras."""
    nothing = [sys.executable, str(Path(bare.__file__))]
    served = ours.command("--http", "127.0.0.1:0")
    for figure, era in ERAS:
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            stdio = await enter(ours.over_stdio(bench.folder(), era=era))
            by_http = await enter(connected_by_http(served, bench.folder(), era))
            bare_stdio = await enter(connected(nothing, bench.folder(), era))
            bare_http = await enter(connected_by_http([*nothing, "http"], bench.folder(), era))
            opened: dict[str, Notebook] = {
                STDIO: await stdio.open(),
                HTTP: await ours.McpServer(by_http).open(),
            }
            subjects: dict[str, Measurement] = {
                BARE_STDIO: _bare_call(bare_stdio),
                BARE_HTTP: _bare_call(bare_http),
            }
            for name, notebook in opened.items():
                for _ in range(20):
                    await notebook.run(notebooks.ONE)
                subjects[name] = warm_call(notebook)
            await settle()
            await interleave(bench.results, figure, bench.rounds(20, 2), subjects, in_a_row=30)
        _expect(bench.results, figure)


def _bare_call(client: Client) -> Measurement:
    return lambda: timed(lambda: call(client, "execute", code="1"))


def _expect(results: Results, figure: Figure) -> None:
    """Add the floor: each value of our stdio, with the difference that HTTP made then."""
    series = [results.find(figure.name, name) for name in (STDIO, BARE_HTTP, BARE_STDIO)]
    values = [each.values for each in series if each is not None]
    if len(values) == len(series):
        for own, http, stdio in zip(*values, strict=False):
            results.add(figure, EXPECTED, own + http - stdio)
