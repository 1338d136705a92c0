"""Starting a command."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.spawn import Spawned, spawn
from kernel_mcp.sandbox.base import Passed, SandboxCommand


def opened() -> set[str]:
    return {link.name for link in Path("/proc/self/fd").iterdir()}


@pytest.fixture
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def passing(fd: int, program: str) -> SandboxCommand:
    return SandboxCommand(argv=[program], pass_fds=[fd], env={})


def test_the_output_of_a_command_can_be_read() -> None:
    before = opened()
    command = SandboxCommand(argv=["/bin/echo", "here"], pass_fds=[os.open("/", 0)], env={})
    process, output = spawn(command)
    with os.fdopen(output, "rb") as file:
        assert file.read() == b"here\n"
    assert process.wait() == 0
    assert opened() == before


def test_a_command_that_does_not_exist_leaves_nothing_open() -> None:
    before = opened()
    with pytest.raises(LaunchError, match="cannot start /no/such/program"):
        spawn(passing(os.open("/", os.O_PATH), "/no/such/program"))
    assert opened() == before


def test_what_it_should_inherit_is_closed_when_no_pipe_can_be_made(
    no_more_descriptors: None,
) -> None:
    before = opened()
    passed = os.open("/", os.O_PATH)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (passed + 1, hard))
    with pytest.raises(LaunchError, match=r"no file descriptors left .*try again"):
        spawn(passing(passed, "/bin/true"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    assert opened() == before


@pytest.mark.anyio
async def test_what_a_sandbox_has_begun_before_it_told_of_it_ends_with_it(tmp_path: Path) -> None:
    told, status = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    script = f"sleep 300 & echo $! > {begun}; wait"
    spawned = Spawned(SandboxCommand(["/bin/sh", "-c", script], [status], {}, status_fd=told))
    child = os.pidfd_open(int(await anyio.Path(begun).read_text()))
    try:
        spawned.kill()
        with anyio.fail_after(60):
            await spawned.gone()
            await anyio.wait_readable(child)
    finally:
        os.close(child)
        spawned.close()


DETACHED = """
import os, socket, sys
status, code = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
link, kept = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
first = os.fork()
if first == 0:
    status.close()
    link.close()
    kept.recv(1)
    kept.send(b"7")
    os._exit(0)
kept.close()
socket.send_fds(status, [b'{"child-pid": %d}\\n' % first], [link.fileno()])
if code == 0:
    link.send(b"x")
sys.exit(code)
"""


@pytest.mark.anyio
@pytest.mark.parametrize(("code", "told"), [(0, 7), (3, 3)])
async def test_a_detached_sandbox_tells_its_end_over_a_connection(code: int, told: int) -> None:
    before = opened()
    with Passed() as passed:
        status_fd, status = passed.link()
        command = SandboxCommand(
            [sys.executable, "-I", "-S", "-c", DETACHED, status, str(code)],
            passed.keep(),
            {},
            status_fd=status_fd,
            detached=True,
        )
    ended = anyio.Event()
    codes: list[int | None] = []
    spawned = Spawned(command)
    started = spawned.pids

    def note(code: int | None) -> None:
        codes.append(code)
        spawned.kill()
        ended.set()

    spawned.begin(note)
    try:
        with anyio.fail_after(60):
            await ended.wait()
            await spawned.gone()
        assert codes == [told]
        assert spawned.pids
        assert not set(spawned.pids) & set(started)
    finally:
        spawned.close()
    await anyio.lowlevel.checkpoint()
    assert opened() == before
