"""The host's side of one copy of a kernel, with a test at the other end that says what it likes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch import checkpoint, silence
from kernel_mcp.launch.base import hold_little
from kernel_mcp.launch.checkpoint import Checkpoint, is_end

pytestmark = [pytest.mark.anyio]

PARKED: dict[str, Any] = {"parked": True}


@dataclass
class Copy:
    """A process that stands for the copy, the socket that it got, and what the server was told.

    Linux says of each packet that the test has sent it.
    """

    process: subprocess.Popen[bytes]
    control_socket: socket.socket
    theirs: socket.socket
    gone: list[Checkpoint] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    known: bool = True
    checkpoint: Checkpoint | None = None
    end: socket.socket | None = None

    def admit(self, pid: int) -> int:
        self.asked.append(pid)
        if not self.known:
            raise LaunchError("it is not of this sandbox")
        return os.pidfd_open(self.process.pid)

    def begin(self) -> Checkpoint:
        made = self.checkpoint = Checkpoint(self.admit, self.gone.append)
        made.send_park_socket(self.control_socket)
        _, (fd,), _, _ = socket.recv_fds(self.theirs, 1000, 1)
        self.end = socket.socket(fileno=fd)
        return made

    def say(self, content: Any) -> None:
        assert self.end is not None
        self.end.send(content if isinstance(content, bytes) else json.dumps(content).encode())

    def hear(self) -> tuple[dict[str, Any], list[int]]:
        assert self.end is not None
        said, fds, _, _ = socket.recv_fds(self.end, 10_000, 8)
        return json.loads(said), list(fds)


@pytest.fixture
def copy() -> Iterator[Copy]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with subprocess.Popen(["sleep", "1000"]) as process, ours, theirs:
        found = Copy(process, ours, theirs)
        yield found
        if found.checkpoint is not None:
            found.checkpoint.close()
        if found.end is not None:
            found.end.close()
        process.kill()


async def refused(made: Checkpoint) -> str:
    with anyio.fail_after(60):
        while not made.refusal:
            await anyio.lowlevel.checkpoint()
    return made.refusal


NONSENSE: tuple[Any, ...] = (
    *(b"x" * 60_000, b"\xff", b"[" * 50_000, b"1" * 5000, [], "parked", {}, {"parked": 2}),
    *({"parked": True, "more": 1}, {"alive": 1}, {"alive": "1"}, {"alive": [1]}, {"alive": True}),
    *({"ended": 1, "status": 0}, {"error": "x"}, {"alive": 10**400}, {"alive": 1, "closed": []}),
)


@pytest.mark.parametrize("content", NONSENSE, ids=lambda content: repr(content)[:30])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
async def test_what_was_not_asked_for_ends_a_copy(copy: Copy, content: Any, first: bool) -> None:
    made = copy.begin()
    if not first:
        copy.say(PARKED)
        await made.suspended(60)
    copy.say(content)
    assert await refused(made)
    assert not made.usable
    assert copy.gone == ([] if first else [made])
    assert not made.died
    if not first:
        assert copy.process.wait(60) == -signal.SIGKILL


async def test_a_copy_says_once_that_it_waits(copy: Copy) -> None:
    made = copy.begin()
    copy.say(PARKED)
    await made.suspended(60)
    copy.say(PARKED)
    assert "what nobody had asked for" in await refused(made)
    assert copy.asked == [os.getpid()]
    assert copy.gone == [made]


async def test_a_process_of_elsewhere_is_no_copy_and_is_not_touched(copy: Copy) -> None:
    made, copy.known = copy.begin(), False
    copy.say(PARKED)
    with pytest.raises(LaunchError, match="what nobody had asked for"):
        await made.suspended(60)
    assert copy.process.poll() is None


async def test_a_copy_that_dies_is_told_to_have_died(copy: Copy) -> None:
    made = copy.begin()
    copy.say(PARKED)
    await made.suspended(60)
    copy.process.kill()
    assert await refused(made) == "its process has ended"
    assert (copy.gone, made.died) == ([made], True)


async def test_one_that_is_closed_tells_nobody(copy: Copy) -> None:
    made = copy.begin()
    copy.say(PARKED)
    await made.suspended(60)
    made.close()
    assert copy.process.wait(60) == -signal.SIGKILL
    assert copy.gone == []


@pytest.mark.parametrize(
    "status", [10**40, -1, 0x7F, 0xFFFF, 0x10000, True, 0.0, "0", None, [0]], ids=str
)
async def test_an_end_that_cannot_be_is_believed_of_nobody(copy: Copy, status: Any) -> None:
    made = copy.begin()
    ends: list[int] = []
    copy.say(PARKED)
    await made.suspended(60)
    made.pid = 1  # somebody else than who is woken, as Linux says
    async with anyio.create_task_group() as tasks:

        async def wake() -> None:
            woken = await made.resume([])
            made.when_ended(woken.number, ends.append)
            os.close(woken.pidfd)

        tasks.start_soon(wake)
        with anyio.fail_after(60):
            await anyio.wait_readable(copy.end or -1)
        number = copy.hear()[0]["id"]
        copy.say({"alive": number, "closed": []})
    made.pid = os.getpid()  # it is the copy that tells of the end
    copy.say({"ended": number, "status": status})
    assert "what nobody had asked for" in await refused(made)
    assert ends == []
    assert not is_end(status)


async def test_who_is_woken_twice_is_no_copy_any_more(copy: Copy) -> None:
    made = copy.begin()
    copy.say(PARKED)
    await made.suspended(60)
    made.pid = 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.resume, [])
        with anyio.fail_after(60):
            await anyio.wait_readable(copy.end or -1)
        number = copy.hear()[0]["id"]
        copy.say({"alive": number, "closed": []})
        copy.say({"alive": number, "closed": []})
    assert "what nobody had asked for" in await refused(made)
    assert copy.gone == [made]


@pytest.mark.parametrize(
    ("code", "why"),
    [("while True: pass", "of processor time"), ("import time; time.sleep(999)", "did nothing")],
)
async def test_a_copy_has_to_wake_by_its_processor_time(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    monkeypatch.setattr(silence, "LOOK_S", 0.01)
    monkeypatch.setattr(checkpoint, "RESUME_S", 0.3)
    made = copy.begin()
    copy.say(PARKED)
    await made.suspended(60)
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as process:
        made.pid = process.pid
        with pytest.raises(LaunchError, match=f"did not become a kernel: .*{why}"):
            await made.resume([])
        process.kill()


async def test_a_kernel_that_takes_nothing_holds_few_places(copy: Copy) -> None:
    hold_little(copy.control_socket)
    made: list[Checkpoint] = []
    try:
        with suppress(LaunchError):
            while len(made) < 100:
                made.append(Checkpoint(copy.admit, copy.gone.append))
                made[-1].send_park_socket(copy.control_socket)
        assert 2 <= len(made) <= 10
    finally:
        for each in made:
            each.close()
