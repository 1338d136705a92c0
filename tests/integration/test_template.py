"""Kernels forked from a template: real ones, as root and (in one run of this file) without it."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.config.values import MIB
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.launch.base import KernelEnvironment, KernelHandle, LaunchRequest
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.process import LaunchedKernel
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.launch.template import TemplateLauncher
from kernel_mcp.launch.template.kernel import Forked
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.output.items import Event, Stream
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_specs.template import linux
from tests.integration import everyday_files
from tests.integration.test_launch import open_descriptors, running
from tests.integration.unprivileged import REPOSITORY, as_ordinary_user

pytestmark = pytest.mark.anyio

ENVIRONMENT = KernelEnvironment(
    python=Path(sys.executable), readonly=(Path(sys.prefix), Path(sys.base_prefix))
)
OPEN = Policy.for_allow(("*",))


class Bench:
    """A launcher with a ready template, and kernels with clients."""

    def __init__(self, launcher: TemplateLauncher, runs: RunDirectory, workspaces: Path) -> None:
        self.launcher = launcher
        self.runs = runs
        self.workspaces = workspaces
        self.kernels: list[Kernel] = []

    def request(self, **changes: Any) -> LaunchRequest:
        workspace = self.workspaces / f"w{len(list(self.workspaces.iterdir()))}"
        workspace.mkdir(mode=0o700)
        values: dict[str, Any] = {
            "session": workspace.name,
            "environment": ENVIRONMENT,
            "policy": OPEN,
            "limits": Limits(),
            "workspace": workspace,
        }
        return LaunchRequest(**(values | changes))

    async def kernel(self, **changes: Any) -> Kernel:
        return await self.meet(await self.launcher.launch(self.request(**changes)))

    async def forked(self, **changes: Any) -> Kernel:
        kernel = await self.kernel(**changes)
        assert is_forked(kernel)
        return kernel

    async def meet(self, handle: KernelHandle) -> Kernel:
        kernel = Kernel(handle, environment=ENVIRONMENT, policy=OPEN)
        self.kernels.append(kernel)
        await kernel.ready(10)
        return kernel

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            for kernel in self.kernels:
                await kernel.aclose()
            await self.launcher.aclose()


def is_forked(kernel: Kernel) -> bool:
    assert isinstance(kernel.handle, LaunchedKernel)
    return isinstance(kernel.handle.process.start, Forked)


@asynccontextmanager
async def bench(preload: tuple[str, ...] = (), *, ready: bool = True) -> AsyncIterator[Bench]:
    sandbox = BwrapSandbox.detect()
    with RunDirectory.create(Path("/tmp", f"kmt-{os.getpid()}")) as runs:
        workspaces = runs.path / "w"
        workspaces.mkdir(mode=0o700)
        launcher = TemplateLauncher(
            sandbox, runs, cold=LocalLauncher(sandbox, runs), shared=(workspaces,)
        )
        made = Bench(launcher, runs, workspaces)
        try:
            if ready:
                launcher.prepare(ENVIRONMENT, preload)
                with anyio.fail_after(60):
                    assert await launcher.ready(ENVIRONMENT)
            yield made
        finally:
            await made.aclose()
    runs.path.parent.rmdir()


async def run(kernel: Kernel, code: str, status: str | None = "ok") -> str:
    """What a cell prints."""
    events: list[Event] = []
    cell = kernel.submit(code, events.append)
    with anyio.fail_after(60):
        await cell.finished.wait()
    assert cell.status == status, (cell.failure, events)
    return "".join(event.text for event in events if isinstance(event, Stream))


@pytest.fixture(autouse=True)
def nothing_is_left(anyio_backend: str) -> Iterator[None]:
    """Every test here ends without a child process and with the descriptors it began with."""
    descriptors = open_descriptors()
    yield
    assert descendants(os.getpid()) == []
    assert open_descriptors() == descriptors


async def test_a_forked_kernel_keeps_state_between_cells() -> None:
    async with bench() as b:
        kernel = await b.forked()
        await run(kernel, "x = 20")
        assert await run(kernel, "print(x + 1)") == "21\n"


async def test_a_forked_kernel_has_the_descriptors_of_a_cold_one() -> None:
    code = (
        "import os, re\n"
        "links = []\n"
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    try: links.append(re.sub(r'[0-9]+', 'N', os.readlink('/proc/self/fd/' + fd)))\n"
        "    except OSError: pass\n"
        "print(*sorted(links), sep='\\n')"
    )
    async with bench(ready=False) as b:
        cold = await b.kernel()
        assert not is_forked(cold)
        b.launcher.prepare(ENVIRONMENT)
        assert await b.launcher.ready(ENVIRONMENT)
        forked = await b.forked()
        assert await run(forked, code) == await run(cold, code)


async def test_a_forked_kernel_has_the_environment_of_a_cold_one() -> None:
    code = (
        "import os, sys, json, signal\n"
        "print(json.dumps([sorted(os.environ.items()), os.getcwd(), sys.path, sys.flags.isolated,\n"
        "    oct(os.umask(0)), os.getuid() > 0, os.getpgrp() == os.getpid(),\n"
        "    str(signal.getsignal(signal.SIGCHLD)), sys.executable, sys.argv,\n"
        "    [folder for folder, _, _ in os.walk('/tmp')]]))"
    )
    async with bench(ready=False) as b:
        cold = await b.kernel()
        b.launcher.prepare(ENVIRONMENT)
        assert await b.launcher.ready(ENVIRONMENT)
        forked = await b.forked()
        assert json.loads(await run(forked, code)) == json.loads(await run(cold, code))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(3)", "exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os; os.abort()", "killed by SIGABRT (Fatal Python error: Aborted)"),
        (
            "import faulthandler; faulthandler._sigsegv()",
            "killed by SIGSEGV (Fatal Python error: Segmentation fault)",
        ),
    ],
    ids=["exit", "kill", "abort", "crash"],
)
async def test_the_way_a_forked_kernel_ended_is_told(code: str, words: str) -> None:
    async with bench() as b:
        kernel = await b.forked()
        kernel.submit(code, lambda _event: None)
        with anyio.fail_after(60):
            assert (await kernel.handle.wait()).describe() == words


async def test_an_interrupt_stops_a_loop_and_keeps_the_state() -> None:
    async with bench() as b:
        kernel = await b.forked()
        await run(kernel, "x = 1")
        seen: list[Event] = []
        cell = kernel.submit("print('here', flush=True)\nwhile True: pass", seen.append)
        with anyio.fail_after(60):
            while not seen:
                await anyio.lowlevel.checkpoint()
            kernel.interrupt()
            await cell.finished.wait()
        assert cell.failure is not None
        assert cell.failure.name == "KeyboardInterrupt"
        assert await run(kernel, "print(x)") == "1\n"


async def test_a_killed_kernel_takes_its_processes_with_it() -> None:
    async with bench() as b:
        kernel = await b.forked()
        await run(
            kernel,
            "import subprocess, os\n"
            "one = subprocess.Popen(['/usr/bin/sleep', '300'], start_new_session=True)\n"
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    if os.fork() == 0: os.execv('/usr/bin/sleep', ['sleep', '300'])\n"
            "    os._exit(0)",
        )
        with anyio.fail_after(60):
            while b"sleep\x00300\x00" not in commands():
                await anyio.lowlevel.checkpoint()
        kernel.kill()
        with anyio.fail_after(60):
            assert (await kernel.handle.wait()).signal == signal.SIGKILL
            await kernel.aclose()
        assert b"sleep\x00300\x00" not in commands()
        other = await b.forked()
        assert await run(other, "print(1)") == "1\n"


async def test_what_a_kernel_leaves_running_ends_with_it() -> None:
    async with bench() as b:
        kernel = await b.forked()
        await run(
            kernel,
            "import subprocess\np = subprocess.Popen(['sleep', '300'], start_new_session=True)",
        )
        assert b"sleep\x00300\x00" in commands()
        kernel.submit("import os; os._exit(0)", lambda _event: None)
        with anyio.fail_after(60):
            assert (await kernel.handle.wait()).code == 0
        await kernel.aclose()
        assert b"sleep\x00300\x00" not in commands()


async def test_an_orphan_is_reaped() -> None:
    async with bench() as b:
        kernel = await b.forked()
        await run(
            kernel,
            "import os\n"
            "if os.fork() == 0:\n"
            "    if os.fork() == 0: os._exit(0)\n"
            "    os._exit(0)\n"
            "os.wait()",
        )
        code = "import os; print(sorted(n for n in os.listdir('/proc') if n.isdigit()))"
        with anyio.fail_after(60):
            while await run(kernel, code) != "['1', '2']\n":
                pass


async def test_usage_grows_with_what_the_kernel_does() -> None:
    async with bench() as b:
        kernel = await b.forked()
        before = kernel.handle.usage()
        await run(kernel, f"data = bytearray({64 * MIB}); sum(range(10**6))")
        after = kernel.handle.usage()
        assert after.memory_bytes - before.memory_bytes > 60 * MIB
        assert after.cpu_s > before.cpu_s


async def test_preloaded_modules_are_there_and_missing_ones_do_no_harm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with bench(("statistics", "no_such_module")) as b:
        kernel = await b.forked()
        assert await run(kernel, "import sys; print('statistics' in sys.modules)") == "True\n"
        assert await run(kernel, "print('statistics' in globals())") == "False\n"
    assert "no_such_module" in caplog.text


async def test_a_module_that_starts_threads_is_left_out(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "threadful.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (library / "enter.pth").write_text(f"import sys; sys.path.insert(0, {str(library)!r})\n")
    environment = clone_environment(tmp_path, library)
    async with bench(ready=False) as b:
        b.launcher.prepare(environment, ("threadful", "statistics"))
        with anyio.fail_after(60):
            assert await b.launcher.ready(environment)
        kernel = await b.forked(environment=environment)
        code = "import sys; print('threadful' in sys.modules, 'statistics' in sys.modules)"
        assert await run(kernel, code) == "False True\n"
        assert await run(kernel, "import threadful; print(1)") == "1\n"


def clone_environment(folder: Path, *paths: Path) -> KernelEnvironment:
    """An environment with what the tests run in and further folders on its path."""
    bin_folder = folder / "env" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").symlink_to(Path(sys.executable).resolve())
    (folder / "env" / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "env" / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    own = Path(sys.prefix, "lib", version, "site-packages")
    (packages / "more.pth").write_text("\n".join(map(str, (*paths, own))) + "\n")
    return KernelEnvironment(
        python=bin_folder / "python",
        readonly=(folder / "env", *paths, Path(sys.prefix), Path(sys.base_prefix)),
    )


async def test_a_runtime_below_tmp_is_visible_and_nothing_else_there(tmp_path: Path) -> None:
    if not str(tmp_path).startswith("/tmp/"):
        pytest.skip("the tests' own folder is not below /tmp")
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "of_the_runtime.py").write_text("found = 'it'\n")
    (tmp_path / "secret").write_text("secret")
    environment = clone_environment(tmp_path, tmp_path / "library")
    async with bench(ready=False) as b:
        b.launcher.prepare(environment, ())
        assert await b.launcher.ready(environment)
        kernel = await b.forked(environment=environment)
        code = "import of_the_runtime; print(of_the_runtime.found)"
        assert await run(kernel, code) == "it\n"
        code = f"import os; print(sorted(os.listdir({str(tmp_path)!r})))"
        assert await run(kernel, code) == "['env', 'library']\n"
        code = f"open({str(tmp_path / 'library' / 'x')!r}, 'w')"
        await run(kernel, code, "error")


async def test_layers_are_on_the_path_and_read_only() -> None:
    async with bench() as b:
        layer = b.workspaces / "layer"
        layer.mkdir(mode=0o755)
        (layer / "of_the_layer.py").write_text("found = 'it'\n")
        kernel = await b.forked(layers=(layer,))
        code = "import of_the_layer; print(of_the_layer.found, of_the_layer.__file__)"
        assert await run(kernel, code) == "it /packages/0/of_the_layer.py\n"
        await run(kernel, "open('/packages/0/x', 'w')", "error")


async def test_the_size_of_tmp_is_limited() -> None:
    async with bench() as b:
        kernel = await b.forked(limits=Limits(tmp_bytes=2 * MIB))
        code = (
            "for folder in ('/tmp', '/dev/shm'):\n"
            "    try: open(folder + '/x', 'wb').write(bytes(3 * 2**20))\n"
            "    except OSError as error: print(error.strerror)\n"
        )
        assert await run(kernel, code) == "No space left on device\n" * 2


TAKE_ALL = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
def count(take, enough=20_000):
    for number in range(enough):
        try:
            if take(number) < 0:
                return number
        except OSError:
            return number
    return enough
read, write = os.pipe()
if os.fork() == 0:
    signal.pthread_sigmask(signal.SIG_BLOCK, [40])
    signals = count(lambda _: libc.sigqueue(os.getpid(), 40, None))
    os.write(write, str(signals).encode())
    signal.pause()
taken = {
    'signals': int(os.read(read, 20)),
    'queues': count(lambda n: libc.mq_open(b'/q%d' % n, os.O_CREAT | os.O_RDWR, 0o600, None)),
    'terminals': count(lambda _: os.open('/dev/ptmx', os.O_RDWR)),
    'watchers': count(lambda _: libc.inotify_init1(0)),
}
print(taken)
"""


async def test_a_kernel_gets_little_of_what_linux_counts_by_user() -> None:
    async with bench() as b:
        greedy, other = await b.forked(), await b.forked()
        assert await run(greedy, TAKE_ALL) == (
            "{'signals': 1024, 'queues': 3, 'terminals': 64, 'watchers': 16}\n"
        )
        taken: dict[str, int] = ast.literal_eval(await run(other, TAKE_ALL))
        assert all(taken.values())


async def test_what_kernels_of_a_root_server_take_is_not_counted_as_the_roots() -> None:
    if os.geteuid() != 0:
        pytest.skip("there is no root")
    async with bench():
        fd = os.open(f"/proc/{process_named('kernel-template')}/ns/user", os.O_RDONLY)
        owner = bytearray(4)
        fcntl.ioctl(fd, 0xB704, owner)  # NS_GET_OWNER_UID
        os.close(fd)
        assert int.from_bytes(owner, sys.byteorder) > 60_000


async def test_siblings_draw_different_numbers_and_names() -> None:
    code = (
        "import random, uuid, tempfile, os, secrets\n"
        "print(random.random(), uuid.uuid4(), uuid.uuid1(), secrets.token_hex(4),\n"
        "      tempfile.mktemp(), sep='\\n')"
    )
    async with bench(("random", "uuid", "tempfile")) as b:
        one = (await run(await b.forked(), code)).split()
        two = (await run(await b.forked(), code)).split()
        assert len(one) == 5
        assert not set(one) & set(two)


async def test_siblings_share_no_generator_that_a_package_has_used(tmp_path: Path) -> None:
    """Libraries notice a fork by the process id; a kernel and its children are looked at."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "drawing.py").write_text(
        "import ssl\n"
        "from multiprocessing import current_process\n"
        "secret = ssl.RAND_bytes(8), current_process().authkey\n"
    )
    environment = clone_environment(tmp_path, library)
    code = (
        "import os, ssl\n"
        "from multiprocessing import current_process\n"
        "for _ in range(5):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.write(1, (ssl.RAND_bytes(8).hex() + '\\n').encode())\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "print(ssl.RAND_bytes(8).hex(), current_process().authkey.hex())"
    )
    async with bench(ready=False) as b:
        b.launcher.prepare(environment, ("drawing",))
        with anyio.fail_after(60):
            assert await b.launcher.ready(environment)
        one = (await run(await b.forked(environment=environment), code)).split()
        two = (await run(await b.forked(environment=environment), code)).split()
        assert len(one) == 7
        assert not set(one) & set(two)


async def test_files_are_copied_and_packed_with_their_modes() -> None:
    async with bench() as b:
        assert await run(await b.forked(), everyday_files.CODE) == everyday_files.PRINTED


async def test_numpys_generator_is_reseeded() -> None:
    pytest.importorskip("numpy")
    async with bench(("numpy",)) as b:
        code = "import numpy; print(numpy.random.rand())"
        assert await run(await b.forked(), code) != await run(await b.forked(), code)


async def test_many_kernels_fork_at_once() -> None:
    async with bench() as b:
        answers: list[str] = []

        async def one(number: int) -> None:
            answers.append(await run(await b.forked(), f"print({number})"))

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(one, number)
        assert sorted(answers) == [f"{number}\n" for number in range(8)]
        if os.geteuid() == 0:
            owners = {Path(f"/proc/{kernel.handle.pid}").stat().st_uid for kernel in b.kernels}
            assert len(owners) == 8
            assert 0 not in owners


async def test_a_cancelled_launch_leaves_nothing() -> None:
    async with bench() as b:
        before = set(descendants(os.getpid()))
        for _ in range(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(b.launcher.launch, b.request())
                await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        with anyio.fail_after(60):
            while set(descendants(os.getpid())) - before:
                await anyio.lowlevel.checkpoint()
        assert list(b.runs.kernels.iterdir()) == []
        await run(await b.forked(), "1")


async def test_kernels_outlive_the_zygote_and_the_next_starts_cold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as b:
        kernel = await b.forked()
        await run(kernel, "x = 1")
        os.kill(process_named("kernel-template"), signal.SIGKILL)
        with anyio.fail_after(60):
            while b.launcher.template(ENVIRONMENT) is not None:
                await anyio.lowlevel.checkpoint()
        assert await run(kernel, "print(x)") == "1\n"
        assert "template" in caplog.text
        cold = await b.kernel()
        assert not is_forked(cold)
        # how it ends is still told, and what it leaves is still ended
        kernel.submit("import os; os._exit(5)", lambda _event: None)
        with anyio.fail_after(60):
            assert (await kernel.handle.wait()).code == 5
        with anyio.fail_after(60):
            while b.launcher.template(ENVIRONMENT) is None:
                await anyio.lowlevel.checkpoint()
        await run(await b.forked(), "1")


async def test_when_the_keeper_dies_its_kernels_are_reported_dead() -> None:
    async with bench() as b:
        kernel = await b.forked()
        os.kill(process_named("kernel-init"), signal.SIGKILL)
        with anyio.fail_after(60):
            assert (await kernel.handle.wait()).signal == signal.SIGKILL
        await kernel.aclose()
        assert not running(kernel.handle.pid)


async def test_another_preload_makes_another_template_while_old_kernels_go_on() -> None:
    async with bench() as b:
        old = await b.forked()
        b.launcher.prepare(ENVIRONMENT, ("statistics",))
        with anyio.fail_after(60):
            assert await b.launcher.ready(ENVIRONMENT)
        new = await b.forked()
        code = "import sys; print('statistics' in sys.modules)"
        assert await run(new, code) == "True\n"
        assert await run(old, "print(1)") == "1\n"
        inits = processes_named("kernel-init")
        assert len(inits) == 2
        await old.aclose()
        with anyio.fail_after(60):
            while len(processes_named("kernel-init")) > 1:
                await anyio.lowlevel.checkpoint()


async def test_a_kernel_that_cannot_be_forked_starts_cold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as b:
        layers = tuple(b.workspaces / f"layer{number}" for number in range(9))
        for layer in layers:
            layer.mkdir(mode=0o755)
        kernel = await b.kernel(layers=layers)
        assert not is_forked(kernel)
        assert "starts cold instead" in caplog.text


async def test_no_room_for_a_new_kernels_descriptors_costs_no_other_its_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as b:
        before = set(descendants(os.getpid()))
        first = await b.kernel()
        receive = linux.receive

        def cut(sock: socket.socket, *, wait: bool = True) -> Any:
            received = receive(sock, wait=wait)
            if received is None or received[0].get("op") != "forked":
                return received
            monkeypatch.undo()
            linux.close_all(received[1])
            raise linux.DescriptorsLost(received[0])

        monkeypatch.setattr(linux, "receive", cut)
        second = await b.kernel()
        assert not is_forked(second)
        assert first.exit is None
        third = await b.kernel()
        assert is_forked(third)
        for kernel in (first, second, third):
            await kernel.aclose()
        with anyio.fail_after(60):
            while set(descendants(os.getpid())) != before:
                await anyio.lowlevel.checkpoint()


def parents() -> dict[int, int]:
    """The parent of every process, dead ones too."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stat = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                found[int(folder.name)] = int(stat[1])
    return found


def descendants(pid: int) -> list[int]:
    table = parents()
    below = [pid]
    for known in below:
        below += [child for child, parent in table.items() if parent == known]
    return below[1:]


SERVER = """
import anyio, sys
from tests.integration.test_template import bench, run
async def main():
    async with bench() as b:
        kernel = await b.forked()
        print(kernel.handle.pid, flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


async def test_nothing_outlives_a_server_that_is_killed() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    try:
        assert server.stdout is not None
        with anyio.fail_after(60):
            kernel = int(await anyio.to_thread.run_sync(server.stdout.readline))
        below = descendants(server.pid)
        assert kernel in below
        assert len(below) >= 5
    finally:
        server.kill()
        server.communicate()
    with anyio.fail_after(60):
        while any(running(pid) for pid in below):
            await anyio.lowlevel.checkpoint()
    remove_tree(Path("/tmp", f"kmt-{server.pid}"))


def commands() -> set[bytes]:
    """The command lines of all processes below this one."""
    found = set()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.add(Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def process_named(name: str) -> int:
    (found,) = processes_named(name)
    return found


def processes_named(name: str) -> list[int]:
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(pid)
    return found


def test_all_of_it_holds_for_an_ordinary_user() -> None:
    """The tests above, run without any privilege."""
    if os.geteuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(as_ordinary_user(argv), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
