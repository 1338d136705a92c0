"""Copy bytes between files and pipes or sockets, in bursts on worker threads.

If a copy would block, the burst ends and the event loop waits for the other end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import zlib
from collections.abc import Callable

import anyio

PIPE_BYTES = 1 << 20
"""Size of a pipe in bytes, the default of /proc/sys/fs/pipe-max-size; if refused, 64 KiB."""
BURST_BYTES = 16 << 20
"""Maximum bytes that one thread copies in one burst, in some 10 ms."""
PAUSE_MS = 10
"""Milliseconds that a thread waits for the other end, which page faults may delay."""


def make_pipe() -> tuple[int, int]:
    """Return both ends of a large pipe, reader first; the caller closes them. Raises OSError."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # refused: this user has many pipes
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # type: ignore[attr-defined, unused-ignore]
    return reader, writer


async def into_pipe(file: int, pipe: int) -> None:
    """Copy the rest of a file into a pipe. Raises OSError, BrokenPipeError without a reader."""

    def burst() -> tuple[int, bool]:
        return _burst(lambda most: _splice(file, pipe, most), BURST_BYTES, pipe, select.POLLOUT)

    ended = False
    while not ended:
        await anyio.wait_writable(pipe)
        _, ended = await anyio.to_thread.run_sync(burst)


class Checksum:
    """The CRC-32 of a stream of bytes, as a guard against disk corruption.

    It runs at 2.8 GB/s on one processor; BLAKE2b reaches 0.6 and SHA-256 without special
    instructions 0.4. It detects every change within 32 bits, and misses 1 in 4 billion others.
    """

    def __init__(self) -> None:
        self._value = 0

    def add(self, data: bytes | memoryview) -> None:
        """Add bytes to the checksum."""
        self._value = zlib.crc32(data, self._value)

    def __str__(self) -> str:
        return f"{self._value:08x}"


def checksum(data: bytes) -> str:
    """Return the checksum of some bytes."""
    return f"{zlib.crc32(data):08x}"


async def checksum_of(file: int, size: int) -> str | None:
    """Return the checksum of the rest of a file; None if its size differs from `size`.

    Raises OSError.
    """
    found, room, left = Checksum(), memoryview(bytearray(PIPE_BYTES)), size
    ended = False

    def burst() -> bool:
        nonlocal left
        for _ in range(BURST_BYTES // PIPE_BYTES):
            if not (count := os.readv(file, [room])):
                return True
            left -= count
            found.add(room[:count])
        return left < 0

    while not ended:
        ended = await anyio.to_thread.run_sync(burst)
    return None if left else str(found)


async def from_pipe(pipe: int, file: int, most: int, passed: Checksum) -> int:
    """Copy up to `most` bytes to a file, adding them to `passed`; return their number.

    Raises OSError.
    """
    os.set_blocking(pipe, False)
    return await _into_file(lambda room: os.readv(pipe, [room]), pipe, file, most, passed)


async def from_socket(source: socket.socket, file: int, most: int, passed: Checksum) -> int:
    """Copy from a non-blocking socket, as `from_pipe` does."""

    def receive(room: memoryview) -> int:
        try:
            return source.recv_into(room)
        except BlockingIOError:
            raise
        except OSError:  # the sender has ended
            return 0

    return await _into_file(receive, source.fileno(), file, most, passed)


async def _into_file(
    receive: Callable[[memoryview], int], source: int, file: int, most: int, passed: Checksum
) -> int:
    room = memoryview(bytearray(min(PIPE_BYTES, max(most, 1))))
    moved, ended = 0, False

    def move(count: int) -> int:
        count = receive(room[:count])
        came = room[:count]
        passed.add(came)
        while came:
            came = came[os.write(file, came) :]
        return count

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
    """Move up to `most` bytes until `end` would block; return (number, True at the end of data)."""
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
