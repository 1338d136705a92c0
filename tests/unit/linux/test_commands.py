"""Tests of programs that run to their end: none of their processes is left."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from kernel_mcp.linux.commands import output_of, running
from kernel_mcp.linux.proc import tree

pytestmark = pytest.mark.anyio
_ENOUGH_S = 60.0
"""Seconds in which a program that is given up has to be gone, on any machine."""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def _given_up(argv: list[str], *, processes: int, pass_fds: tuple[int, ...] = ()) -> None:
    """Leave a program by an error when it has so many processes, and see them gone."""
    pids: list[int] = []
    with anyio.fail_after(_ENOUGH_S):
        with suppress(ZeroDivisionError):
            async with running(argv, pass_fds=pass_fds) as process:
                while len(pids) < processes:
                    pids = list(tree(process.pid))
                    await anyio.lowlevel.checkpoint()
                raise ZeroDivisionError
        while any(map(_alive, pids)):
            await anyio.lowlevel.checkpoint()


async def test_what_a_program_has_written_and_its_code_are_told() -> None:
    done = await output_of(
        [sys.executable, "-c", "import sys; print('x' * 200_000); sys.stderr.write('why'); exit(3)"]
    )
    assert (done.code, len(done.stdout), done.stderr) == (3, 200_001, b"why")


async def test_a_program_has_the_variables_and_descriptors_it_is_given() -> None:
    read, write = os.pipe()
    try:
        done = await output_of(
            [sys.executable, "-c", f"import os; os.write({write}, os.environb[b'WORD'])"],
            env={"WORD": "told"},
            pass_fds=[write],
        )
        assert done.code == 0
        assert os.read(read, 10) == b"told"
    finally:
        os.close(read)
        os.close(write)


async def test_a_program_that_is_missing_is_an_error_of_the_system() -> None:
    with pytest.raises(FileNotFoundError):
        await output_of(["/nowhere/program"])


@pytest.mark.parametrize(
    "start",
    ["sleep 1000 & wait", "setsid sleep 1000 & wait", "(sleep 1000 & wait) & wait"],
    ids=["child", "child of a session of its own", "grandchild"],
)
async def test_a_program_given_up_leaves_no_process(start: str) -> None:
    await _given_up(["/bin/sh", "-c", start], processes=3 if "(" in start else 2)


async def test_output_that_a_grandchild_holds_open_does_not_keep_a_cancelled_call() -> None:
    with anyio.fail_after(_ENOUGH_S):
        with anyio.move_on_after(1) as scope:
            await output_of(["/bin/sh", "-c", "sleep 1000 & wait"])
    assert scope.cancelled_caught


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_a_sandbox_given_up_before_its_first_process_had_its_word_leaves_none() -> None:
    """The second process of bubblewrap waits for the first, and does not end with it yet."""
    never, held = os.pipe()
    info_read, info = os.pipe()
    try:
        await _given_up(
            [
                *("bwrap", "--unshare-all", "--unshare-user", "--new-session", "--die-with-parent"),
                *("--info-fd", str(info), "--userns-block-fd", str(never)),
                *("--ro-bind", "/", "/", "--", "sleep", "1000"),
            ],
            processes=2,
            pass_fds=(never, info),
        )
    finally:
        for each in (never, held, info_read, info):
            os.close(each)


@pytest.mark.parametrize("program", ["true", "sleep 1000"])
async def test_a_program_that_is_given_up_as_it_begins_ends_without_a_word(
    program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A program is ended and awaited even if it is cancelled while it starts."""
    begun = tmp_path / "pid"
    argv = ["/bin/sh", "-c", f"echo $$ > {begun}; {program} & {program}"]
    for steps in range(40):
        begun.unlink(missing_ok=True)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(output_of, argv)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                while steps % 2 and not (begun.exists() and begun.read_text()):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        if begun.exists() and (pid := begun.read_text()):
            with anyio.fail_after(_ENOUGH_S):
                while any(map(_alive, tree(int(pid)))):
                    await anyio.lowlevel.checkpoint()
    assert caplog.text == ""
