"""Kernels in real containers of podman and docker: their boundary, their life, their end."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import BoundaryBroken, LaunchError, SandboxUnavailable
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.base import SandboxRequest
from kernel_mcp.sandbox.container import ContainerSandbox
from kernel_mcp.sandbox.container.engine import LABEL
from kernel_mcp.sandbox.select import select_sandbox
from kernel_mcp.sandbox.self_test import require_boundary, run_confined, thorough_checks
from kernel_mcp.units import MIB
from tests.integration import containers
from tests.integration.bombs import QUIET
from tests.integration.kernel_contract import keeps_the_contract
from tests.integration.landlock_kernel import notebook
from tests.integration.limited_kernel import LimitedKernel, limited_kernel
from tests.integration.processes import children

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("sandbox", containers.ENGINES, indirect=True),
]
RUNTIME = [Path(sys.prefix), Path(sys.base_prefix)]


@pytest.fixture(scope="module")
def sandbox(request: pytest.FixtureRequest) -> Iterator[ContainerSandbox]:
    sandbox = containers.detect(request.param)
    yield sandbox
    gone_within(sandbox, 10)


def gone_within(sandbox: ContainerSandbox, seconds: float) -> None:
    """The engine removes a container shortly after its end, and tells nobody here."""
    until = time.monotonic() + seconds
    while containers.left(sandbox.engine) and time.monotonic() < until:
        select.select([], [], [], 0.1)
    assert containers.left(sandbox.engine) == []


@asynccontextmanager
async def kernel_in(
    sandbox: ContainerSandbox, limits: Limits | None = None, *, groups: bool = True
) -> AsyncIterator[LimitedKernel]:
    async with limited_kernel(limits, groups=groups, sandbox=sandbox) as kernel:
        yield kernel


def python(sandbox: ContainerSandbox, code: str, limits: Limits | None = None) -> str:
    done = run_confined(
        sandbox, [sys.executable, "-I", "-S", "-c", code], readonly=RUNTIME, limits=limits
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_check_of_the_self_test_passes(sandbox: ContainerSandbox) -> None:
    assert [check for check in thorough_checks(sandbox) if not check.passed] == []
    require_boundary(sandbox)


def test_it_is_chosen_by_name(sandbox: ContainerSandbox) -> None:
    options = containers.options(sandbox.engine.kind)
    assert select_sandbox("container", container=options).name == "container"


def test_an_image_that_is_not_there_is_told_with_the_command_that_builds_it(
    sandbox: ContainerSandbox,
) -> None:
    options = replace(containers.options(sandbox.engine.kind), image="nowhere")
    with pytest.raises(SandboxUnavailable, match="kernel-mcp image build --engine"):
        select_sandbox("container", container=options)


def test_input_output_and_exit_code_go_through(sandbox: ContainerSandbox) -> None:
    done = run_confined(sandbox, ["/bin/sh", "-c", "cat; echo no >&2; exit 3"], stdin="given")
    assert (done.stdout, done.stderr, done.returncode) == ("given", "no\n", 3)
    killed = run_confined(sandbox, ["/bin/sh", "-c", "kill -9 $$"])
    assert killed.returncode == 128 + signal.SIGKILL


def test_inherited_descriptors_keep_their_numbers(
    sandbox: ContainerSandbox, tmp_path: Path
) -> None:
    read, write = os.pipe()
    numbers = [fcntl.fcntl(write, fcntl.F_DUPFD, low) for low in (601, 600, 512, 8)]
    os.close(write)
    identity = sandbox.identity(tmp_path)
    assert identity is not None
    os.chown(tmp_path, identity.uid, identity.gid)
    say = "; ".join(f"os.write({number}, b'{number} ')" for number in numbers)
    listed = "print(sorted(map(int, os.listdir('/proc/self/fd'))))"
    command = sandbox.command(
        SandboxRequest(
            argv=[sys.executable, "-I", "-S", "-c", f"import os; {say}; {listed}"],
            env={},
            workspace=tmp_path,
            sockets=tmp_path,
            readonly=RUNTIME,
            limits=Limits(),
            inherit=numbers,
        ),
        identity,
    )
    try:
        done = subprocess.run(
            command.argv,
            env=command.env,
            pass_fds=command.pass_fds,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        command.close_passed()
        os.close(command.status_fd)
        sandbox.release(identity)
    with open(read) as file:
        assert file.read().split() == list(map(str, numbers))
    # beside them the standard ones, and the one that lists the folder
    assert set(json.loads(done.stdout)) == {0, 1, 2, 3, *numbers}, done.stderr


def test_the_environment_is_the_one_that_was_asked_for(
    sandbox: ContainerSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "hunter2")
    found = json.loads(python(sandbox, "import json, os; print(json.dumps(dict(os.environ)))"))
    assert found == {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


def test_the_users_and_names_of_the_host_are_unknown(sandbox: ContainerSandbox) -> None:
    names = "import pwd, grp; print([e.pw_name for e in pwd.getpwall()])"
    assert python(sandbox, names) == "['root', 'kernel', 'nobody']"
    assert python(sandbox, "print(open('/etc/resolv.conf').read())") == ""
    seen = python(sandbox, "print(open('/etc/hosts').read(), open('/proc/1/cmdline').read())")
    assert os.uname().nodename not in seen


def test_only_scratch_workspace_and_sockets_are_writable(sandbox: ContainerSandbox) -> None:
    search = (
        "import os\nfound = []\n"
        "for folder, below, _ in os.walk('/'):\n"
        "    below[:] = [b for b in below if folder != '/' or b not in ('proc', 'usr')]\n"
        "    if os.access(folder, os.W_OK): found.append(folder)\n"
        "print(*sorted(found))"
    )
    found = set(python(sandbox, search).split())
    assert found == {"/dev/mqueue", "/dev/shm", "/run/kernel", "/tmp", "/workspace"}


def test_scratch_space_ends_at_its_limit(sandbox: ContainerSandbox) -> None:
    fill = (
        "import errno, os\nfor folder in ('/tmp', '/dev/shm'):\n"
        "    written = 0\n    try:\n        with open(folder + '/x', 'wb') as file:\n"
        "            while True: written += file.write(bytes(2**20)); file.flush()\n"
        "    except OSError as error: print(errno.errorcode[error.errno], written // 2**20)\n"
        "    os.truncate(folder + '/x', 0)"
    )
    limits = replace(Limits(), tmp_bytes=8 * MIB)
    assert python(sandbox, fill, limits) == "ENOSPC 8\nENOSPC 8"


def test_the_first_process_is_closed_to_the_kernel(sandbox: ContainerSandbox) -> None:
    touch = (
        "import os\nfor name in ('mem', 'environ', 'fd', 'root'):\n"
        "    try:\n"
        "        os.listdir('/proc/1/' + name) if name in ('fd', 'root') else "
        "open('/proc/1/' + name, 'rb').read(1)\n"
        "        print('read', name)\n"
        "    except OSError: pass\n"
        "os.kill(1, 9); os.kill(1, 17); os.kill(1, 19); print('alive')"
    )
    assert python(sandbox, touch) == "alive"


def test_a_path_that_cannot_be_mounted_is_refused(
    sandbox: ContainerSandbox, tmp_path: Path
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("gone", "with,comma"):
        folder = tmp_path / name
        if name != "gone":
            folder.mkdir()
        request = SandboxRequest(
            argv=["/bin/true"],
            env={},
            workspace=tmp_path,
            sockets=tmp_path,
            readonly=[folder],
            limits=Limits(),
        )
        with pytest.raises(LaunchError):
            sandbox.command(request, sandbox.identity(tmp_path))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2  # the reserved user ids


def test_an_engine_that_fails_is_quoted(sandbox: ContainerSandbox) -> None:
    broken = ContainerSandbox.detect(containers.options(sandbox.engine.kind))
    broken.image = "no-such-image"
    done = run_confined(broken, ["/bin/true"])
    assert done.returncode == 125
    assert "no-such-image" in done.stderr


def test_a_runtime_that_is_not_there_is_quoted(sandbox: ContainerSandbox) -> None:
    options = replace(containers.options(sandbox.engine.kind), runtime="no-such-runtime")
    with pytest.raises(SandboxUnavailable, match="no-such-runtime"):
        select_sandbox("container", container=options)


def test_the_report_names_engine_and_gaps(sandbox: ContainerSandbox) -> None:
    report = sandbox.report()
    assert any(sandbox.engine.kind in line for line in report.enforced)
    assert any("kernel exploit" in gap for gap in report.gaps)


async def test_a_kernel_computes_is_interrupted_and_goes_on(sandbox: ContainerSandbox) -> None:
    async with kernel_in(sandbox) as kernel:
        assert (await kernel.run("x = 6 * 7; print(x)")).text == "42\n"
        await kernel.run("from pathlib import Path; Path('made').write_text('here')")
        assert (kernel.workspace / "made").read_text() == "here"
        hang = await kernel.run("while True: pass", timeout=0.5, grace=60)
        assert hang.status == "timeout"
        assert (await kernel.run("print(x)")).text == "42\n"
        pool = (
            "import multiprocessing as m\n"
            "with m.get_context('fork').Pool(2) as p: print(p.map(abs, [-1, -2]))"
        )
        assert (await kernel.run(pool)).text == "[1, 2]\n"
        assert kernel.handle.usage().memory_bytes > 10 * MIB
    assert kernel.handle.exit is not None


async def test_a_running_container_has_no_process_of_ours_beside_it(
    sandbox: ContainerSandbox,
) -> None:
    async with kernel_in(sandbox) as kernel:
        first = kernel.handle.process.pids[0]
        assert "enter.py" in Path(f"/proc/{first}/cmdline").read_text()
        beside = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children(os.getpid())]
        assert [words for words in beside if "shim" in words] == []
        os.kill(first, signal.SIGKILL)
        with anyio.fail_after(60):
            ended = await kernel.handle.wait()
        assert ended.signal == signal.SIGKILL


async def test_the_process_of_a_kernel_keeps_the_contract_of_all(
    sandbox: ContainerSandbox, caplog: pytest.LogCaptureFixture
) -> None:
    with RunDirectory.create() as runs:
        await keeps_the_contract(lambda: notebook(runs, sandbox=sandbox), caplog)


@pytest.mark.parametrize("groups", [True, False])
async def test_too_much_memory_is_an_error_of_the_cell(
    sandbox: ContainerSandbox, groups: bool
) -> None:
    async with kernel_in(sandbox, Limits(memory_bytes=512 * MIB), groups=groups) as kernel:
        assert "MemoryError" in (await kernel.run("x = bytearray(2 ** 31)")).text
        assert (await kernel.run("print('still here')")).text == "still here\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(7)", "exited with code 7"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    ],
)
async def test_the_way_a_kernel_ended_is_told(
    sandbox: ContainerSandbox, code: str, words: str
) -> None:
    async with kernel_in(sandbox) as kernel:
        await kernel.run(f"print('last words', flush=True)\n{code}")
        with anyio.fail_after(60):
            assert words in (await kernel.handle.wait()).describe()
        assert kernel.handle.unreceived(0) == "last words\n"


async def test_a_kill_ends_every_process_of_the_container(sandbox: ContainerSandbox) -> None:
    async with kernel_in(sandbox) as kernel:
        begun = await kernel.run(
            f"{QUIET}import os, time\n"
            "if os.fork() == 0:\n    os.setsid(); time.sleep(600)\nprint('begun')"
        )
        assert begun.text == "begun\n"
        with anyio.fail_after(60):
            kernel.handle.kill()
            assert (await kernel.handle.wait()).signal == signal.SIGKILL
    gone_within(sandbox, 10)


@pytest.mark.parametrize("delay", [0.02, 0.1, 0.2, 0.3])
async def test_a_start_that_is_given_up_leaves_no_container(
    sandbox: ContainerSandbox, delay: float
) -> None:
    with anyio.move_on_after(delay):
        async with kernel_in(sandbox):
            pass
    gone_within(sandbox, 10)


SLOW_RUNTIME = """#!/bin/sh
case " $* " in *" start "*) echo > {0}/reached; read go < {0}/go;; esac
exec {1} "$@"
"""


async def test_a_start_that_is_given_up_between_making_and_starting_leaves_no_container(
    sandbox: ContainerSandbox, tmp_path: Path
) -> None:
    options = containers.options(sandbox.engine.kind)
    runtime = shutil.which(options.runtime)
    if runtime is None:
        pytest.skip("docker takes no program in the place of its runtime")
    for name in ("reached", "go"):
        os.mkfifo(tmp_path / name)
    slow = tmp_path / "runtime"
    slow.write_text(SLOW_RUNTIME.format(tmp_path, runtime))
    slow.chmod(0o755)
    reached, go = (os.open(tmp_path / name, os.O_RDWR) for name in ("reached", "go"))
    slowly = ContainerSandbox.detect(replace(options, runtime=str(slow)))

    async def given_up(scope: anyio.CancelScope) -> None:
        with scope:
            async with kernel_in(slowly):
                pass

    try:
        async with anyio.create_task_group() as tasks:
            start = anyio.CancelScope()
            tasks.start_soon(given_up, start)
            with anyio.fail_after(60):
                await anyio.wait_readable(reached)
            start.cancel()
    finally:
        os.write(go, b"\n")
        gone_within(sandbox, 10)
        os.close(go)
        os.close(reached)


def test_a_server_that_is_killed_leaves_no_container(sandbox: ContainerSandbox) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, sandbox.engine.kind], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    with server:
        pid = int(server.stdout.readline())
        kernel = os.pidfd_open(pid)
        try:
            assert len(containers.left(sandbox.engine)) == 1
            server.kill()
            ended, _, _ = select.select([kernel], [], [], 2)
            assert ended
        finally:
            server.kill()  # else its container would be in the way of every later test
            os.close(kernel)
    gone_within(sandbox, 10)


async def test_a_container_that_is_open_is_ended_before_its_kernel_runs_code(
    sandbox: ContainerSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    confinement = sandbox._confinement

    def opened(user: Identity) -> list[str]:
        words = confinement(user)
        words[words.index("--network") + 1] = words[words.index("--cgroupns") + 1] = "host"
        return [word for word in words if not word.startswith("--read-only")]

    monkeypatch.setattr(sandbox, "_confinement", opened)
    with pytest.raises(BoundaryBroken) as told:
        async with kernel_in(sandbox):
            pass
    assert "it shares namespaces with others: net, cgroup" in str(told.value)
    assert "it may write to /" in str(told.value)
    gone_within(sandbox, 10)


SERVER = """
import sys
import anyio
from tests.integration import containers
from tests.integration.limited_kernel import limited_kernel

async def main():
    sandbox = containers.detect(sys.argv[1])
    async with limited_kernel(sandbox=sandbox) as kernel:
        print(kernel.handle.pid, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


def test_leftovers_of_dead_servers_are_removed_and_no_others(sandbox: ContainerSandbox) -> None:
    engine = sandbox.engine
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    dead, foreign = f"kernel-mcp-{namespace}-1-5-abcd", "kernel-mcp-1-1-5-abcd"
    for name in (dead, foreign):
        made = engine.ask("create", "--label", LABEL, "--name", name, containers.IMAGE, "/bin/true")
        assert made.returncode == 0, made.stderr
    try:
        engine.sweep()
        assert engine.ask("container", "inspect", dead).returncode != 0
        assert engine.ask("container", "inspect", foreign).returncode == 0
    finally:
        engine.ask("rm", "--force", foreign)
