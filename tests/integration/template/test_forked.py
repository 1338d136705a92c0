"""Kernels forked from a template behave as cold ones do."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from pathlib import Path

import anyio
import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.output.items import Event
from kernel_mcp.units import MIB
from tests.integration.processes import descendants
from tests.integration.template.bench import (
    ENVIRONMENT,
    bench,
    clone_environment,
    holds_for_an_ordinary_user,
    is_forked,
    run,
)

pytestmark = pytest.mark.anyio


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
        expected = (await run(cold, code)).splitlines()
        for _ in ("shell", "iopub", "stdin", "control", "hb"):
            expected.remove("socket:[N]")  # it listens nowhere
        control_socket = ["socket:[N]"]  # over which it is asked for checkpoints
        assert (await run(forked, code)).splitlines() == sorted([*expected, *control_socket])


async def test_a_forked_kernel_listens_nowhere() -> None:
    code = (
        "import os, pathlib, socket, stat\n"
        "def kind(fd):\n"
        "    try: return stat.S_IFMT(os.fstat(fd).st_mode)\n"
        "    except OSError: return 0\n"
        "found = [fd for fd in range(100) if kind(fd) == stat.S_IFSOCK]\n"
        "sockets = [socket.socket(fileno=os.dup(fd)) for fd in found]\n"
        "print(sum(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for each in sockets))\n"
        "print(len(sockets) > 3, [each.name for each in pathlib.Path('/run/kernel').glob('k-*')])"
    )
    async with bench() as b:
        kernel = await b.forked()
        assert await run(kernel, code) == "0\nTrue []\n"
        assert await run(await b.forked(), "print(1)") == "1\n"


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
            "import subprocess\np = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
            # the pipe to Popen closes in execve(2) a moment before the new words are seen
            "while not open(f'/proc/{p.pid}/cmdline').read(): pass",
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


def commands() -> set[bytes]:
    """The command lines of all processes below this one."""
    found = set()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.add(Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


@pytest.mark.full
def test_all_of_it_holds_for_an_ordinary_user() -> None:
    holds_for_an_ordinary_user(__file__)
