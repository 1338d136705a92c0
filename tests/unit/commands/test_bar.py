"""The bar that `env build` draws."""

from __future__ import annotations

import io

import anyio
import pytest

from kernel_mcp.commands.bar import Bar, drawn

pytestmark = pytest.mark.anyio

LINES = (
    "Building a Python 3.11.7 environment: pandas",
    "Resolved 12 packages in 388ms",
    "Downloading pandas (12.0MiB)",
    "Downloading kiwisolver (512.0KiB)",
    " Downloaded kiwisolver",
    " Downloaded pandas",
    "Prepared 12 packages in 1.24s",
    "Installed 12 packages in 103ms",
    "Bytecode compiled 2767 files in 5.75s",
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_the_bar_never_goes_back_and_is_full_at_the_end() -> None:
    clock = Clock()
    bar = Bar(clock)
    shares = [bar.share()]
    for line in LINES:
        clock.now += 1
        shares.append(bar.share())
        await bar.tell(line)
        shares.append(bar.share())
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 1


async def test_downloads_count_by_their_size() -> None:
    bar = Bar(Clock())
    for line in LINES[:5]:
        await bar.tell(line)
    little = bar.share()
    await bar.tell(LINES[5])
    assert bar.share() - little > 0.4


async def test_the_bar_names_what_is_on_its_way_and_the_seconds() -> None:
    clock = Clock()
    bar = Bar(clock)
    for line in LINES[:5]:
        await bar.tell(line)
    clock.now = 7
    assert bar.text().endswith("7 s  Downloading pandas")


async def test_lines_that_say_nothing_change_nothing() -> None:
    bar = Bar(Clock())
    for line in ("", "   ", "warning: x", "Using Python 3.11"):
        await bar.tell(line)
    assert bar.share() == 0


async def test_the_line_of_the_bar_is_left_empty() -> None:
    screen = io.StringIO()
    async with drawn(Bar(), screen):
        await anyio.lowlevel.checkpoint()
    assert "Resolving" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K")
