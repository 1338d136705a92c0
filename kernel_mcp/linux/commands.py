"""Run programs to their end; none of their processes outlives a failure or cancellation."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import Process

from kernel_mcp.linux.proc import tree
from kernel_mcp.records import dataclass

END_S = 1.0
"""Seconds to wait for the end of killed processes."""


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """The exit code of a program, and all that it wrote."""

    code: int
    stdout: bytes
    stderr: bytes


@asynccontextmanager
async def running(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    stderr: int = subprocess.STDOUT,
) -> AsyncIterator[Process]:
    """Start a program in the root folder as the leader of a process group; yield it.

    On an exception in the block, the program and all its descendants are killed, in whatever group
    they are. A descendant that holds the output open would otherwise delay the end. Raises OSError
    if the program cannot be started.
    """
    with anyio.CancelScope(shield=True):  # else asyncio kills the leader only
        process = await anyio.open_process(
            argv,
            cwd="/",
            env=env,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            umask=0o022,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    async with process:
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
            yield process
        except BaseException:
            await _end(process)
            raise


async def output_of(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> CompletedCommand:
    """Run a program to its end and return its output. Raises OSError if it cannot be started."""
    async with running(argv, env=env, pass_fds=pass_fds, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        stdout, stderr = bytearray(), bytearray()

        async def collect() -> None:
            assert process.stderr is not None
            async for piece in process.stderr:
                stderr.extend(piece)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect)
            async for piece in process.stdout:
                stdout.extend(piece)
        return CompletedCommand(await process.wait(), bytes(stdout), bytes(stderr))


async def _end(process: Process) -> None:
    """Kill a process, its group and its descendants, and wait until they have ended.

    The processes of a sandbox start one after the other. bubblewrap's second process waits for the
    first, and is tied to its end only later. So the group is stopped first, which prevents new
    processes, and then killed.

    Processes are signalled by pid or pidfd. asyncio's objects would reap the process before asyncio
    notices its end, and then log a warning.
    """
    leader = process.pid
    handles: list[int] = []
    try:
        with suppress(OSError):
            os.killpg(leader, signal.SIGSTOP)
        for pid in tree(leader):
            with suppress(OSError):
                handles.append(os.pidfd_open(pid))
        with suppress(OSError):
            os.killpg(leader, signal.SIGKILL)
        for handle in handles:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        with anyio.move_on_after(END_S, shield=True):
            for handle in handles:
                await anyio.wait_readable(handle)
            await process.wait()
    finally:
        for handle in handles:
            os.close(handle)
