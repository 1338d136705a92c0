"""The contract of kernel processes, however they were started: a test for each way."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.linux.proc import Usage, parent_of
from tests.integration.landlock_kernel import Cell, Notebook

Begin = Callable[[], AbstractAsyncContextManager[Notebook]]
PATIENCE_S = 60


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that nothing announces."""
    with anyio.fail_after(PATIENCE_S):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def interrupted(book: Notebook, code: str, ready: Callable[[], bool]) -> Cell:
    """Run a cell that does not end by itself, and interrupt it once it is where it should be."""
    ended: list[Cell] = []

    async def run() -> None:
        ended.append(await book.run(f"open('there', 'w').close()\n{code}\nwhile True: pass"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await until(lambda: (book.workspace / "there").exists() and ready())
        book.handle.interrupt()
    (book.workspace / "there").unlink()
    return ended[0]


async def an_interrupt_ends_a_cell_and_nothing_else(begin: Begin) -> None:
    async with begin() as book:
        await book.run("kept = 'kept'")
        cell = await interrupted(book, "", lambda: True)
        assert cell.error.startswith("KeyboardInterrupt")
        assert (await book.run("print(kept)")).text == "kept\n"


async def a_kernel_that_has_stopped_itself_is_continued_and_interrupted(begin: Begin) -> None:
    async with begin() as book:
        assert not book.handle.stopped
        stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
        cell = await interrupted(book, stop, lambda: book.handle.stopped)
        assert cell.error.startswith("KeyboardInterrupt")
        assert not book.handle.stopped
        assert (await book.run("print('on')")).text == "on\n"


async def a_kill_is_final_and_may_be_repeated(begin: Begin) -> None:
    async with begin() as book:
        await book.run("import subprocess; subprocess.Popen(['sleep', '600'])")
        os.kill(book.handle.pid, signal.SIGSTOP)
        book.handle.kill()
        with anyio.fail_after(PATIENCE_S):
            assert (await book.handle.wait()).signal == signal.SIGKILL
        book.handle.kill()
        book.handle.interrupt()
        assert not book.handle.stopped


async def what_it_uses_is_told_until_its_end(begin: Begin) -> None:
    async with begin() as book:
        cell = await book.run("import os; kept = bytearray(os.urandom(1)) * 40_000_000")
        assert cell.status == "ok"
        used = book.handle.usage()
        assert used.memory_bytes > 40_000_000
        assert used.cpu_s > 0
        assert used.measured
        book.handle.kill()
        with anyio.fail_after(PATIENCE_S):
            await book.handle.wait()
        assert book.handle.usage() == Usage()


async def a_death_is_told_as_it_was(begin: Begin) -> None:
    async with begin() as book:
        cell = await book.run("import os; os._exit(3)")
        assert cell.status is None
        with anyio.fail_after(PATIENCE_S):
            assert (await book.handle.wait()).code == 3
        book.handle.interrupt()
    async with begin() as book:
        await book.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        with anyio.fail_after(PATIENCE_S):
            assert (await book.handle.wait()).signal == signal.SIGSEGV


async def it_can_be_closed_twice_and_at_once(begin: Begin) -> None:
    async with begin() as book:
        pid = book.handle.pid
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(book.handle.aclose)
            tasks.start_soon(book.handle.aclose)
        assert not Path(f"/proc/{pid}").exists()
        await book.handle.aclose()
        book.handle.kill()
        book.handle.interrupt()
        assert book.handle.exit is not None


async def it_ends_although_those_who_have_to_take_note_were_stopped(begin: Begin) -> None:
    async with begin() as book:
        above = parent_of(book.handle.pid)
        if above != os.getpid():
            os.kill(above, signal.SIGSTOP)
        os.kill(book.handle.pid, signal.SIGSTOP)
        await book.handle.aclose()
        assert book.handle.exit is not None
        assert not Path(f"/proc/{book.handle.pid}").exists()


CONTRACT: tuple[Callable[[Begin], Awaitable[None]], ...] = (
    an_interrupt_ends_a_cell_and_nothing_else,
    a_kernel_that_has_stopped_itself_is_continued_and_interrupted,
    a_kill_is_final_and_may_be_repeated,
    what_it_uses_is_told_until_its_end,
    a_death_is_told_as_it_was,
    it_can_be_closed_twice_and_at_once,
    it_ends_although_those_who_have_to_take_note_were_stopped,
)


async def keeps_the_contract(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    """Check all of it, with one kernel or two each."""
    with caplog.at_level(logging.ERROR):
        for check in CONTRACT:
            await check(begin)
    assert "does not end" not in caplog.text
