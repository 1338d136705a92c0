"""Real kernels under Landlock: what works in them, how they end, what they cost."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import anyio
import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.sandbox.base import SandboxRequest
from kernel_mcp.sandbox.landlock import LandlockSandbox, landlock_available
from kernel_mcp.sandbox.self_test import run_confined
from kernel_mcp.sessions.forked_save import ForkedSave, UnfitToFork
from kernel_mcp.units import GIB
from tests.integration import everyday_files
from tests.integration.bombs import QUIET
from tests.integration.landlock_kernel import notebook
from tests.integration.unprivileged import REPOSITORY, as_ordinary_user

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif((reason := landlock_available()) is not None, reason=str(reason)),
]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="compares root with an ordinary user")
WAIT_S = 60
CAP_DAC_READ_SEARCH = 2
CHILDREN = (
    QUIET
    + """
import os, signal
pids = []
for daemon in (False, True):
    read, write = os.pipe()
    if os.fork() == 0:
        if not daemon or os.fork() == 0:
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.write(write, str(os.getpid()).encode())
            while True:
                signal.pause()
        os._exit(0)
    pids.append(int(os.read(read, 20)))
print(*pids)
"""
)


@pytest.fixture
def runs() -> Iterator[RunDirectory]:
    with RunDirectory.create() as runs:
        yield runs


def wait_for_the_end_of(handles: list[int]) -> None:
    """Wait until every process behind the pidfds is gone."""
    for handle in handles:
        ready, _, _ = select.select([handle], [], [], WAIT_S)
        assert ready, "a process lives on"


def hold(stack: ExitStack, pids: list[int]) -> list[int]:
    """Pidfds of processes."""
    handles = [os.pidfd_open(pid) for pid in pids]
    for handle in handles:
        stack.callback(os.close, handle)
    return handles


async def test_a_kernel_computes_writes_and_keeps_its_state(runs: RunDirectory) -> None:
    async with notebook(runs) as book:
        assert (await book.run("x = 21")).status == "ok"
        assert (await book.run("print(x * 2)")).text == "42\n"
        await book.run("open('result.txt', 'w').write('done')")
        assert (book.workspace / "result.txt").read_text() == "done"


THREAD_OF_A_LIBRARY = """
import ctypes
libc = ctypes.CDLL(None)
libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.sleep, ctypes.c_void_p(1000))
"""


async def test_a_child_saves_a_kernel_of_which_it_can_only_count_the_threads(
    runs: RunDirectory, tmp_path: Path
) -> None:
    async with notebook(runs) as book:
        await book.run("x = [1]")
        with ForkedSave() as saving:
            await saving.begin(book.kernel, max_bytes=10**6)
            dump = await saving.finish(tmp_path / "dump", max_bytes=10**6)
        assert dump.names == ("x",)
        await book.run(THREAD_OF_A_LIBRARY)
        with ForkedSave() as saving, pytest.raises(UnfitToFork, match="does not let be looked at"):
            await saving.begin(book.kernel, max_bytes=10**6)


async def test_temporary_files_are_private_and_work(runs: RunDirectory) -> None:
    async with notebook(runs) as book:
        cell = await book.run(
            "import tempfile, os\n"
            "with tempfile.NamedTemporaryFile() as file: print(file.name)\n"
            "print(os.access(tempfile.gettempdir(), os.W_OK))"
        )
        name, writable = cell.text.split()
        assert Path(name).is_relative_to(runs.path)
        assert writable == "True"


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess; assert subprocess.run(['sh', '-c', 'exit 3']).returncode == 3",
        "import asyncio; assert await asyncio.sleep(0, 1) == 1",
        "import sqlite3; sqlite3.connect('a.db').execute('create table t (a)')",
        "import threading; t = threading.Thread(target=int); t.start(); t.join()",
        "import multiprocessing as m; p = m.Process(target=int); p.start(); p.join(); 1 / p.pid",
        "import shutil, pathlib; pathlib.Path('a').touch(); shutil.copy2('a', 'b')",
        "import shutil; open('d', 'w'); shutil.make_archive('c', 'zip', '.', 'd')",
        "import ssl; ssl.create_default_context()",
        "import zoneinfo; zoneinfo.ZoneInfo('Europe/Berlin')",
        "import psutil; assert psutil.Process().memory_info().rss; psutil.virtual_memory()",
        "import os; assert os.cpu_count() >= 1 and open('/proc/self/status').read()",
        "import zmq; zmq.Context().socket(zmq.PUSH).connect('tcp://127.0.0.1:1')",
        "import platform; platform.freedesktop_os_release()",
    ],
)
async def test_ordinary_code_runs(runs: RunDirectory, code: str) -> None:
    async with notebook(runs) as book:
        cell = await book.run(code)
        assert (cell.status, cell.error) == ("ok", "")


async def test_files_are_copied_and_packed_with_their_modes(runs: RunDirectory) -> None:
    async with notebook(runs) as book:
        assert (await book.run(everyday_files.CODE)).text == everyday_files.PRINTED


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.create_connection(('127.0.0.1', 1))",
        "import multiprocessing; multiprocessing.Queue()",
        "import os; os.openpty()",
        "import subprocess; subprocess.run(['true'], start_new_session=True)",
        "open('/etc/passwd')",
        "open('/tmp/kernel-mcp-outside', 'w')",
    ],
)
async def test_what_the_gaps_name_fails_with_an_error(runs: RunDirectory, code: str) -> None:
    async with notebook(runs) as book:
        cell = await book.run(code)
        assert cell.status == "error"
        assert "PermissionError" in cell.error or "FileNotFoundError" in cell.error


async def test_an_interrupt_stops_a_cell_and_keeps_its_state(runs: RunDirectory) -> None:
    async with notebook(runs) as book:
        await book.run("kept = 1")
        running = book.kernel.submit("print('on', flush=True)\nwhile True: pass", lambda _: None)
        with anyio.fail_after(WAIT_S):
            while not running.finished.is_set():
                book.kernel.interrupt()
                with anyio.move_on_after(0.2):
                    await running.finished.wait()
        assert running.failure is not None
        assert running.failure.name == "KeyboardInterrupt"
        assert (await book.run("print(kept)")).text == "1\n"


async def test_a_crash_is_told_with_its_signal(runs: RunDirectory) -> None:
    async with notebook(runs) as book:
        cell = await book.run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        assert cell.status is None
        assert book.handle.exit is not None
        assert book.handle.exit.signal == signal.SIGSEGV


async def test_children_die_with_a_kernel_that_is_killed(runs: RunDirectory) -> None:
    with ExitStack() as stack:
        async with notebook(runs) as book:
            pids = [int(pid) for pid in (await book.run(CHILDREN)).text.split()]
            handles = hold(stack, pids)
        wait_for_the_end_of(handles)


async def test_children_die_with_a_kernel_that_exits(runs: RunDirectory) -> None:
    with ExitStack() as stack:
        async with notebook(runs) as book:
            pids = [int(pid) for pid in (await book.run(CHILDREN)).text.split()]
            handles = hold(stack, pids)
            await book.run("os._exit(3)")
            assert book.handle.exit is not None
            assert book.handle.exit.code == 3
            wait_for_the_end_of(handles)


@pytest.mark.parametrize("user", ["same", pytest.param("ordinary", marks=AS_ROOT)])
def test_nothing_survives_the_death_of_the_server(user: str) -> None:
    argv = [sys.executable, "-m", "tests.integration.landlock_kernel", CHILDREN]
    if user == "ordinary":
        argv = as_ordinary_user(argv)
    with ExitStack() as stack:
        server = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        stack.callback(server.kill)
        assert server.stdout is not None
        itself, *pids = [int(pid) for pid in server.stdout.readline().split()]
        assert len(pids) == 3
        handles = hold(stack, pids)
        os.kill(itself, signal.SIGKILL)
        wait_for_the_end_of(handles)


@pytest.mark.ways
def test_an_installation_in_the_home_folder_is_no_breach(tmp_path: Path) -> None:
    """The names of files in it can be listed, and no others of the home folder."""
    source = tmp_path / "source"
    for package in ("kernel_mcp", "kernel_specs"):
        shutil.copytree(REPOSITORY / package, source / package)
    (tmp_path / "notes.txt").write_text("private")
    code = "from kernel_mcp.sandbox.select import proven_sandbox as p; print(p('landlock').name)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(source)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "landlock\n"), ran.stderr


def watcher_of(kernel: int) -> int:
    """The process that ends what a kernel leaves behind; it keeps the launcher's command line."""
    owner = Path(f"/proc/{kernel}").stat().st_uid
    for folder in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if folder.name.isdigit() and folder.stat().st_uid == owner:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"--parent" in words and str(os.getpid()).encode() in words:
                    return int(folder.name)
    raise AssertionError("a kernel without a watcher")


@AS_ROOT
async def test_a_kernel_cannot_touch_its_watcher(runs: RunDirectory) -> None:
    async with notebook(runs) as book:
        watcher = watcher_of(book.handle.pid)
        assert "Uid:\t0" not in Path(f"/proc/{watcher}/status").read_text()
        for attempt in (
            f"import os; os.kill({watcher}, 9)",
            f"import resource; resource.prlimit({watcher}, resource.RLIMIT_CPU, (0, 0))",
            f"import os; os.setpriority(os.PRIO_PROCESS, {watcher}, 19)",
            f"open('/proc/{watcher}/mem')",
        ):
            assert "PermissionError" in (await book.run(attempt)).error, attempt


@pytest.mark.ways
async def test_facts_about_itself_stay_readable_when_memory_is_short(runs: RunDirectory) -> None:
    caches = Path("/proc/sys/vm/drop_caches")
    if not os.access(caches, os.W_OK):
        pytest.skip("dropping the file caches takes root")
    async with notebook(runs) as book:
        for _ in range(3):
            caches.write_text("2")
            cell = await book.run("print('VmRSS' in open('/proc/self/status').read())")
            assert cell.text == "True\n"


async def test_kernels_do_not_reach_each_other(runs: RunDirectory) -> None:
    sandbox = LandlockSandbox.detect()
    async with notebook(runs, sandbox=sandbox) as one, notebook(runs, sandbox=sandbox) as other:
        await other.run("open('private', 'w').write('x')")
        ip = other.handle.sockets.connection.ip
        for attempt in (
            f"open({str(other.workspace / 'private')!r})",
            f"open({str(Path(ip).parent / 'connection.json')!r})",
            f"import socket; socket.socket(socket.AF_UNIX).connect({ip + '-1'!r})",
            f"import os; os.kill({other.handle.pid}, 9)",
            f"open('/proc/{other.handle.pid}/status')",
            f"import os; os.listdir({str(runs.path / 'k')!r})",
        ):
            assert "PermissionError" in (await one.run(attempt)).error, attempt
        assert (await other.run("print('alive')")).text == "alive\n"


async def test_memory_beyond_the_limit_raises_in_the_cell(runs: RunDirectory) -> None:
    async with notebook(runs, limits=Limits(memory_bytes=GIB)) as book:
        assert "MemoryError" in (await book.run("x = bytearray(10 ** 10)")).error
        assert (await book.run("print('alive')")).text == "alive\n"


async def test_a_kernel_has_no_descriptor_but_its_own(runs: RunDirectory) -> None:
    async with notebook(runs) as book:
        cell = await book.run(
            "import os\n"
            "for fd in os.listdir('/proc/self/fd'):\n"
            "    try: print(os.readlink(f'/proc/self/fd/{fd}'))\n"
            "    except FileNotFoundError: pass"
        )
        expected = (
            "socket:",
            "pipe:",
            "anon_inode:",
            "/memfd:",
            "/dev/null",
            f"/proc/{book.handle.pid}/",
        )
        foreign = [line for line in cell.text.splitlines() if not line.startswith(expected)]
        assert [line for line in foreign if not line.startswith(str(book.workspace))] == []
        assert "landlock" not in cell.text
        assert "memfd:kernel-mcp" not in cell.text


def test_nothing_runs_when_a_step_fails() -> None:
    sandbox = LandlockSandbox(filters=(b"not a filter",), identities=None)
    done = run_confined(sandbox, ["/bin/sh", "-c", "echo unconfined"])
    assert done.returncode == 71
    assert "could not be entered" in done.stderr
    assert "unconfined" not in done.stdout


@AS_ROOT
@pytest.mark.parametrize("closed", [False, True])
def test_a_capability_is_kept_only_where_folders_are_closed(closed: bool) -> None:
    sandbox = LandlockSandbox.detect()
    identity = sandbox.identity()
    assert identity is not None
    with tempfile.TemporaryDirectory(prefix="kernel-mcp-") as top:
        Path(top).chmod(0o700 if closed else 0o755)
        folders = [Path(top, name) for name in ("workspace", "sockets")]
        for folder in folders:
            folder.mkdir()
            os.chown(folder, identity.uid, identity.gid)
        request = SandboxRequest(
            argv=["/bin/sh", "-c", "exec cat /proc/self/status"],
            env={},
            workspace=folders[0],
            sockets=folders[1],
            readonly=(),
            limits=Limits(),
        )
        command = sandbox.command(request, identity)
        done = subprocess.run(
            command.argv,
            env=command.env,
            pass_fds=command.pass_fds,
            capture_output=True,
            text=True,
            check=True,
        )
        command.close_passed()
    sandbox.release(identity)
    status = dict(line.split(":\t", 1) for line in done.stdout.splitlines())
    expected = 1 << CAP_DAC_READ_SEARCH if closed else 0
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == expected, name
    assert status["Uid"].split() == [str(identity.uid)] * 4
    assert status["Groups"].split() == []
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp_filters"] == "2"
