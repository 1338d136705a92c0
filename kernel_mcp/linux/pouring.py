"""Bytes moved between files and pipes or sockets by Linux: in worker threads, as far as they flow.

Nobody waits in a thread for the other end: what stops flowing is waited for on the event loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
from collections.abc import Callable

import anyio

PIPE_BYTES = 1 << 20
"""Size of a pipe, as /proc/sys/fs/pipe-max-size permits to all; a refusal leaves 64 KiB."""
BURST_BYTES = 16 << 20
"""What one thread moves at once, in some 10 ms."""
PAUSE_MS = 10
"""How long a thread waits for the other end, which is slower by page faults."""


def make_pipe() -> tuple[int, int]:
    """Both ends of a large pipe, to be closed by the caller. Raises OSError."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # this user has many pipes
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # type: ignore[attr-defined, unused-ignore]
    return reader, writer


async def into_pipe(file: int, pipe: int) -> None:
    """Move what follows in a file. Raises OSError, BrokenPipeError when nobody reads it."""

    def burst() -> tuple[int, bool]:
        return _burst(lambda most: _splice(file, pipe, most), BURST_BYTES, pipe, select.POLLOUT)

    ended = False
    while not ended:
        await anyio.wait_writable(pipe)
        _, ended = await anyio.to_thread.run_sync(burst)


async def from_pipe(pipe: int, file: int, most: int) -> int:
    """Move up to `most` bytes to a file, and return how many came. Raises OSError."""
    return await _into_file(lambda count: _splice(pipe, file, count), pipe, most)


async def from_socket(source: socket.socket, file: int, most: int) -> int:
    """As `from_pipe`, from a socket that does not block."""
    room = memoryview(bytearray(min(PIPE_BYTES, max(most, 1))))

    def move(count: int) -> int:
        try:
            count = source.recv_into(room[:count])
        except BlockingIOError:
            raise
        except OSError:  # who sends has ended
            return 0
        came = room[:count]
        while came:
            came = came[os.write(file, came) :]
        return count

    return await _into_file(move, source.fileno(), most)


async def _into_file(move: Callable[[int], int], source: int, most: int) -> int:
    moved, ended = 0, False

    def burst() -> tuple[int, bool]:
        return _burst(move, min(BURST_BYTES, most - moved), source, select.POLLIN)

    while moved < most and not ended:
        await anyio.wait_readable(source)
        count, ended = await anyio.to_thread.run_sync(burst)
        moved += count
    return moved


def _splice(source: int, target: int, most: int) -> int:
    return os.splice(source, target, min(most, PIPE_BYTES), flags=os.SPLICE_F_NONBLOCK)


def _burst(move: Callable[[int], int], most: int, end: int, event: int) -> tuple[int, bool]:
    """Move up to `most` bytes until that stops at `end`; how many, and whether that was the end."""
    moved = 0
    poller = select.poll()
    poller.register(end, event)
    while moved < most:
        try:
            count = move(most - moved)
        except BlockingIOError:
            if not poller.poll(PAUSE_MS):
                break
            continue
        if not count:
            return moved, True
        moved += count
    return moved, False
