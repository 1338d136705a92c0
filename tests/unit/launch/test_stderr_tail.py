"""The last output of a process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress

import anyio
import pytest

from kernel_mcp.launch.readiness import BUDGET_BYTES, KEPT_BYTES, StderrTail

pytestmark = pytest.mark.anyio


class Pipe:
    """A pipe whose reader is an StderrTail."""

    def __init__(self) -> None:
        read, self.write_end = os.pipe()
        self.tail = StderrTail(read, asyncio.get_running_loop())

    def close(self) -> None:
        os.close(self.write_end)
        self.tail.close()


@pytest.fixture
async def pipe() -> AsyncIterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


async def test_only_the_end_is_kept_and_control_characters_go(pipe: Pipe) -> None:
    os.write(pipe.write_end, b"x" * (KEPT_BYTES + 10) + b"\x1b[31mlast\tline\x00\n")
    pipe.tail.drain()
    assert pipe.tail.text().endswith("x[31mlast\tline\n")
    assert len(pipe.tail.text()) <= KEPT_BYTES


async def test_output_is_read_while_the_loop_runs(pipe: Pipe) -> None:
    os.write(pipe.write_end, b"hello")
    with anyio.fail_after(60):
        while pipe.tail.text() != "hello":
            await anyio.lowlevel.checkpoint()


async def test_a_flood_pauses_its_writer_and_not_the_loop(pipe: Pipe) -> None:
    written = 0
    os.set_blocking(pipe.write_end, False)
    began = asyncio.get_running_loop().time()
    with anyio.fail_after(60):
        while written < 3 * BUDGET_BYTES:
            with suppress(BlockingIOError):
                written += os.write(pipe.write_end, bytes(65536))
            await anyio.lowlevel.checkpoint()
    assert asyncio.get_running_loop().time() - began > 0.05


async def test_what_is_not_text_does_no_harm(pipe: Pipe) -> None:
    os.write(pipe.write_end, b"\xff\xfeab")
    pipe.tail.drain()
    assert pipe.tail.text() == "\ufffd\ufffdab"


async def test_the_end_of_output_closes_the_descriptor() -> None:
    read, write = os.pipe()
    tail = StderrTail(read, asyncio.get_running_loop())
    os.close(write)
    tail.drain()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    tail.close()
