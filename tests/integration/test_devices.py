"""Devices of the host that the operator opens to code."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mcp import StdioServerParameters
from mcp.client import Client

from tests.integration import containers
from tests.integration.agent import Agent, command
from tests.integration.unprivileged import USER, as_ordinary_user
from tests.sampled import sampled

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes device files, as root alone may"),
]


@pytest.fixture
def zero() -> Iterator[Path]:
    """A node of its own for what /dev/zero is, which root alone may open."""
    path = Path(f"/dev/kmtest-{os.getpid()}")
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    path.chmod(0o600)
    try:
        yield path
    finally:
        path.unlink()


USE = """
import mmap, os, resource
fd = os.open({path!r}, os.O_RDWR)
print(os.read(fd, 3), os.write(fd, b"x"), len(mmap.mmap(fd, 4096)))
print(resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_DATA)[0])
print(sorted(set(os.listdir("/dev")) - set({known!r})))
"""
KNOWN = [
    *("null", "zero", "full", "random", "urandom", "tty", "stdin", "stdout", "stderr", "fd"),
    *("shm", "pts", "ptmx", "core", "console", "mqueue"),
]


async def other_session(notebook: Agent, *, forked: bool) -> str:
    """A second session, whose kernel is `forked`: the first may begin before the template is."""
    for _ in range(10):
        session = str((await notebook.call("create_session")).data["session"])
        await notebook.run("1", session=session)
        found = (await notebook.call("info", session=session)).data["sandbox_found"]
        if found[0].startswith("forked") or not forked:
            return session
        assert "refused" not in " ".join(found), found
        await notebook.call("close_session", session=session)
    raise AssertionError("no kernel was forked")


TASKS = """
import os, threading
def name(word):
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as comm: comm.write(word)
    return open("/proc/thread-self/comm").read().strip()
named = []
thread = threading.Thread(target=lambda: named.append(name("cuda-EvtHandlr")))
thread.start(); thread.join()
refused = []
for path in ("sys/vm/drop_caches", "sys/kernel/hostname", "sysrq-trigger", "sys/kernel/sem"):
    try: os.close(os.open(f"/proc/{path}", os.O_WRONLY))
    except OSError: refused.append(True)
try: os.mkdir("/proc/new")
except OSError: refused.append(True)
print(named, refused, sum(name.isdigit() for name in os.listdir("/proc")) < 8)
"""


@pytest.mark.parametrize(
    "how", sampled(["forked", "cold", "ordinary", "ordinary cold"], "ordinary")
)
async def test_threads_can_be_named_where_a_gpu_is_open_and_no_more_of_proc_is_writable(
    how: str,
) -> None:
    node = Path(f"/dev/nvidia-kmtest-{os.getpid()}")
    os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    node.chmod(0o666)
    try:
        flags = ["--device", str(node), "--allow", "*", "--warm", "0"]
        flags += ["--no-template"] if how.endswith("cold") else []
        server = command(*flags)
        if how.startswith("ordinary"):
            words = as_ordinary_user([sys.executable, "-m", "kernel_mcp", *flags])
            server = StdioServerParameters(command=words[0], args=words[1:], env={}, cwd="/")
        async with Client(server) as client:
            notebook = Agent(client)
            session = await other_session(notebook, forked="cold" not in how)
            expected = f"['cuda-EvtHandlr'] {[True] * 5} True"
            assert (await notebook.run(TASKS, session=session)).text == expected
            found = (await notebook.call("info", session=session)).data["sandbox_found"]
            assert any("writable:" in each and " /proc" in each for each in found), found
            if how == "forked":
                await notebook.run("1", session=session, checkpoint=True)
                await notebook.run("import os; os.kill(os.getpid(), 9)", session=session)
                assert (await notebook.run(TASKS, session=session)).text == expected
    finally:
        node.unlink()


WITH_GPU = """
import sys
from pathlib import Path
from kernel_mcp.linux import gpus
gpus.driver = lambda: gpus.Driver((Path({node!r}),), Path({folder!r}))
from kernel_mcp.cli import main
sys.exit(main())
"""
LOAD = """
import ctypes, os, subprocess, sys
load = "import ctypes; ctypes.CDLL('libcuda.so.1'); print('loaded')"
exec(load)
print(subprocess.run([sys.executable, "-c", load], capture_output=True, text=True).stdout.strip())
print(os.path.exists(os.environ["LD_LIBRARY_PATH"]), os.path.exists({node!r}))
"""


@pytest.mark.ways
@pytest.mark.parametrize("how", sampled(["forked", "cold"], "forked"))
async def test_the_libraries_of_a_gpu_are_found_where_they_are(zero: Path, how: str) -> None:
    ctypes.CDLL("libm.so.6")
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "/libm.so.6" in line or "/libm-" in line)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        shutil.copy(library, Path(folder, "libcuda.so.1"))
        script = WITH_GPU.format(node=str(zero), folder=folder)
        flags = ["--gpu", "--allow", "*", "--warm", "0"]
        flags += ["--no-template"] if how == "cold" else []
        server = command(*flags).model_copy(update={"args": ["-c", script, *flags]})
        async with Client(server) as client:
            notebook = Agent(client)
            session = await other_session(notebook, forked=how == "forked")
            answer = await notebook.run(LOAD.format(node=str(zero)), session=session)
            assert answer.text == "loaded\nloaded\nTrue True"
            assert (await notebook.call("info")).data["devices"] == [str(zero)]


async def test_proc_is_read_only_where_no_gpu_is_open(zero: Path) -> None:
    async with Client(command("--device", str(zero), "--warm", "0")) as client:
        answer = await Agent(client).run("open('/proc/self/comm', 'w')")
        assert "Read-only file system" in answer.text


@pytest.mark.parametrize(
    "how", sampled(["warm", "forked", "cold", "ordinary", "ordinary cold"], "warm")
)
async def test_code_reads_and_writes_it_in_every_kernel(zero: Path, how: str) -> None:
    more = {"warm": ("--warm", "1"), "forked": ("--warm", "0")}.get(how, ("--no-template",))
    flags = ("--device", str(zero), "--allow", "*", *more)
    server = command(*flags)
    if how.startswith("ordinary"):
        os.chown(zero, USER, USER)
        flags = flags if how.endswith("cold") else flags[:-1]
        words = as_ordinary_user([sys.executable, "-m", "kernel_mcp", *flags])
        server = StdioServerParameters(command=words[0], args=words[1:], env={}, cwd="/")
    async with Client(server) as client:
        notebook = Agent(client)
        code = USE.format(path=str(zero), known=KNOWN)
        for session in ("", await other_session(notebook, forked="cold" not in how)):
            answer = await notebook.run(code, session=session)
            free = resource.RLIM_INFINITY
            expected = [r"b'\x00\x00\x00' 1 4096", f"{free} {free}", f"['{zero.name}']"]
            assert answer.text.splitlines() == expected
        info = (await notebook.call("info")).data
        assert info["devices"] == [str(zero)]
        assert any("alone (--device)" in each for each in info["sandbox_enforces"])
        assert f"Devices of the host: {zero}" in (client.instructions or "")
        taken = "x = bytearray(1 << 30); x[::4096] = b'1' * len(x[::4096]); y = bytes(x) * 3"
        killed = await notebook.run(taken)
        assert killed.status in ("killed", "error")
        assert "memory" in killed.text.lower()


@pytest.mark.ways
async def test_the_device_keeps_its_mode_and_owner_on_the_host(zero: Path) -> None:
    async with Client(command("--device", str(zero), "--warm", "0")) as client:
        notebook = Agent(client)
        code = f"import os; os.chmod({str(zero)!r}, 0o777)"
        assert (await notebook.run(code)).status == "error"
    info = zero.stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid) == (0o600, 0)


@pytest.mark.ways
async def test_landlock_gives_it_with_the_rights_of_its_mode(zero: Path) -> None:
    flags = ("--device", str(zero), "--sandbox", "landlock")
    read = f"import os; os.read(os.open({str(zero)!r}, os.O_RDWR), 3)"
    refused = subprocess.run(
        [sys.executable, "-m", "kernel_mcp", *flags], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    said = f"--device {zero}: code has the rights of every user, and its mode is 0600. Allow it"
    assert said in refused.stderr
    zero.chmod(0o604)
    async with Client(command(*flags)) as client:
        answer = await Agent(client).run(read)
        assert "PermissionError" in answer.text
        info = (await Agent(client).call("info")).data
        told = f"{zero}: code has the rights of every user, and its mode is 0604"
        assert info["devices"] == [told]
        assert f"of the host's devices only {zero}" in info["sandbox_enforces"]
    zero.chmod(0o666)
    async with Client(command(*flags)) as client:
        assert (await Agent(client).run(read)).text == r"b'\x00\x00\x00'"


@pytest.mark.ways
async def test_a_container_has_it(zero: Path) -> None:
    async with Client(command("--device", str(zero), *containers.flags("podman"))) as client:
        read = f"import os; os.read(os.open({str(zero)!r}, os.O_RDWR), 3)"
        assert (await Agent(client).run(read)).text == r"b'\x00\x00\x00'"
