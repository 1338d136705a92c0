"""Times what a client on stdio waits for and prints one table."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

_LIMIT_S = 600


class Stopwatch:
    """Collects times in milliseconds under names."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}
        self._started = time.perf_counter()

    def start(self) -> None:
        """Begin a measurement."""
        self._started = time.perf_counter()

    def stop(self, name: str) -> None:
        """End it and keep it."""
        self._times.setdefault(name, []).append((time.perf_counter() - self._started) * 1000)

    def table(self) -> str:
        """Median, 90th percentile and number of measurements of each name."""
        lines = [f"{'':38}{'median':>10}{'p90':>10}{'n':>6}"]
        for name, times in self._times.items():
            p90 = sorted(times)[min(len(times) - 1, int(len(times) * 0.9))]
            lines.append(
                f"{name:38}{statistics.median(times):>7.1f} ms{p90:>7.1f} ms{len(times):>6}"
            )
        return "\n".join(lines)


@asynccontextmanager
async def connected(flags: Sequence[str], mode: str) -> AsyncIterator[Client]:
    """A client of a server process of its own."""
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "kernel_mcp", *flags], env=dict(os.environ)
    )
    async with Client(stdio_client(server), mode=mode) as client:
        yield client


async def execute(client: Client, code: str, session: str = "") -> None:
    """Run a cell that must succeed."""
    result = await client.call_tool("execute", {"code": code, "session": session})
    status = (result.meta or {})["kernel-mcp/cell"]["status"]
    if status != "ok":
        raise SystemExit(f"benchmark: the cell {code!r} ended with {status}: {result.content}")


async def measure(flags: Sequence[str], mode: str, rounds: int) -> str:
    """All measurements as a table."""
    watch = Stopwatch()
    async with connected(flags, mode) as client:  # builds the environment if need be
        await execute(client, "1")
    for _ in range(3):
        watch.start()
        async with connected(flags, mode) as client:
            await client.list_tools()
            watch.stop("server: start to list of tools")
            watch.start()
            await execute(client, "1")
            watch.stop("default session: first result")
    async with connected(flags, mode) as client:
        for _ in range(10):
            watch.start()
            created = await client.call_tool("create_session", {})
            session = str((created.structured_content or {})["session"])
            await execute(client, "1", session)
            watch.stop("new session: first result")
            await client.call_tool("close_session", {"session": session})
        cells = {"1": "1", "1000 lines": "for i in range(1000): print(i)", "1 MB": "'x' * 10**6"}
        for name, code in cells.items():
            await execute(client, code)
            for _ in range(rounds):
                watch.start()
                await execute(client, code)
                watch.stop(f"warm execute: {name}")
        for _ in range(rounds):
            watch.start()
            await client.call_tool("check_syntax", {"code": "import json\njson.dumps(1)"})
            watch.stop("check_syntax")
    return watch.table()


async def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="of each warm call")
    parser.add_argument("--mode", default="auto", help="auto or legacy protocol era")
    options, flags = parser.parse_known_args()
    with anyio.fail_after(_LIMIT_S):
        print(await measure(flags, options.mode, options.rounds))


anyio.run(main)
