"""Starting and ending processes through the launcher, with small scripts in the kernel's place."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.launch.base import KernelEnvironment, LaunchRequest
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.process import KernelProcess
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.select import NoSandbox
from tests.integration.processes import (
    children,
    descendants,
    ended,
    held,
    open_descriptors,
    running,
)

pytestmark = pytest.mark.anyio

PRELUDE = """
import json, os, resource, signal, socket, sys, threading
folder = os.path.dirname(sys.argv[sys.argv.index("-f") + 1])
boot = json.load(open(folder + "/boot.json"))
os.chdir(boot["workspace"])
limits = boot["limits"]
for kind, most in (
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_SIGPENDING, 1024),
    (resource.RLIMIT_MSGQUEUE, 256 << 10),
    (resource.RLIMIT_NPROC, limits["pids"] or -1),
    (resource.RLIMIT_NOFILE, limits["open_files"]),
    (resource.RLIMIT_FSIZE, limits["file_bytes"]),
    (resource.RLIMIT_DATA, limits["memory_bytes"] + (896 << 20)),
    (resource.RLIMIT_AS, limits["memory_bytes"] + (896 << 20)),
):
    resource.setrlimit(kind, (most, most))
try:
    os.setsid()
except PermissionError:
    pass
signal.signal(signal.SIGINT, signal.SIG_DFL)
channel = socket.socket(fileno=boot["ready_fd"])
def say(**packet):
    channel.send(json.dumps(packet).encode())
def meet(name):
    open(name, "wb").close()
def ready():
    say(ready=True, pid=os.getpid())
    channel.close()
def on_interrupt(action):
    signal.signal(signal.SIGINT, lambda *_: action())
def forever():
    while True:
        signal.pause()
"""

Launch: TypeAlias = Callable[..., Coroutine[Any, Any, KernelProcess]]


@pytest.fixture
def boot(tmp_path: Path) -> Path:
    """A folder in the place of `kernel_specs`."""
    folder = tmp_path / "specs"
    (folder / "restricted").mkdir(parents=True)
    return folder


@pytest.fixture(params=["bwrap", "none"])
def sandbox(request: pytest.FixtureRequest, boot: Path) -> Sandbox:
    return BwrapSandbox.detect(boot) if request.param == "bwrap" else NoSandbox(boot)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(Path("/tmp", f"kmt-{os.getpid()}")) as runs:
        yield runs
    runs.path.parent.rmdir()


@pytest.fixture
def launch(sandbox: Sandbox, runs: RunDirectory, boot: Path, workspace: Path) -> Launch:
    async def launch(
        script: str, *, timeout: float = 20, python: str = sys.executable
    ) -> KernelProcess:
        (boot / "restricted" / "boot.py").write_text(PRELUDE + script)
        launcher = LocalLauncher(KernelAssembly(sandbox, runs), start_timeout_s=timeout)
        return await launcher.launch(
            LaunchRequest(
                session="test",
                environment=KernelEnvironment(
                    python=Path(python), readonly=(Path(sys.prefix), Path(sys.base_prefix))
                ),
                policy=Policy.for_allow(()),
                limits=Limits(),
                workspace=workspace,
            )
        )

    return launch


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test here ends without a child process and with the descriptors it began with."""
    request.getfixturevalue("anyio_backend")
    descriptors = open_descriptors()
    yield
    assert children(os.getpid()) == []
    assert open_descriptors() == descriptors


def is_confined(sandbox: Sandbox) -> bool:
    return sandbox.name != "none"


async def test_a_ready_kernel_has_its_host_pid_and_ends_as_killed(
    launch: Launch, runs: RunDirectory
) -> None:
    kernel = await launch("ready(); forever()")
    assert running(kernel.pid)
    assert Path(kernel.sockets.connection.ip).parent.is_dir()
    assert kernel.sockets.connection.ip.startswith(f"{runs.path}/k/")
    assert kernel.exit is None
    kernel.kill()
    with anyio.fail_after(60):
        ended = await kernel.wait()
    assert ended.describe() == "killed by SIGKILL"
    assert kernel.exit == ended
    await kernel.aclose()
    await kernel.aclose()
    assert not running(kernel.pid)
    assert list(runs.kernels.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("on_interrupt(lambda: os._exit(3)); ready(); forever()", "exited with code 3"),
        ("ready(); forever()", "killed by SIGINT"),
        (
            "import faulthandler as f; f.enable(); on_interrupt(f._sigsegv); ready(); forever()",
            "killed by SIGSEGV (Fatal Python error: Segmentation fault)",
        ),
    ],
    ids=["exit", "signal", "crash"],
)
async def test_the_way_a_kernel_ended_is_told(launch: Launch, script: str, words: str) -> None:
    kernel = await launch(script)
    kernel.interrupt()
    with anyio.fail_after(60):
        assert (await kernel.wait()).describe() == words
    await kernel.aclose()


async def test_a_failing_boot_is_told_with_its_last_words(
    launch: Launch, runs: RunDirectory
) -> None:
    with pytest.raises(LaunchError) as failure:
        await launch("print('library missing', file=sys.stderr); sys.exit(70)")
    assert "exited with code 70" in str(failure.value)
    assert "library missing" in str(failure.value)
    assert list(runs.kernels.iterdir()) == []


async def test_a_boot_that_says_what_failed_is_quoted(launch: Launch) -> None:
    with pytest.raises(LaunchError, match="could not start: no ipykernel here"):
        await launch("say(ready=False, error='no ipykernel here'); sys.exit(70)")


async def test_a_readiness_message_that_is_not_json_is_refused(launch: Launch) -> None:
    with pytest.raises(LaunchError, match="not JSON"):
        await launch("channel.send(b'hello'); forever()")


async def test_a_boot_that_never_gets_ready_is_ended(launch: Launch, runs: RunDirectory) -> None:
    with pytest.raises(LaunchError, match=r"not ready after 0\.5 s"):
        await launch("signal.signal(signal.SIGTERM, signal.SIG_IGN); forever()", timeout=0.5)
    assert list(runs.kernels.iterdir()) == []


async def test_an_interpreter_that_is_not_there_is_told(launch: Launch) -> None:
    with pytest.raises(LaunchError, match="No such file"):
        await launch("ready()", python="/usr/bin/python-that-is-not-there")


async def test_a_workspace_that_is_not_there_is_told(launch: Launch, workspace: Path) -> None:
    workspace.rmdir()
    with pytest.raises(LaunchError, match="a file or folder that it needs has been removed"):
        await launch("ready()")


async def test_a_cancelled_launch_leaves_no_process_and_no_folder(
    launch: Launch, runs: RunDirectory, workspace: Path
) -> None:
    os.mkfifo(workspace / "here")
    started: list[int] = []
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(launch, "meet('here'); forever()")
            await anyio.to_thread.run_sync((workspace / "here").read_bytes)
            started = descendants(os.getpid())
            tasks.cancel_scope.cancel()
    assert started
    assert not any(running(pid) for pid in started)
    assert list(runs.kernels.iterdir()) == []


async def test_readiness_from_another_process_than_the_kernel_is_refused(launch: Launch) -> None:
    with pytest.raises(LaunchError, match="not the one that was started"):
        await launch("os.fork() == 0 and ready(); forever()")


async def test_an_interrupt_reaches_the_group_of_the_kernel(
    launch: Launch, workspace: Path
) -> None:
    os.mkfifo(workspace / "child")
    kernel = await launch(
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    on_interrupt(lambda: (meet('child'), os._exit(0)))\n"
        "    os.write(write, b'x'); forever()\n"
        "os.read(read, 1)\n"
        "on_interrupt(lambda: (os.wait(), os._exit(42)))\n"
        "ready(); forever()"
    )
    kernel.interrupt()
    with anyio.fail_after(60):
        await anyio.to_thread.run_sync((workspace / "child").read_bytes)
        assert (await kernel.wait()).code == 42
    kernel.interrupt()
    kernel.kill()
    await kernel.aclose()


async def test_what_a_kernel_leaves_running_ends_with_it(
    launch: Launch, sandbox: Sandbox, workspace: Path
) -> None:
    os.mkfifo(workspace / "here")
    leave = "os.setsid(); " if is_confined(sandbox) else ""
    kernel = await launch(
        f"if os.fork() == 0:\n    {leave}meet('here'); forever()\n"
        "ready(); threading.Event().wait(); os._exit(0)"
    )
    with anyio.fail_after(60):
        await anyio.to_thread.run_sync((workspace / "here").read_bytes)
        started = held(descendants(os.getpid()))
        os.kill(kernel.pid, signal.SIGTERM)
        assert (await kernel.wait()).signal == signal.SIGTERM
    await kernel.aclose()
    assert len(started) >= 2
    await ended(started)


async def test_a_flood_on_standard_output_keeps_only_its_end(launch: Launch) -> None:
    with pytest.raises(LaunchError) as failure:
        await launch(
            "for _ in range(3000): os.write(1, b'x' * 1024)\n"
            "os.write(1, b'\\x1b[31mthe end\\x00'); sys.exit(1)"
        )
    assert len(str(failure.value)) < 20_000
    assert str(failure.value).endswith("[31mthe end")


async def test_a_server_that_is_killed_leaves_no_process(
    sandbox: Sandbox, tmp_path: Path, boot: Path, workspace: Path
) -> None:
    # without a sandbox only the kernel itself is tied to the server
    child = "os.fork() == 0 and (os.setsid(), forever())\n" if is_confined(sandbox) else ""
    (boot / "restricted" / "boot.py").write_text(f"{PRELUDE}{child}ready(); forever()")
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, sandbox.name, boot, workspace, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    with server, anyio.fail_after(60):
        await anyio.to_thread.run_sync(server.stdout.readline)
        started = held(descendants(server.pid))
        assert started
        server.kill()
        await ended(started)


SERVER = """
import sys, anyio
from pathlib import Path
from kernel_mcp.launch.base import KernelEnvironment, LaunchRequest
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.select import NoSandbox
from kernel_mcp.config.settings import Limits

async def main(name, boot, workspace, base):
    sandbox = {"bwrap": BwrapSandbox.detect, "none": NoSandbox}[name](Path(boot))
    environment = KernelEnvironment(
        python=Path(sys.executable), readonly=(Path(sys.prefix), Path(sys.base_prefix))
    )
    with RunDirectory.create(Path(base) / "b") as runs:
        await LocalLauncher(KernelAssembly(sandbox, runs)).launch(
            LaunchRequest("s", environment, Policy.for_allow(()), Limits(), Path(workspace))
        )
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main, *sys.argv[1:])
"""


@pytest.mark.parametrize("sandbox", ["bwrap"], indirect=True)
async def test_a_server_that_is_process_1_reaps_the_sandbox_of_a_kernel_that_ended(
    launch: Launch,
) -> None:
    prctl, set_subreaper = ctypes.CDLL(None).prctl, 36
    kernel = await launch("on_interrupt(lambda: os._exit(0)); ready(); forever()")
    prctl(set_subreaper, 1, 0, 0, 0)
    try:
        kernel.interrupt()
        with anyio.fail_after(60):
            await kernel.wait()
        await kernel.aclose()
    finally:
        prctl(set_subreaper, 0, 0, 0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only a root server has user ids to give")
@pytest.mark.parametrize("sandbox", ["bwrap"], indirect=True)
async def test_a_workspace_goes_to_the_kernels_user_and_keeps_it(
    launch: Launch, workspace: Path
) -> None:
    (workspace / "sub").mkdir()
    (workspace / "sub" / "file").touch()

    async def user() -> int:
        kernel = await launch("open('made', 'w').close(); ready(); forever()")
        found = Path(f"/proc/{kernel.pid}").stat().st_uid
        assert workspace.stat().st_uid == found
        assert (workspace / "sub" / "file").stat().st_uid == found
        assert (workspace / "made").stat().st_uid == found
        await kernel.aclose()
        return found

    given = await user()
    assert given >= 1000
    kept = given + 5000  # what other servers of this machine take are the first ones
    for path in (workspace, *workspace.rglob("*")):
        os.chown(path, kept, kept)
    assert await user() == kept


@pytest.mark.skipif(os.geteuid() != 0, reason="an unprivileged server shares its user")
@pytest.mark.parametrize("sandbox", ["bwrap"], indirect=True)
async def test_a_ready_kernel_cannot_write_beside_its_sockets(launch: Launch) -> None:
    kernel = await launch(
        "def fill():\n"
        "    try:\n        open(folder + '/filler', 'w')\n"
        "    except PermissionError:\n        os._exit(7)\n"
        "on_interrupt(fill); ready(); forever()"
    )
    kernel.interrupt()
    with anyio.fail_after(60):
        assert (await kernel.wait()).code == 7
    await kernel.aclose()


@pytest.mark.skipif(os.geteuid() != 0, reason="an unprivileged server shares its user")
@pytest.mark.parametrize("sandbox", ["bwrap"], indirect=True)
async def test_two_kernels_have_two_users(launch: Launch, workspace: Path) -> None:
    first = await launch("ready(); forever()")
    workspace.rename(workspace.with_name("other"))
    workspace.mkdir()
    second = await launch("ready(); forever()")
    users = {Path(f"/proc/{kernel.pid}").stat().st_uid for kernel in (first, second)}
    assert len(users) == 2
    assert os.geteuid() not in users
    await first.aclose()
    await second.aclose()
