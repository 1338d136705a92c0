"""Calls of tools from code, beside the same calls by a model and by the SDK's own client.

A model that joins 200 customers with their orders calls a tool for each and reads all answers. Code
does so in one cell. Times are medians of this run, in milliseconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
from mcp.client import Client

from benchmarks import customers
from benchmarks.connection import answer, call, connected
from benchmarks.results import BenchmarkError

SERVER = [sys.executable, "-m", "benchmarks.customers"]
FLAGS = ["--allow-tool", "crm.*"]
CALLS = 300
"""Calls that a time is the median of."""
CELLS = 200
"""Cells of another session, of whose times the 99th percentile counts."""
RESULT_BYTES = 10_000_000
FIND = "import tools\ntools.search('orders of customers')"
JOIN = """from tools import crm
totals = {each["name"]: sum(order["amount"] for order in crm.list_orders(each["id"]))
          for each in crm.list_customers()}
print(sorted(totals.items(), key=lambda each: -each[1])[:3])"""
TIMES = f"""import time
from tools import crm
times = []
for _ in range({CALLS}):
    began = time.perf_counter()
    crm.list_orders(1)
    times.append(time.perf_counter() - began)
print(*times)"""
LONG = f"while True: assert len(crm.long_text({RESULT_BYTES})) == {RESULT_BYTES}"


@dataclass(slots=True)
class Joined:
    """Cost of a join for a model: its calls, and the characters that it writes and reads."""

    calls: int = 0
    characters: int = 0

    async def call(self, client: Client, tool: str, **arguments: Any) -> str:
        """Call a tool as a model does; return what the model reads."""
        text = answer(await call(client, tool, **arguments)).text
        self.calls += 1
        self.characters += len(json.dumps(arguments)) + len(text)
        return text


async def by_model(client: Client) -> Joined:
    """Join by a call for each customer."""
    joined = Joined()
    await joined.call(client, "list_customers")
    for customer in range(customers.CUSTOMERS):
        await joined.call(client, "list_orders", customer=customer)
    return joined


async def by_code(client: Client) -> Joined:
    """Join in a cell, after a search for the tools."""
    joined = Joined()
    for code in (FIND, JOIN):
        await joined.call(client, "execute", code=code)
    return joined


async def times_of_client(client: Client) -> list[float]:
    """Return the seconds of calls by the SDK's client."""
    times = []
    for _ in range(CALLS):
        began = perf_counter()
        await call(client, "list_orders", customer=1)
        times.append(perf_counter() - began)
    return times


async def times_of_cells(client: Client, session: str) -> list[float]:
    """Return the seconds of cells of a session."""
    times = []
    for _ in range(CELLS):
        began = perf_counter()
        await call(client, "execute", session=session, code="1")
        times.append(perf_counter() - began)
    return times


async def measure() -> Iterator[str]:
    """Measure everything; return the lines of the report. Raises BenchmarkError."""
    with tempfile.TemporaryDirectory() as made:
        folder, root = Path(made), str(Path(__file__).parents[1])
        row = {"command": SERVER[0], "args": SERVER[1:], "cwd": root}
        (folder / "tools.json").write_text(json.dumps({"mcpServers": {"crm": row}}))
        ours = [sys.executable, "-m", "kernel_mcp", "--tool-servers", str(folder / "tools.json")]
        async with (
            connected(SERVER, Path(root)) as direct,
            connected([*ours, *FLAGS], folder) as us,
        ):
            model, code = await by_model(direct), await by_code(us)
            client = await times_of_client(direct)
            said = answer(await call(us, "execute", code=TIMES)).text
            calls = [float(each) for each in said.partition("\n")[0].split()]
            other = await call(us, "create_session")
            session = str((other.structured_content or {})["session"])
            alone = await times_of_cells(us, session)
            await call(us, "execute", code=LONG, wait=0.5)
            beside = await times_of_cells(us, session)
            ended = answer(await call(us, "interrupt")).text
            if "KeyboardInterrupt" not in ended:
                raise BenchmarkError(f"the long results had ended: {ended[:300]}")
    return report(model, code, client, calls, alone, beside)


def report(
    model: Joined,
    code: Joined,
    client: Sequence[float],
    calls: Sequence[float],
    alone: Sequence[float],
    beside: Sequence[float],
) -> Iterator[str]:
    """Yield the lines of the report; times are in seconds."""
    yield f"{'join of 200 customers with their orders':48}{'calls':>8}{'characters':>12}"
    yield f"{'  by a model, call by call':48}{model.calls:8}{model.characters:12,}"
    yield f"{'  by code in a cell':48}{code.calls:8}{code.characters:12,}"
    yield f"{'one call of a tool, ms':48}{'median':>8}{'99 %':>12}"
    yield f"{'  by the client of the SDK':48}{_row(client)}"
    yield f"{'  by code in a cell':48}{_row(calls)}"
    yield f"{'a cell of another session, ms':48}{'median':>8}{'99 %':>12}"
    yield f"{'  alone':48}{_row(alone)}"
    yield f"{'  beside results of 10 MB, one after the other':48}{_row(beside)}"


def _row(times: Sequence[float]) -> str:
    late = statistics.quantiles(times, n=100)[98]
    return f"{1000 * statistics.median(times):8.2f}{1000 * late:12.2f}"


def main() -> None:
    """Measure, and print the report."""
    print("\n".join(anyio.run(measure)))


if __name__ == "__main__":
    main()
