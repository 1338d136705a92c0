"""Bytes flow through pipes and sockets as they are, and no thread waits for who has stopped."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import anyio
import pytest

from kernel_mcp.linux.pipes import (
    PIPE_BYTES,
    Checksum,
    checksum,
    checksum_of,
    from_pipe,
    from_socket,
    into_pipe,
    make_pipe,
)

pytestmark = [pytest.mark.anyio]

DATA = os.urandom(3 * PIPE_BYTES + 7)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    return path


def ends_of(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


async def test_a_file_goes_through_a_pipe_into_another(file: Path, tmp_path: Path) -> None:
    reader, writer = make_pipe()
    source, target = ends_of(file), ends_of(tmp_path / "copy")
    came, passed = -1, Checksum()

    async def drain() -> None:
        nonlocal came
        came = await from_pipe(reader, target, 10 * len(DATA), passed)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        await into_pipe(source, writer)
        os.close(writer)
    for fd in (reader, source, target):
        os.close(fd)
    assert came == len(DATA)
    assert str(passed) == checksum(DATA)
    assert (tmp_path / "copy").read_bytes() == DATA


async def test_no_more_is_taken_than_is_wanted(tmp_path: Path) -> None:
    reader, writer = make_pipe()
    target = ends_of(tmp_path / "copy")
    os.write(writer, b"12345")
    assert await from_pipe(reader, target, 3, Checksum()) == 3
    for fd in (reader, writer, target):
        os.close(fd)
    assert (tmp_path / "copy").read_bytes() == b"123"


async def test_a_reader_that_stops_holds_no_thread_and_one_that_ends_is_told(file: Path) -> None:
    reader, writer = make_pipe()
    source = ends_of(file)
    with anyio.move_on_after(0.2) as waited:
        await into_pipe(source, writer)
    assert waited.cancelled_caught
    free = anyio.to_thread.current_default_thread_limiter()
    assert free.borrowed_tokens == 0
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        await into_pipe(source, writer)
    os.close(writer)
    os.close(source)


async def test_what_comes_from_a_socket_is_in_the_file_until_it_ends(tmp_path: Path) -> None:
    host, guest = socket.socketpair()
    host.setblocking(False)
    target = ends_of(tmp_path / "copy")

    def send() -> None:
        with guest:
            guest.sendall(DATA)

    thread = threading.Thread(target=send)
    thread.start()
    passed = Checksum()
    assert await from_socket(host, target, 2 * len(DATA), passed) == len(DATA)
    assert str(passed) == checksum(DATA)
    thread.join()
    os.close(target)
    host.close()
    assert (tmp_path / "copy").read_bytes() == DATA


async def test_what_the_disk_does_not_take_is_told(tmp_path: Path) -> None:
    reader, writer = make_pipe()
    os.write(writer, b"data")
    (tmp_path / "copy").touch()
    unwritable = os.open(tmp_path / "copy", os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file"):
        await from_pipe(reader, unwritable, 4, Checksum())
    for fd in (reader, writer, unwritable):
        os.close(fd)


async def test_a_file_has_the_checksum_of_its_bytes_and_none_with_another_size(file: Path) -> None:
    for size, expected in ((len(DATA), checksum(DATA)), (len(DATA) + 1, None), (7, None)):
        fd = ends_of(file)
        assert await checksum_of(fd, size) == expected
        os.close(fd)
