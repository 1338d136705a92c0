"""A template's process and its protocol, with small scripts in the template's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch import silence
from kernel_mcp.launch.process import ConfinedProcess
from kernel_mcp.launch.readiness import StderrTail
from kernel_mcp.launch.spawn import spawn
from kernel_mcp.launch.template import process as template_process
from kernel_mcp.launch.template.forked import Forked
from kernel_mcp.launch.template.process import StageOver, TemplateError, TemplateProcess
from kernel_mcp.sandbox.base import SandboxCommand
from kernel_specs.template import packets

pytestmark = pytest.mark.anyio

PRELUDE = f"""
import os, signal, socket, sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from kernel_specs import linux
from kernel_specs.template import packets
control = socket.socket(fileno=int(sys.argv[1]))
def tell(fds=(), **message):
    packets.send(control, message, fds)
def ready(**missing):
    tell(op="ready", stage=1, missing=missing, left=0)
def hear():
    received = packets.receive(control)
    if received is None:
        sys.exit(0)
    linux.close_all(received[1])
    return received[0]
def sleeper():
    pid = os.fork()
    if pid == 0:
        control.close()
        signal.pause()
    return pid, os.pidfd_open(pid)
start = hear()
"""
FORK = """
ready()
request = hear()
(init, init_fd), (kernel, kernel_fd) = sleeper(), sleeper()
tell([init_fd, kernel_fd], op="forked", id=request["id"], stage=1)
os.waitpid(init, 0)
os.kill(kernel, signal.SIGKILL)
tell(op="exit", id=request["id"], status=os.waitpid(kernel, 0)[1])
hear()
"""

Start = Callable[[str], TemplateProcess]


class Template:
    """A template made of a script, and the changes it has told."""

    def __init__(self, script: str) -> None:
        self.changes: list[bool] = []

        def command(control: int) -> SandboxCommand:
            return SandboxCommand(
                argv=[sys.executable, "-c", PRELUDE + script, str(control)],
                pass_fds=[control],
                env={},
            )

        self.process = TemplateProcess(
            command, {"greeting": "hello"}, lambda process: self.changes.append(process.usable)
        )


@asynccontextmanager
async def template(script: str) -> AsyncIterator[Template]:
    made = Template(script)
    try:
        with anyio.fail_after(60):
            yield made
    finally:
        await made.process.aclose()
    assert made.process.gone.is_set()


async def test_a_ready_template_is_usable() -> None:
    async with template("ready(a=start['greeting']); hear()") as one:
        assert one.process.alive
        assert not one.process.usable
        assert await one.process.ready()
        assert one.process.missing == {"a": "hello"}
        assert one.changes == [True]


async def test_a_template_forks_before_it_has_everything() -> None:
    script = (
        "tell(op='ready', stage=1, missing={}, left=2)\n"
        "hear()\n"
        "tell(op='ready', stage=2, missing={'a': 'why'}, left=0)\n"
        "hear()"
    )
    async with template(script) as one:
        assert await one.process.can_fork()
        assert one.process.usable
        assert (one.process.stage, one.process.whole) == (1, False)
        packets.send(one.process._control, {"go": "on"})
        assert await one.process.ready()
        assert (one.process.stage, one.process.whole) == (2, True)
        assert one.process.missing == {"a": "why"}
        assert one.changes == [True, True]


async def test_a_template_that_was_given_up_is_not_used_when_it_has_more() -> None:
    script = (
        "tell(op='ready', stage=1, missing={}, left=1)\n"
        "hear()\n"
        "tell(op='ready', stage=2, missing={}, left=0)\n"
        "tell(op='failed', id=1, error='this is the last word')\n"
        "hear()"
    )
    async with template(script) as one:
        assert await one.process.can_fork()
        one.process._stop_forking("of a test")
        assert not await one.process.ready()
        assert not one.process.alive
        assert not one.process.usable


async def test_a_request_for_a_stage_that_is_over_is_told_from_a_failure() -> None:
    script = (
        "tell(op='ready', stage=2, missing={}, left=0)\n"
        "request = hear()\n"
        "assert request['stage'] == 1\n"
        "tell(op='passed', id=request['id'])\n"
        "hear()"
    )
    async with template(script) as one:
        await one.process.ready()
        with pytest.raises(StageOver):
            await one.process.fork({}, [], stage=1)
        assert one.process.usable


async def test_a_template_that_ends_before_it_is_ready_is_told_with_its_last_words() -> None:
    async with template("print('no such module'); sys.exit(3)") as one:
        assert not await one.process.ready()
        await one.process.gone.wait()
        assert not one.process.alive
        assert one.process.output == "no such module"
        assert one.changes == [False]


async def test_a_fork_gives_processes_that_can_be_signalled_and_tells_their_end() -> None:
    async with template(FORK) as one:
        await one.process.ready()
        fork = await one.process.fork({}, [])
        read, write = os.pipe()
        os.close(write)
        process = ConfinedProcess(Forked(fork, StderrTail(read, one.process._loop)))
        assert process.exit is None
        assert process.pid > 0
        process.kill()
        assert (await process.wait()).signal == signal.SIGKILL
        await process.aclose()


async def test_a_refused_fork_is_an_error_with_the_reason() -> None:
    script = "ready()\ntell(op='failed', id=hear()['id'], error='no memory')\nhear()"
    async with template(script) as one:
        await one.process.ready()
        with pytest.raises(TemplateError, match="no memory"):
            await one.process.fork({}, [])
        assert one.process.usable


async def test_a_template_that_dies_over_a_request_is_an_error() -> None:
    async with template("ready(); hear(); os._exit(1)") as one:
        await one.process.ready()
        with pytest.raises(TemplateError, match="exited with code"):
            await one.process.fork({}, [])
        with pytest.raises(TemplateError, match="not running"):
            await one.process.fork({}, [])


async def test_a_template_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silence, "LOOK_S", 0.01)
    async with template("ready(); hear(); signal.pause()") as one:
        await one.process.ready()
        with pytest.raises(TemplateError, match="did not answer"):
            await one.process.fork({}, [])
        assert not one.process.alive


@pytest.mark.parametrize("when", ["while it loads", "when it has to fork"])
async def test_a_template_that_is_stopped_is_given_up_and_ended(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(silence, "LOOK_S", 0.01)
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    async with template(stop if when == "while it loads" else f"ready(); hear(); {stop}") as one:
        if when == "while it loads":
            assert not await one.process.can_fork()
        else:
            await one.process.ready()
            with pytest.raises(TemplateError, match="did nothing"):
                await one.process.fork({}, [])
        assert "did not answer" in one.process.reason
        await one.process.gone.wait()


async def test_a_template_that_computes_for_long_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silence, "LOOK_S", 0.001)
    script = "while time.process_time() < 0.5: pass\nready(); hear()"
    async with template(script) as one:
        assert await one.process.can_fork()


async def test_a_template_that_talks_nonsense_is_given_up() -> None:
    async with template("control.send(b'hello'); hear()") as one:
        assert not await one.process.ready()
        await one.process.gone.wait()
        assert not one.process.alive


@pytest.mark.parametrize("message", ["{}", "{'op': 'forked', 'id': 1}"], ids=["empty", "no pidfds"])
async def test_a_template_that_leaves_things_out_is_given_up(message: str) -> None:
    async with template(f"tell(**{message}); hear()") as one:
        assert not await one.process.ready()
        await one.process.gone.wait()


async def test_a_cancelled_request_ends_the_kernel_that_comes_of_it() -> None:
    script = FORK.replace("hear()\n(init", "hear(); print('asked', flush=True); hear()\n(init")
    async with template(script) as one:
        await one.process.ready()
        ended = anyio.Event()

        async def ask() -> None:
            try:
                await one.process.fork({}, [])
            finally:
                ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            while "asked" not in one.process.output:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
            packets.send(one.process._control, {"now": "fork"})
        assert ended.is_set()
        # the script has gone on to its last line: init and kernel are dead
        one.process.stop_forking()
        await one.process.gone.wait()


async def test_a_kernel_whose_zygote_ended_is_kept_and_its_template_forks_no_more() -> None:
    script = FORK.replace(
        "os.waitpid(init, 0)", "tell(op='zygote-ended', status=9 << 8)\nos.waitpid(init, 0)"
    )
    async with template(script) as one:
        await one.process.ready()
        fork = await one.process.fork({}, [])
        while one.process.usable:
            await anyio.lowlevel.checkpoint()
        assert one.process.reason == "the process of it that forks has ended: it exited with code 9"
        assert not fork.over
        assert not one.process.gone.is_set()
        signal.pidfd_send_signal(fork.init, signal.SIGKILL)
        while not fork.over:
            await anyio.lowlevel.checkpoint()
        fork.on_release()
        # with its last sandbox it ends by itself
        await one.process.gone.wait()
        assert fork.status == signal.SIGKILL
        os.close(fork.init)
        os.close(fork.kernel)


async def test_when_all_of_it_is_gone_its_kernels_are_over() -> None:
    async with template(FORK) as one:
        await one.process.ready()
        fork = await one.process.fork({}, [])
        one.process._popen.kill()
        await one.process.gone.wait()
        assert fork.over
        assert fork.status is None
        for fd in (fork.init, fork.kernel):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sys.exit(3)", "it exited with code 3"),
        ("os.kill(os.getpid(), 9)", "it was killed by SIGKILL"),
        ("tell(op='ready'); hear()", "it does not keep to the protocol: KeyError('stage')"),
        ("tell(op='zygote-ended'); hear()", "the process of it that forks has ended"),
    ],
)
async def test_a_template_tells_why_it_forks_no_more(script: str, reason: str) -> None:
    async with template(script) as one:
        assert not await one.process.ready()
        assert one.process.reason == reason


async def test_a_retired_template_without_kernels_ends() -> None:
    async with template("ready(); hear()") as one:
        await one.process.ready()
        one.process.stop_forking()
        await one.process.gone.wait()
        assert not one.process.reason


async def test_a_template_that_does_not_let_go_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "END_S", 0.05)
    async with template("ready()\nwhile True: signal.pause()") as one:
        await one.process.ready()


async def test_a_program_that_is_not_there_is_told() -> None:
    def command(control: int) -> SandboxCommand:
        return SandboxCommand(argv=["/nowhere/bwrap"], pass_fds=[control], env={})

    with pytest.raises(LaunchError, match="No such file"):
        TemplateProcess(command, {}, ignore)


async def test_one_that_ends_before_its_first_message_is_told_to_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when Ctrl-C comes while a server starts."""

    def spawned(command: SandboxCommand) -> tuple[subprocess.Popen[bytes], Any]:
        popen, output = spawn(command)
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        return popen, output

    def command(control: int) -> SandboxCommand:
        return SandboxCommand(argv=["/bin/sh", "-c", "kill -KILL $$"], pass_fds=[control], env={})

    monkeypatch.setattr(template_process, "spawn", spawned)
    with anyio.fail_after(60):
        one = TemplateProcess(command, {}, ignore)
        await one.gone.wait()
    assert one.reason == "it was killed by SIGKILL"


def ignore(_: Any) -> None:
    """Nothing follows from the change."""
