"""The kernel's word that it is ready, its last output, and the inspection of its sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from kernel_mcp.errors import BoundaryBroken, LaunchError
from kernel_mcp.launch import readiness
from kernel_mcp.launch.readiness import (
    BUDGET_BYTES,
    KEPT_BYTES,
    Inspector,
    ReadinessChannel,
    StderrTail,
)
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.proc import parent_of
from kernel_mcp.sandbox.confinement import (
    ExpectedConfinement,
    ObservedConfinement,
    observe,
    user_of,
)
from kernel_mcp.sandbox.select import NoSandbox

pytestmark = pytest.mark.anyio


@contextmanager
def channel() -> Iterator[tuple[ReadinessChannel, socket.socket]]:
    made = ReadinessChannel()
    with closing(made), socket.socket(fileno=made.pass_guest()) as guest:
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


class Sandbox(NoSandbox):
    """Promises a user, and what namespaces the test says."""

    namespaces: tuple[str, ...] = ()

    def expected_confinement(  # type: ignore[override]
        self, identity: Identity | None, *, forked: bool = False
    ) -> ExpectedConfinement | None:
        return ExpectedConfinement(
            user_of(identity), filters=0, namespaces=self.namespaces, inherits=False
        )


@contextmanager
def process() -> Iterator[tuple[int, int]]:
    """A process with a network namespace of its own, without new privileges, under no filter."""
    words = ["unshare", "--user", "--net", "--", "setpriv", "--no-new-privs", "--"]
    with subprocess.Popen(
        [*words, "/bin/sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE
    ) as made:
        assert made.stdout is not None
        made.stdout.readline()
        pidfd = os.pidfd_open(made.pid)
        try:
            yield made.pid, pidfd
        finally:
            made.kill()
            made.wait()
            os.close(pidfd)


def test_a_namespace_is_nobody_elses_while_its_kernel_lives() -> None:
    sandbox = Sandbox()
    sandbox.namespaces = ("net",)
    inspector = Inspector(sandbox)
    with process() as (pid, pidfd):
        first = inspector.inspect(pid, pidfd, None)
        assert "namespaces of its own: net" in first.words
        second = os.pidfd_open(pid)
        try:
            with pytest.raises(BoundaryBroken, match="shares namespaces with others: net"):
                inspector.inspect(pid, second, None)
            first.forget()
            inspector.inspect(pid, second, None)
        finally:
            os.close(second)


def test_a_number_of_a_namespace_that_is_gone_may_come_again() -> None:
    sandbox = Sandbox()
    sandbox.namespaces = ("net",)
    inspector = Inspector(sandbox)
    with process() as (pid, pidfd):
        inspector.inspect(pid, pidfd, None)
        facts = inspector._inspected[pidfd][1]
    ended = os.pidfd_open(os.getpid())
    try:
        with process() as (pid, pidfd):
            inspector._inspected = {ended: (2**22 - 1, facts)}  # nobody has this number any more
            inspector.inspect(pid, pidfd, None)
    finally:
        os.close(ended)


def test_the_servers_own_namespaces_and_those_of_the_template_are_not_the_kernels() -> None:
    sandbox = Sandbox()
    inspector = Inspector(sandbox)
    with process() as (pid, pidfd):
        sandbox.namespaces = ("net", "mnt")
        with pytest.raises(BoundaryBroken, match="with others: mnt"):
            inspector.inspect(pid, pidfd, None)
        sandbox.namespaces = ("net",)
        own = os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115
        with pytest.raises(BoundaryBroken, match="with others: net"):
            inspector.inspect(pid, pidfd, None, forked=True, others={own})


def test_a_kernel_that_has_ended_is_not_called_unconfined() -> None:
    with process() as (pid, pidfd):
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        with pytest.raises(LaunchError, match="ended right after"):
            Inspector(Sandbox()).inspect(pid, pidfd, None)


@pytest.mark.parametrize("reaps", [True, False])
def test_a_parent_may_end_while_the_namespaces_between_are_read(
    reaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "/bin/sh -c 'sleep 60 & echo $!; wait' & echo $!; " + (
        "wait" if reaps else "exec sleep 60"
    )
    with subprocess.Popen(["/bin/sh", "-c", words], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        numbers = {int(first.stdout.readline()) for _ in range(2)}
        (last,) = (pid for pid in numbers if parent_of(pid) in numbers)
        (between,) = numbers - {last}

        def read(pid: int) -> ObservedConfinement:
            if pid == between:
                os.kill(between, signal.SIGKILL)
                while parent_of(last) == between or (reaps and Path(f"/proc/{between}").exists()):
                    os.sched_yield()
            return observe(pid)

        monkeypatch.setattr(readiness, "observe", read)
        try:
            found = Inspector(Sandbox()).lineage(last)
            assert parent_of(last) != between
            assert reaps or found == observe(first.pid).held
        finally:
            os.kill(last, signal.SIGKILL)
            first.kill()


def test_a_kernel_without_parents_has_ended() -> None:
    with process() as (pid, _):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with pytest.raises(LaunchError, match="ended right after"):
            Inspector(Sandbox()).lineage(pid)


def test_nothing_is_looked_at_where_nothing_is_promised() -> None:
    assert "nothing was promised" in Inspector(NoSandbox()).inspect(1, -1, None).words[0]


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


async def test_output_is_heard_as_it_is_read(pipe: Pipe) -> None:
    heard: list[bytes] = []
    pipe.tail.heard = heard.append
    for piece in (b"\xc3", b"\xa9\n"):
        os.write(pipe.write_end, piece)
        pipe.tail.drain()
    assert heard == [b"\xc3", b"\xa9\n"]


async def test_the_end_of_output_closes_the_descriptor() -> None:
    read, write = os.pipe()
    tail = StderrTail(read, asyncio.get_running_loop())
    os.close(write)
    tail.drain()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    tail.close()
