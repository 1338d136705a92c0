"""A process that owes an answer is awaited while it works or is blocked, not for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from kernel_mcp.launch import silence
from kernel_mcp.launch.silence import await_answer, await_patiently
from kernel_mcp.linux.proc import processor_seconds

pytestmark = [pytest.mark.anyio]

COMPUTES = "while True: pass"
RESTS = "import signal\nsignal.pause()"
WAITS_FOR_A_CHILD = """
import ctypes
libc = ctypes.CDLL(None)
if libc.vfork() == 0:
    libc.pause()
"""
"""As for a disk: its state is D."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "LOOK_S", 0.01)


@contextmanager
def running(code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True) as process:
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


async def waited(code: str, cpu_s: float = 60.0) -> str:
    with running(code) as pid, anyio.fail_after(60):
        return await await_answer(anyio.Event(), lambda: [pid], cpu_s)


async def test_one_that_computes_is_waited_for_by_its_processor_time() -> None:
    answer = anyio.Event()
    with running(COMPUTES) as pid:

        async def later() -> None:
            while processor_seconds(pid) < 0.5:
                await anyio.sleep(0.01)
            answer.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later)
            assert await await_answer(answer, lambda: [pid], 60.0) == ""
    assert "of processor time" in await waited(COMPUTES, 0.2)


async def test_one_that_rests_or_is_stopped_is_silent() -> None:
    assert "did nothing" in await waited(RESTS)
    with running(COMPUTES) as pid:
        os.kill(pid, signal.SIGSTOP)
        assert "did nothing" in await await_answer(anyio.Event(), lambda: [pid], 60.0)


async def test_what_looks_as_if_it_waited_for_a_disk_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silence, "LONGEST_S", 0.5)
    assert await waited(WAITS_FOR_A_CHILD) == "it did not answer within 0.5 s"


async def test_one_that_has_ended_is_silent_and_an_answer_counts_at_once() -> None:
    with running("pass") as pid:
        with anyio.fail_after(60):
            assert "did nothing" in await await_answer(anyio.Event(), lambda: [pid], 60.0)
    answer = anyio.Event()
    answer.set()
    assert await await_answer(answer, lambda: [pid], 60.0) == ""


async def test_a_patient_wait_counts_what_is_computed_and_all_rest() -> None:
    with running(COMPUTES) as pid:
        before = processor_seconds(pid)
        with anyio.fail_after(60):
            await await_patiently(anyio.Event(), lambda: [pid], 0.5)
        assert 0.45 <= processor_seconds(pid) - before < 2.0  # the rest is that of slow looks
    with running(RESTS) as pid, anyio.fail_after(60):
        await await_patiently(anyio.Event(), lambda: [pid], 0.5)
    answer = anyio.Event()
    answer.set()
    await await_patiently(answer, lambda: [pid], 1e9)
