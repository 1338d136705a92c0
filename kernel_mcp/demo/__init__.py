"""`kernel-mcp demo`: an MCP client analyses a CSV through a real server, a step a call."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
from mcp import MCPError

from kernel_mcp.demo import steps
from kernel_mcp.demo.conversation import DemoError, connect
from kernel_mcp.demo.generate import FILE
from kernel_mcp.demo.transcript import Transcript

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

ALLOW = "numpy,pandas,matplotlib"
_LIMIT_S = 600
_PNG = b"\x89PNG\r\n\x1a\n"


def main(argv: Sequence[str]) -> int:
    """Run the demo; 0 when every answer was as promised. Other flags go to the server."""
    parser = argparse.ArgumentParser(
        prog="kernel-mcp demo", description=__doc__, allow_abbrev=False,
        epilog="Any other flag is given to the server, for example --sandbox bwrap.",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), metavar="DIR",
        help="where the plot is written (default: demo-output)",
    )  # fmt: skip
    options, flags = parser.parse_known_args(list(argv))
    try:
        anyio.run(_demo, flags, options.output)
    except (DemoError, MCPError, OSError, TimeoutError, ExceptionGroup) as error:
        print(f"\nkernel-mcp demo failed: {_first(error)}", file=sys.stderr)
        return 1
    return 0


async def _demo(flags: Sequence[str], output: Path) -> None:
    transcript = Transcript(sys.stdout)
    flags = ["--allow", ALLOW, *flags]
    transcript.note(f"Starting: kernel-mcp {' '.join(flags)}")
    transcript.note("The first start builds an environment for the kernels; later ones find it.")
    with anyio.fail_after(_LIMIT_S):
        async with connect(flags, transcript) as talk:
            await talk.tell(
                "write_file", "Upload a CSV", f"{FILE.name}, {FILE.stat().st_size / 1024:.0f} KB",
                path=FILE.name, content=FILE.read_text(encoding="utf-8"),
            )  # fmt: skip
            for step in (steps.LOAD, steps.CLEAN, steps.GROUP):
                await talk.run(step)
            plot = await talk.run(steps.PLOT)
            file = await _save(plot.pictures[0], output)
            transcript.note(f"   written to {file}")
            await talk.run(steps.REFUSED)
            await talk.interrupt(steps.ENDLESS)
            await talk.run(steps.KEPT)
    transcript.note(f"\nDone. The plot is in {file}")


async def _save(picture: bytes, output: Path) -> Path:
    if not picture.startswith(_PNG):
        raise DemoError("the picture is no PNG")
    await anyio.Path(output).mkdir(parents=True, exist_ok=True)
    file = output / "plot.png"
    await anyio.Path(file).write_bytes(picture)
    return file


def _first(error: BaseException) -> str:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no end within {_LIMIT_S} s"
    return str(error) or type(error).__name__
