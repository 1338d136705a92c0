"""The kernel's word that it is ready."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import anyio
import pytest

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.readiness import ReadinessChannel

pytestmark = pytest.mark.anyio


@contextmanager
def channel() -> Iterator[tuple[ReadinessChannel, socket.socket]]:
    made = ReadinessChannel()
    with closing(made), socket.socket(fileno=made.guest_fd) as guest:
        yield made, guest


async def test_the_system_tells_who_is_ready_whatever_the_message_says() -> None:
    with channel() as (made, guest), anyio.fail_after(60):
        guest.send(json.dumps({"ready": True, "pid": 1}).encode())
        assert await made.wait() == os.getpid()


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (b'{"ready": false, "error": "no memory"}', "could not start: no memory"),
        (b'{"ready": "yes"}', "could not start"),
        (b"[1]", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 5000, "not JSON"),
    ],
)
async def test_anything_but_ready_is_a_failure(packet: bytes, words: str) -> None:
    with channel() as (made, guest), anyio.fail_after(60):
        guest.send(packet)
        with pytest.raises(LaunchError, match=words):
            await made.wait()


async def test_a_closed_end_is_a_failure() -> None:
    with channel() as (made, guest), anyio.fail_after(60):
        guest.shutdown(socket.SHUT_RDWR)
        with pytest.raises(LaunchError, match="ended before it was ready"):
            await made.wait()


async def test_a_long_error_is_cut() -> None:
    with channel() as (made, guest), anyio.fail_after(60):
        guest.send(json.dumps({"ready": False, "error": "x" * 50_000}).encode())
        with pytest.raises(LaunchError) as failure:
            await made.wait()
    assert len(str(failure.value)) < 2100
