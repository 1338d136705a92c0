"""Forked kernels: what they share, what they use, and what outlives them."""

from __future__ import annotations

import ast
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.linux.safe_tree import remove_tree
from kernel_specs import linux
from kernel_specs.template import packets
from tests.integration import everyday_files
from tests.integration.bombs import QUIET
from tests.integration.processes import descendants, named, running
from tests.integration.template.bench import (
    ENVIRONMENT,
    bench,
    clone_environment,
    holds_for_an_ordinary_user,
    is_forked,
    run,
)
from tests.integration.unprivileged import REPOSITORY

pytestmark = pytest.mark.anyio


TAKE_ALL = (
    QUIET
    + """
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
)


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
    code = QUIET + (
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
        assert "has ended: it was killed by SIGKILL" in caplog.text
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


async def test_when_the_init_of_a_template_dies_its_kernels_are_reported_dead() -> None:
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
        inits = named("kernel-init", below=os.getpid())
        assert len(inits) == 2
        await old.aclose()
        with anyio.fail_after(60):
            while len(named("kernel-init", below=os.getpid())) > 1:
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
        receive = packets.receive

        def cut(sock: socket.socket, *, wait: bool = True) -> Any:
            received = receive(sock, wait=wait)
            if received is None or received[0].get("op") != "forked":
                return received
            monkeypatch.undo()
            linux.close_all(received[1])
            raise packets.DescriptorsLost(received[0])

        monkeypatch.setattr(packets, "receive", cut)
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


SERVER = """
import anyio, sys
from tests.integration.template.bench import bench, run
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


def process_named(name: str) -> int:
    (found,) = named(name, below=os.getpid())
    return found


@pytest.mark.full
def test_all_of_it_holds_for_an_ordinary_user() -> None:
    holds_for_an_ordinary_user(__file__)
