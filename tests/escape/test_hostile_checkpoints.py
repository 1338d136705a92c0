"""Code of cells that replaces what parks copies of its kernel: it costs the session what they held.

Whatever a copy says, nothing outside the session ends, nobody waits for it, and nothing is left.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from textwrap import indent

import anyio
import pytest
from mcp import StdioServerParameters
from mcp.client import Client

from tests.integration.agent import Agent, command, notices
from tests.integration.processes import descendants
from tests.integration.unprivileged import REPOSITORY, as_ordinary_user

pytestmark = [pytest.mark.anyio]

LIMITS = ("--memory", "256M", "--pids", "40", "--max-sessions", "40", "--allow", "*")
KINDS = [
    pytest.param("root", ("--warm", "0"), id="root forked"),
    pytest.param("root", ("--warm", "2"), id="root pooled"),
    pytest.param("ordinary", ("--warm", "0"), id="ordinary forked"),
]
BEGIN = """
import sys, os, socket, time, signal, resource, ctypes
suspended = sys.modules["kernel_specs.restricted.checkpoints.suspended"]
requests = sys.modules["kernel_specs.restricted.checkpoints.requests"]
honest = suspended.park
x = 5
def parked(wake):
    suspended.send(wake, parked=True)
def alive(wake, order):
    suspended.send(wake, alive=order["id"], closed=[])
def begin(wake, *, more=lambda order, fds: None):
    parked(wake)
    while True:
        order, fds = suspended.receive(wake)
        if os.fork() == 0:
            more(order, fds)
            return order, fds
"""
COPIES = {
    "parks twice": "parked(wake); return honest(wake)",
    "floods instead": "while True: wake.send(b'x' * 60_000)",
    "floods": "parked(wake)\nwhile True: wake.send(b'x' * 60_000)",
    "floods with nothing": "parked(wake)\nwhile True: wake.send(b'')",
    "sends descriptors": (
        "try: socket.send_fds(wake, [b'{\"parked\": true}'], [0, 1, 2])\n"
        "except OSError: pass\nos._exit(0)"
    ),
    "names another": (
        "import struct\nsaid = struct.pack('3i', 1, 1000, 1000)\n"
        "kind = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, said)\n"
        "try: wake.sendmsg([b'{\"parked\": true}'], [kind])\n"
        "except OSError: os._exit(0)\ntime.sleep(999)"
    ),
    "hangs up": "parked(wake); wake.close(); time.sleep(999)",
    "becomes another program": (
        "parked(wake); os.set_inheritable(wake.fileno(), True)\n"
        "os.execv('/bin/sleep', ['sleep', '999'])"
    ),
    "does not wake": "parked(wake); time.sleep(999)",
    "is the kernel itself": (
        "parked(wake); order, _ = suspended.receive(wake); alive(wake, order)\ntime.sleep(999)"
    ),
    "wakes two": (
        "parked(wake); order, _ = suspended.receive(wake)\n"
        "for _ in range(2):\n  if os.fork() == 0: alive(wake, order); break\n"
        "time.sleep(999)"
    ),
    "wakes one that dies": (
        "return begin(wake, more=lambda order, fds:\n  (alive(wake, order), os._exit(0)))"
    ),
    "wakes one that is mute": (
        "return begin(wake, more=lambda order, fds:\n  (alive(wake, order), time.sleep(999)))"
    ),
    "wakes another program": (
        "return begin(wake, more=lambda order, fds: (alive(wake, order),\n"
        "  os.execv('/bin/sleep', ['sleep', '999'])))"
    ),
    "is a fork bomb": "parked(wake)\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "fills the processes": (
        "parked(wake)\nfor _ in range(30):\n  if os.fork() == 0: time.sleep(999)\n"
        "return honest(wake)"
    ),
    "fills the memory": (
        "parked(wake); held = []\nwhile True:\n  try: held.append(b'x' * (1 << 20))\n"
        "  except MemoryError: time.sleep(1)"
    ),
    "kills everything": ("parked(wake); suspended.receive(wake); os.kill(-1, 9)\ntime.sleep(999)"),
    "tells of an end that cannot be": (
        "parked(wake); order, fds = suspended.receive(wake)\n"
        "if os.fork() == 0: return order, fds\n"
        "suspended.send(wake, ended=order['id'], status=10 ** 40); time.sleep(999)"
    ),
}
"""Hostile versions of `park`."""
KERNELS = {
    "is honest": "",
    "only says so": "requests.take = lambda *_: {'status': 'ok', 'seconds': float('inf')}",
    "never answers": "def take(*_): return None\nrequests.take = take",
    "raises its limits": (
        "def park(wake):\n  order, fds = honest(wake)\n  for kind in range(16):\n"
        "    soft, hard = resource.getrlimit(kind)\n    if hard != -1:\n"
        "      try: resource.setrlimit(kind, (hard, hard + 1)); x = 0\n"
        "      except (OSError, ValueError): pass\n  return order, fds\nsuspended.park = park"
    ),
}
KEEPS = {"is honest", "raises its limits"}
SOME = (
    *("floods", "becomes another program", "wakes two", "is a fork bomb", "fills the memory"),
    *("kills everything", "is honest", "raises its limits"),
)
"""Attacks of different kinds; `test_siblings` tries more of them on the template alone."""


@asynccontextmanager
async def serving(user: str, *flags: str) -> AsyncIterator[Agent]:
    server = command(*LIMITS, *flags)
    if user == "ordinary":
        argv = as_ordinary_user([sys.executable, *server.args])
        server = StdioServerParameters(command=argv[0], args=argv[1:], env={}, cwd=REPOSITORY)
    async with Client(server) as client:
        yield Agent(client)


def sandboxes() -> int:
    """How many there are below this process: with the init of one all that is in it ends."""
    return [cmdline(pid) for pid in descendants(os.getpid())].count(b"init\0infinity\0")


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


async def attack(agent: Agent, name: str, code: str) -> None:
    """Run it in a session, and die; what follows is told truly, and the session goes on."""
    session = (await agent.call("create_session", name=name.replace(" ", "-"))).data["session"]

    async def run(code: str, **arguments: object) -> str:
        answer = await agent.run(code, session=session, timeout=20, **arguments)
        return f"{answer.status}: {answer.text} {notices(answer)}"

    assert (await run(BEGIN + code)).startswith("ok")
    assert (await run("y = 6", checkpoint=True)).startswith("ok")
    dead = await agent.run("import os; os.kill(os.getpid(), 9)", session=session, timeout=20)
    assert dead.status == "killed", (name, dead.text)
    assert dead.cell["state_kept"] or "x" in dead.cell["lost"], (name, dead.text)
    if name in KEEPS:
        assert dead.cell["state_kept"], (name, dead.text)
    left = await run("print(x if 'x' in dir() else 'gone')")
    assert left.startswith("ok: 5" if dead.cell["state_kept"] else "ok: gone"), (name, left)
    await agent.call("close_session", session=session)


first_kind = pytest.mark.parametrize(
    ("user", "flags"),
    [KINDS[0], *(pytest.param(*k.values, id=k.id, marks=pytest.mark.full) for k in KINDS[1:])],
)


@first_kind
@pytest.mark.parametrize(
    "names", [pytest.param(SOME, id="some"), pytest.param((), id="all", marks=pytest.mark.ways)]
)
async def test_nothing_a_copy_does_reaches_beyond_its_session(
    user: str, flags: tuple[str, ...], names: tuple[str, ...]
) -> None:
    copies = {
        name: f"def park(wake):\n{indent(code, '  ')}\nsuspended.park = park"
        for name, code in COPIES.items()
    }
    attacks = copies | KERNELS
    tried = {name: attacks[name] for name in names or attacks}
    with subprocess.Popen(["sleep", "999"]) as witness, ExitStack() as after:
        after.callback(witness.kill)
        async with serving(user, *flags) as agent:
            other = (await agent.call("create_session", name="other")).data["session"]
            await agent.run("z = 7", checkpoint=True, session=other)
            slots = anyio.Semaphore(6)
            async with anyio.create_task_group() as tasks:

                async def one(name: str, code: str) -> None:
                    async with slots:
                        await attack(agent, name, code)

                for name, code in tried.items():
                    tasks.start_soon(one, name, code)
            assert (await agent.run("print(z)", session=other)).text == "7"
            dead = await agent.run("import os; os.kill(os.getpid(), 9)", session=other)
            assert dead.cell["state_kept"], dead.text
            assert (await agent.run("print(z)", session=other)).text == "7"
            with anyio.fail_after(30):
                while sandboxes() > 1 + (2 if "2" in flags else 0):  # those of the pool
                    await anyio.sleep(0.05)
        assert witness.poll() is None


READERS = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
own = {"1", str(os.getpid())}
found = []
others = [pid for pid in os.listdir("/proc") if pid.isdigit() and pid not in own]
for pid in others:
    for name in ("environ", "maps", "mem", "auxv", "smaps", "pagemap", "io", "syscall", "timers"):
        try:
            with open(f"/proc/{pid}/{name}", "rb", 0) as file:
                if name == "mem" or file.read(1): found.append(name)
        except OSError: pass
    for name in ("exe", "root", "cwd", "ns/pid", "ns/mnt", "fd/0", "fd/3"):
        try: os.readlink(f"/proc/{pid}/{name}"); found.append(name)
        except OSError: pass
        try: os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY)); found.append("open " + name)
        except OSError: pass
    pidfd = os.pidfd_open(int(pid))
    for name, number in (("ptrace", 101), ("process_vm_readv", 310), ("process_vm_writev", 311),
                         ("kcmp", 312), ("process_madvise", 440), ("pidfd_getfd", 438)):
        by_fd = name in ("pidfd_getfd", "process_madvise")
        first = 0x4206 if name == "ptrace" else pidfd if by_fd else int(pid)
        second = int(pid) if name == "ptrace" else 0
        if libc.syscall(number, first, second, 0, 0, 0, 0) != -1: found.append(name)
    libc.prlimit(int(pid), 7, (ctypes.c_ulong * 2)(64, 64), None)
    os.kill(int(pid), signal.SIGSTOP)
print(len(others), found)
"""


@first_kind
async def test_code_looks_into_no_copy_and_one_that_it_has_stopped_still_wakes(
    user: str, flags: tuple[str, ...]
) -> None:
    async with serving(user, *flags) as agent:
        await agent.run("x = 5")
        await agent.run("y = 6", checkpoint=True)
        looked = await agent.run(READERS)
        assert looked.status == "ok", looked.text
        number, found = looked.text.split(" ", 1)
        assert int(number) >= 1
        assert found == "[]"
        dead = await agent.run("os.kill(os.getpid(), 9)")
        assert dead.cell["state_kept"], dead.text
        assert (await agent.run("print(x)")).text == "5"
        killed = "import os\nfor pid in os.listdir('/proc'):\n  if pid.isdigit():\n"
        killed += "    if int(pid) not in (1, os.getpid()): os.kill(int(pid), 9)"
        await agent.run(killed)
        await agent.run("y = 7")
        dead = await agent.run("os.kill(os.getpid(), 9)")
        assert dead.status == "killed"
        after = await agent.run("print('x' in dir())")
        assert after.text.startswith(str(dead.cell["state_kept"])), (dead.text, after.text)
