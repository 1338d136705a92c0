"""An MCP client analyses a CSV through a real server, a step a call, and checks every answer.

`make demo` runs it. All flags go to the server: `make demo ARGS="--sandbox landlock"`.
`rentals.csv` is invented, and untidy on purpose: gaps, repeated rows, spellings, a counter that
stuck.
"""

from __future__ import annotations

import base64
import os
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from mcp import MCPError
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import CallToolResult, ImageContent, TextContent

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

CSV = Path(__file__).with_name("rentals.csv")
PLOT = Path("demo-output/plot.png")
SERVER = Path(sys.executable).with_name("kernel-mcp")
FLAGS = ("--allow", "numpy,pandas,matplotlib")
LIMIT_S = 600
BUILDING = ("Building", "Resolv", "Downloading", "Unpacking", "Compiling", "Preloading")


class DemoError(Exception):
    """The server did not do what the demo promises."""


@dataclass(frozen=True)
class Step:
    """One call; `expects` is text of its answer, `status` is that of its cell in the end."""

    title: str
    tool: str
    arguments: Mapping[str, Any]
    expects: str
    status: str | None = "ok"


def _cell(title: str, code: str, expects: str = "", status: str = "ok", wait: float = 50) -> Step:
    return Step(title, "execute", {"code": code, "wait": wait}, expects, status)


STEPS = (
    Step(
        "Upload a CSV", "write_file", {"path": CSV.name, "content": CSV.read_text("utf-8")},
        expects=CSV.name, status=None,
    ),
    _cell("Load the file that was just uploaded", """\
import pandas as pd

rides = pd.read_csv("rentals.csv", na_values=["n/a"])
print(f"{len(rides)} rows, {rides.duplicated().sum()} of them repeated")
print(rides.isna().sum().to_string())
rides.head(4)""", expects="rows,"),
    _cell("Clean it; `rides` is still there from the call before", """\
rides = rides.drop_duplicates()
rides["date"] = pd.to_datetime(rides["date"], format="mixed")
rides["station"] = rides["station"].str.strip().str.title()
rides = rides[rides["avg_minutes"] < 600].dropna(subset=["rides", "weather"])
rides["temp_c"] = rides.groupby("date")["temp_c"].transform(lambda t: t.fillna(t.mean()))
print(f"{len(rides)} rows, stations: {', '.join(sorted(rides['station'].unique()))}")""",
        expects="stations: Harbour, Museum, North Gate, University"),
    _cell("Group: rides a day by station and weather", """\
table = rides.pivot_table(index="station", columns="weather", values="rides", aggfunc="mean")
table = table[["sun", "cloud", "rain"]].round(0).astype(int)
table["lost in rain"] = ((1 - table["rain"] / table["sun"]) * 100).round().astype(int)
table""", expects="lost in rain"),
    _cell("Plot it", """\
import matplotlib.pyplot as plt

colours = {"sun": "#f2b134", "cloud": "#9aa5b1", "rain": "#3a6ea5"}
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
table[list(colours)].plot.bar(ax=left, rot=0, color=list(colours.values()))
left.set(title="Rides a day", xlabel="")
for weather, colour in colours.items():
    days = rides[rides["weather"] == weather]
    right.scatter(days["temp_c"], days["rides"], s=14, color=colour, label=weather)
right.set(title="Warm days bring riders", xlabel="°C", ylabel="rides")
right.legend()
plt.show()""", expects="[picture, "),
    _cell("A package that is not there", "import seaborn", expects="seaborn", status="error"),
    _cell("Start something that takes an hour", """\
import time

for second in range(3600):
    print("working", second)
    time.sleep(1)""", expects="working 0", status="running", wait=1.5),
    Step("Stop it", "interrupt", {}, expects="interrupted", status=None),
    _cell("And the variables?",
        'print(f"{len(rides)} rows, {table.shape[0]} stations, all still here")',
        expects="still here"),
)  # fmt: skip


def main() -> int:
    """Run the demo; 0 when every answer was as promised."""
    flags = [*FLAGS, *sys.argv[1:]]
    _say("2", f"Starting: kernel-mcp {' '.join(flags)}")
    _say("2", "The first start builds an environment for the kernels; later ones find it.")
    try:
        anyio.run(_demo, flags)
    except (DemoError, MCPError, OSError, TimeoutError, ExceptionGroup) as error:
        print(f"\nThe demo failed: {_first(error)}", file=sys.stderr)
        return 1
    _say("2", f"\nDone. The plot is in {PLOT}")
    return 0


async def _demo(flags: list[str]) -> None:
    environ = {"KERNEL_MCP_PERSIST": "off", **os.environ}  # each demo begins anew
    server = StdioServerParameters(command=str(SERVER), args=flags, env=environ)
    with anyio.fail_after(LIMIT_S):
        async with Client(stdio_client(server)) as client:
            for number, step in enumerate(STEPS, 1):
                _say("1", f"\n{number}. {step.title}  ({step.tool})")
                _say("36", textwrap.indent(_call(step), "   > ", lambda _: True))
                await _take(client, step)


async def _take(client: Client, step: Step) -> None:
    started = time.perf_counter()
    result = await client.call_tool(step.tool, dict(step.arguments), progress_callback=_progress)
    text = _text(result)
    while _status(result) in ("queued", "running") and step.status != "running":
        result = await client.call_tool("wait", {"wait": 50}, progress_callback=_progress)
        text += _text(result)
    seconds = time.perf_counter() - started
    _say("0", textwrap.indent(text.rstrip("\n"), "   "))
    _say("2", f"   [{seconds * 1000:.0f} ms]" if seconds < 1 else f"   [{seconds:.1f} s]")
    if result.is_error and _status(result) is None:
        raise DemoError(f"the tool {step.tool} failed")
    if step.status not in (None, _status(result)):
        raise DemoError(f"the cell is {_status(result)!r} instead of {step.status!r}")
    if step.expects not in text:
        raise DemoError(f"the answer does not say {step.expects!r}")


def _status(result: CallToolResult) -> str | None:
    cell = (result.meta or {}).get("kernel-mcp/cell") or {}
    return cell.get("status")


def _text(result: CallToolResult) -> str:
    """All blocks of an answer as text; a picture goes to PLOT, its size into the text."""
    text = ""
    for block in result.content:
        if isinstance(block, TextContent):
            text += block.text.rstrip("\n") + "\n"
        elif isinstance(block, ImageContent):
            PLOT.parent.mkdir(exist_ok=True)
            size = PLOT.write_bytes(base64.b64decode(block.data))
            text += f"[picture, {size / 1024:.0f} KB]\n"
    return text


async def _progress(progress: float, total: float | None, message: str | None) -> None:
    if message and message.startswith(BUILDING):  # what a cell prints comes with its answer
        _say("2", f"   … {message}")


def _call(step: Step) -> str:
    """Return the code that a step sends, or its tool and arguments."""
    shown = (f"{name}={str(value)[:32]!r}" for name, value in step.arguments.items())
    return str(step.arguments.get("code") or f"{step.tool}({', '.join(shown)})")


def _say(style: str, text: str) -> None:
    print(f"\033[{style}m{text}\033[0m" if sys.stdout.isatty() else text, flush=True)


def _first(error: BaseException) -> str:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no end within {LIMIT_S} s"
    return str(error) or type(error).__name__


if __name__ == "__main__":
    raise SystemExit(main())
