"""Checkpoints of real kernels: what comes back, and what hostile ones can do with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from kernel_mcp.errors import LaunchError, Uncopyable
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.linux.proc import is_zombie, namespace_of, pids_of_namespace
from tests.integration.template.bench import Bench, bench, holds_for_an_ordinary_user, run

pytestmark = [pytest.mark.anyio]

DEATHS = {
    "os.kill(os.getpid(), 9)": "killed by SIGKILL",
    "ctypes.string_at(0)": "killed by SIGSEGV",
    "os._exit(7)": "exited with code 7",
    "os.killpg(0, 9)": "killed by SIGKILL",
    "os.abort()": "killed by SIGABRT",
    # a bomb whose fuse dies first, and whose children go on
    "me = os.getpid(); [os.fork() for _ in range(5)]; os.kill(me, 9); os.fork()": "killed by",
}
STATE = """
import ctypes, os, random, subprocess, sys, asyncio, signal, threading
data = {n: [n] * 3 for n in range(1000)}
random.seed(11)
generator = random.Random(5)
file = open('note.txt', 'w+'); print('one', file=file)
child = subprocess.Popen(['sleep', '1000'], stdin=subprocess.PIPE)
seen = []
signal.signal(signal.SIGCHLD, lambda *_: seen.append('child'))
async def nap():
    await asyncio.sleep(0.001)
    return 5
"""
LOOK = """
print(len(data), data[999], random.random() == FIRST, generator.random() == SECOND)
print(file.tell(), child.poll(), seen, threading.active_count(), asyncio.run(nap()))
print(threading.main_thread().native_id == threading.get_native_id() == os.getpid())
try: os.wait()
except ChildProcessError: print('no child')
!echo from a child
"""


@asynccontextmanager
async def serving(kernel: Kernel) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kernel.watch)
        yield
        tasks.cancel_scope.cancel()


async def die(kernel: Kernel, code: str) -> str:
    """How a kernel ends over a cell."""
    async with serving(kernel):
        kernel.submit(code, lambda _event: None)
        with anyio.fail_after(20):
            await kernel.dead.wait()
    assert kernel.exit is not None
    return kernel.exit.describe()


async def come_back(made: Bench, kernel: Kernel) -> Kernel:
    group = kernel.handle.sandbox_group
    assert group is not None
    with anyio.fail_after(20):
        await group.clear()
        fresh = await kernel.wake(group.checkpoints[-1])
    made.kernels.append(fresh)
    await kernel.aclose()
    return fresh


def living(kernel: Kernel) -> list[int]:
    """The processes of its sandbox, without those that a busy init has yet to reap."""
    found = pids_of_namespace(namespace_of(kernel.handle.pid))
    return [pid for pid in found if not is_zombie(pid)]


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


async def test_after_every_death_the_state_is_that_of_the_checkpoint() -> None:
    async with bench() as made:
        kernel = await made.forked()
        await run(kernel, STATE)
        await kernel.checkpoint()
        known = await run(kernel, "a, b = random.random(), generator.random()\nprint((a, b))")
        first, second = known.strip("() \n").split(", ")
        before = descriptors()
        for code, words in DEATHS.items():
            assert words in await die(kernel, f"data.clear(); gone = 1\n{code}"), code
            kernel = await come_back(made, kernel)
            assert len(living(kernel)) == 3, code  # the init, the checkpoint, the kernel
            seen = await run(kernel, LOOK.replace("FIRST", first).replace("SECOND", second))
            assert seen.splitlines() == [
                "1000 [999, 999, 999] True True",
                "4 -9 [] 2 5",
                "True",
                "no child",
                "from a child",
            ], code
            assert "gone" not in await run(kernel, "print(dir())")
        assert descriptors() <= before + 2
        folder = Path(f"/proc/{kernel.handle.pid}")
        await kernel.aclose()
        assert not folder.exists()


async def test_a_kernel_comes_back_many_times_without_leaving_anything() -> None:
    async with bench() as made:
        kernel = await made.forked()
        await run(kernel, "import os\nn = 0")
        before, inside = 0, ""
        for number in range(30):
            await run(kernel, f"n = {number}")
            group = kernel.handle.sandbox_group
            assert group is not None
            newest, _ = await kernel.checkpoint()
            for former in [each for each in group.checkpoints if each is not newest]:
                group.drop(former)
            await die(kernel, "os.kill(os.getpid(), 9)")
            kernel = await come_back(made, kernel)
            assert await run(kernel, "print(n)") == f"{number}\n"
            if number == 9:
                before = descriptors()
                inside = await run(kernel, "print(len(os.listdir('/proc/self/fd')))")
        assert descriptors() <= before
        # fewer where garbage of an earlier copy has been collected meanwhile
        assert int(await run(kernel, "print(len(os.listdir('/proc/self/fd')))")) <= int(inside)
        assert len(living(kernel)) == 3


async def test_what_a_copy_would_lack_is_named_and_nothing_is_forked() -> None:
    async with bench() as made:
        kernel = await made.forked()
        await run(
            kernel,
            "import threading\nstop = threading.Event()\n"
            "threading.Thread(target=stop.wait, name='counting').start()",
        )
        with pytest.raises(Uncopyable, match="the thread 'counting'"):
            await kernel.checkpoint()
        assert len(living(kernel)) == 2
        await run(kernel, "stop.set()\nimport mmap\nm = mmap.mmap(-1, 8 << 20)")
        with pytest.raises(Uncopyable, match="8 MB of shared memory"):
            await kernel.checkpoint()
        await run(kernel, "m.close()\nimport multiprocessing\nv = multiprocessing.Value('i', 3)")
        await kernel.checkpoint()
        await die(kernel, "import os\nv.value = 4; os._exit(0)")
        kernel = await come_back(made, kernel)
        assert await run(kernel, "print(v.value)") == "3\n"


async def test_a_checkpoint_holds_no_pipe_open() -> None:
    async with bench() as made:
        kernel = await made.forked()
        await run(kernel, "import subprocess\np = subprocess.Popen(['cat'], stdin=subprocess.PIPE)")
        await kernel.checkpoint()
        with anyio.fail_after(20):
            assert await run(kernel, "p.stdin.close(); print(p.wait())") == "0\n"


FIND = """
import glob, os, socket, json, array
def ends():
    'sockets that a word of the server comes over'
    for name in os.listdir('/proc/self/fd'):
        try:
            s = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if s.type == socket.SOCK_SEQPACKET:
            yield int(name), s
line = next(ends())[1]
"""
HOSTILE = {
    "never parks": "[os.close(number) for number, s in ends()]",
    "has nobody fork": (
        "from kernel_specs.restricted.checkpoints import suspended\n"
        "suspended.os.fork = lambda: 1 / 0"
    ),
    "parks itself": (
        "from kernel_specs.restricted.checkpoints import suspended\n"
        "def lie():\n"
        "    for _, s in ends():\n"
        "        try: s.send(json.dumps({'parked': True}).encode())\n"
        "        except OSError: pass\n"
        "    return 1\n"
        "suspended.fork_apart = lie"
    ),
    "parks twice": (
        "from kernel_specs.restricted.checkpoints import suspended\n"
        "send = suspended.send\n"
        "def twice(s, **packet):\n"
        "    send(s, **packet); send(s, **packet)\n"
        "suspended.send = twice"
    ),
    "floods": (
        "from kernel_specs.restricted.checkpoints import suspended\n"
        "def flood(s, **packet):\n"
        "    while True: s.send(b'x' * 60000)\n"
        "suspended.send = flood"
    ),
    "speaks without end in words": (
        "from kernel_specs.restricted.checkpoints import suspended\n"
        "def nest(s, **packet):\n"
        "    s.send(b'[' * 60000)\n"
        "suspended.send = nest"
    ),
    "sends descriptors": (
        "from kernel_specs.restricted.checkpoints import suspended\n"
        "def give(s, **packet):\n"
        "    r, w = os.pipe()\n"
        '    socket.send_fds(s, [b\'{"alive": 1, "closed": []}\'], [r, w])\n'
        "suspended.send = give"
    ),
    "names a kernel that nobody has asked for": (
        "from kernel_specs.restricted.checkpoints import suspended\n"
        "send = suspended.send\n"
        "def ahead(s, **packet):\n"
        "    send(s, alive=1, closed=[]); send(s, **packet)\n"
        "suspended.send = ahead"
    ),
}


async def wake_one(kernel: Kernel) -> None:
    """Resume a checkpoint as a kernel, if it is still there after all that it says."""
    checkpoint, _ = await kernel.checkpoint()
    with anyio.move_on_after(1):
        while checkpoint.usable:
            await anyio.lowlevel.checkpoint()
    await kernel.wake(checkpoint)


@pytest.mark.parametrize("how", HOSTILE)
async def test_a_hostile_kernel_gets_no_checkpoint_and_harms_no_other(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernel_mcp.launch.silence.LOOK_S", 0.1)
    async with bench() as made:
        other = await made.forked()
        await run(other, "x = 3")
        await other.checkpoint()
        kernel = await made.forked()
        await run(kernel, FIND)
        await run(kernel, HOSTILE[how])
        with anyio.fail_after(30), pytest.raises(LaunchError):
            await wake_one(kernel)
        assert await run(other, "print(x)") == "3\n"
        await die(other, "import os\nos._exit(0)")
        other = await come_back(made, other)
        assert await run(other, "print(x)") == "3\n"


async def test_a_checkpoint_that_answers_twice_or_is_stopped_gives_one_kernel() -> None:
    async with bench() as made:
        kernel = await made.forked()
        await run(
            kernel,
            "from kernel_specs.restricted.checkpoints import suspended\nimport os\n"
            "send = suspended.send\n"
            "def twice(s, **packet):\n"
            "    send(s, **packet)\n"
            "    if 'alive' in packet: send(s, **packet)\n"
            "suspended.send = twice\nx = 4",
        )
        checkpoint, _ = await kernel.checkpoint()
        await run(
            kernel,
            "[os.kill(int(n), 19) for n in os.listdir('/proc') if n.isdigit() and "
            "int(n) not in (1, os.getpid())]",
        )
        await die(kernel, "os._exit(1)")
        kernel = await come_back(made, kernel)
        assert await run(kernel, "print(x)") == "4\n"
        with anyio.fail_after(20):
            while checkpoint.usable:
                await anyio.lowlevel.checkpoint()
        assert "nobody had asked for" in checkpoint.refusal


async def test_a_kernel_that_speaks_over_the_control_socket_is_not_trusted() -> None:
    async with bench() as made:
        kernel = await made.forked()
        await run(kernel, FIND)
        seen = await run(
            kernel, "try: line.send(b'x')\nexcept OSError as e: print(type(e).__name__)"
        )
        assert seen == "BrokenPipeError\n"
        await kernel.checkpoint()


async def test_a_woken_kernel_that_is_not_confined_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as made:
        kernel = await made.forked()
        await kernel.checkpoint()
        await die(kernel, "import os\nos._exit(0)")
        group = kernel.handle.sandbox_group
        assert group is not None
        monkeypatch.setattr("kernel_mcp.launch.readiness.violations", lambda *_: ("it is root",))
        with pytest.raises(LaunchError, match="it is root"):
            await kernel.wake(group.checkpoints[-1])


async def test_branches_can_be_closed_all_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as made:
        kernel = await made.forked()
        checkpoint, _ = await kernel.checkpoint()
        branches = [await kernel.wake(checkpoint, f".branches/{number}") for number in (1, 2)]
        async with anyio.create_task_group() as tasks:
            for each in (kernel, *branches):
                tasks.start_soon(each.aclose)
    assert not caplog.records


async def test_branches_go_on_side_by_side_and_draw_different_numbers() -> None:
    async with bench() as made:
        kernel = await made.forked()
        await run(kernel, "import os, random\nrandom.seed(1)\nx = [0]")
        checkpoint, _ = await kernel.checkpoint()
        branches = [await kernel.wake(checkpoint, f".branches/{number}") for number in (1, 2)]
        made.kernels += branches
        drawn = set()
        for number, branch in enumerate((kernel, *branches)):
            drawn.add(await run(branch, f"x.append({number}); print(random.random())"))
        assert len(drawn) == 3
        for number, branch in enumerate((kernel, *branches)):
            assert await run(branch, "print(x)") == f"[0, {number}]\n"
        assert await run(branches[1], "print(os.environ['BRANCH_DIR'][-12:])") == "/.branches/2\n"
        await kernel.aclose()
        assert await run(branches[0], "print(x)") == "[0, 1]\n"
        await branches[0].aclose()
        await die(branches[1], "os._exit(1)")
        assert await run(await come_back(made, branches[1]), "print(x)") == "[0]\n"


@pytest.mark.full
@pytest.mark.full
def test_all_of_it_holds_for_an_ordinary_user() -> None:
    holds_for_an_ordinary_user(__file__)
