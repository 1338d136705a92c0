"""Sessions that go back to a checkpoint when their kernel dies, by the eyes of a client."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest
from mcp.client import Client

from kernel_mcp.sessions.checkpoints import RESTING
from tests.integration.agent import Agent, Answer, command, notices
from tests.integration.agent import agent as serving
from tests.integration.memory import server_pid
from tests.integration.processes import descendants, running
from tests.integration.servers import Servers

pytestmark = [pytest.mark.anyio]

FLAGS = ("--allow", "*", "--warm", "0")

AT_WORK = "import time\ntime.sleep(1.05)"
"""A cell that is worth a checkpoint."""


def told(answer: Answer) -> str:
    return "\n".join(notices(answer))


async def checkpoints(agent: Agent, session: str = "") -> str:
    """Return the part of `info` about the checkpoints of a session."""
    return str((await agent.call("info", session=session)).data["checkpoints"])


async def until_checkpoint(agent: Agent, cell: int = 1, session: str = "") -> None:
    """Pause as an agent does that thinks, until there is a checkpoint as after this cell."""
    with anyio.fail_after(60):
        while not (await checkpoints(agent, session)).endswith(f" {cell}"):
            await anyio.sleep(0.1)


async def test_a_killed_cell_costs_the_cell(servers: Servers) -> None:
    async with servers.agent(*FLAGS, pauses=False) as agent:
        await agent.run(f"x = 5\n{AT_WORK}")
        dead = await agent.run("print('last words')\nimport os\nx = 0\nos.kill(os.getpid(), 9)")
        assert dead.status == "killed"
        assert "last words" in dead.text
        assert "killed by SIGKILL. Variables are as after cell 1; run cell 2 again" in told(dead)
        assert "Files were not rolled back" in told(dead)
        assert (dead.cell["state_kept"], dead.cell["state_as_of"]) == (True, 1)
        assert dead.cell["lost"] == []
        after = await agent.run("print(x)")
        assert (after.text, notices(after)) == ("5", [])

        await agent.run("y = 6")
        dead = await agent.run("import ctypes\nctypes.string_at(0)")
        assert "run cells 3–5 again" in told(dead)  # noqa: RUF001
        assert "Gone with that: y" in told(dead)
        assert (dead.cell["state_kept"], dead.cell["state_as_of"]) == (True, 1)
        assert dead.cell["lost"] == ["y"]
        assert (await agent.run("print(x, 'y' in dir())")).text == "5 False"

        stuck = "while True:\n  try:\n    time.sleep(9)\n  except KeyboardInterrupt: pass"
        dead = await agent.run(stuck, timeout=0.3)
        assert "did not stop within" in told(dead)
        assert (dead.status, dead.cell["state_as_of"]) == ("killed", 1)
        assert (await agent.run("print(x)")).text == "5"

        listed = (await agent.call("list_variables")).data["variables"]
        assert [each["name"] for each in listed] == ["x", "time"]
        lost = await agent.call("reset")
        assert "Lost" in lost.text or "gone" in lost.text
        dead = await agent.run("import os\nos._exit(3)")
        assert "All variables" in told(dead)


async def test_a_cell_that_waits_behind_a_killed_one_is_told_what_it_builds_on(
    servers: Servers,
) -> None:
    async with servers.agent(*FLAGS, pauses=False) as agent:
        await agent.run(f"x = 5\n{AT_WORK}")
        await agent.run("y = 6")
        answers: dict[str, Answer] = {}

        async def call(name: str, code: str) -> None:
            answers[name] = await agent.run(code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, "dies", "time.sleep(0.5)\nimport os\nos.abort()")
            await anyio.sleep(0.2)
            tasks.start_soon(call, "follows", "print('y' in dir())")
        assert answers["follows"].text.startswith("False")
        assert "Variables are as after cell 1" in told(answers["follows"])
        assert answers["follows"].cell["lost"] == ["y"]


async def test_a_kernel_that_dies_between_cells_comes_back(servers: Servers) -> None:
    async with servers.agent(*FLAGS, pauses=False) as agent:
        await agent.run(f"x = 5\n{AT_WORK}")
        await agent.run("import threading, os\nthreading.Timer(0.2, os._exit, [4]).start()")
        await anyio.sleep(0.5)
        after = await agent.run("print(x)")
        assert after.text.startswith("5")
        assert "exited with code 4 between cells. Variables are as after cell 1" in told(after)
        assert "run cell 2 again" in told(after)


BEATS = """
import ctypes, threading, time
def beat():
    while True:
        with open("beats", "a") as file:
            file.write(".")
        time.sleep(0.01)
threading.Thread(target=beat).start()
ctypes.CDLL(None).pthread_exit(None)
"""


async def test_a_program_whose_first_thread_has_ended_goes_with_its_kernel(
    servers: Servers,
) -> None:
    """Linux calls it a zombie, as if all of it had ended."""
    beating = "len(open('beats').read())"
    async with servers.agent(*FLAGS, pauses=False) as agent:
        await agent.run(f"x = 5\n{AT_WORK}")
        await until_checkpoint(agent)
        await agent.run(
            "import os, subprocess, sys\n"
            f"program = subprocess.Popen([sys.executable, '-c', {BEATS!r}])\n"
            "while not os.path.exists('beats'): time.sleep(0.01)\n"
            "while open(f'/proc/{program.pid}/stat').read().split()[2] != 'Z': time.sleep(0.01)"
        )
        dead = await agent.run("os._exit(3)")
        assert dead.cell["state_kept"], dead.text
        after = await agent.run(f"first = {beating}\ntime.sleep(1)\nprint(x, {beating} - first)")
        assert after.text == "5 0"


WITHOUT_MEMORY = """
import sys
from kernel_mcp.sessions import checkpoints
checkpoints.RESTING_MEMORY = 0.0
from kernel_mcp.cli import main
sys.exit(main())
"""


@pytest.mark.ways
async def test_of_many_sessions_that_rest_the_last_keep_copies_and_the_others_get_new_ones() -> (
    None
):
    start = command("--allow", "*", "--warm", "0")
    start.args[:2] = ["-c", WITHOUT_MEMORY]
    async with Client(start) as client:
        agent = Agent(client)
        sessions = []
        for number in range(RESTING + 1):
            made = await agent.call("create_session")
            sessions.append(made.data["session"])
            await agent.run(f"x = {number}", session=sessions[-1])
            await until_checkpoint(agent, session=sessions[-1])
        found = [await checkpoints(agent, session) for session in sessions]
        assert ["none now" in each for each in found] == [True, *[False] * RESTING]
        dead = await agent.run("import os\nos._exit(1)", session=sessions[0])
        assert dead.cell["state_as_of"] == 1
        assert (await agent.run("x", session=sessions[0])).text == "0"


DIES_ONCE = """
import os
from kernel_specs.restricted.checkpoints import after_fork
restore = after_fork.ForkState.restore
def dying(state, **options):
    if not os.path.exists('died'):
        open('died', 'w').close()
        os.kill(os.getpid(), 9)
    return restore(state, **options)
after_fork.ForkState.restore = dying
x = 5
"""


async def test_a_kernel_that_dies_while_it_comes_back_is_woken_again(servers: Servers) -> None:
    async with servers.agent(*FLAGS, pauses=False) as agent:
        await agent.run(DIES_ONCE)
        await agent.run("1", checkpoint=True)
        dead = await agent.run("os._exit(1)")
        assert (dead.cell["state_kept"], dead.cell["state_as_of"]) == (True, 1)
        assert (await agent.run("print(x, os.listdir())")).text == "5 ['died']"


async def test_a_pause_is_used_and_a_thread_is_named_once(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        await agent.run("x = 5")
        await until_checkpoint(agent)
        await agent.run("x = 6")
        await until_checkpoint(agent, 2)
        dead = await agent.run("import os\nos._exit(1)")
        assert dead.cell["state_as_of"] == 2

        await agent.run(
            "import threading\nstop = threading.Event()\n"
            f"threading.Thread(target=stop.wait, name='counting').start()\n{AT_WORK}"
        )
        first = await agent.run("1")
        again = await agent.run(f"{AT_WORK}\n2")
        later = await agent.run("3")
        assert "the thread 'counting'" in told(first)
        assert not notices(again)
        assert not notices(later)


DATABASE = """
import fcntl, os, sqlite3
log = open('log', 'w')
fcntl.flock(log, fcntl.LOCK_EX)
con = sqlite3.connect('s.db')
same = sqlite3.connect('same.db')
same.execute('create table t (a)')
con.execute('create table t (a, b)')
con.executemany('insert into t values (?, ?)', [(i, 'x' * 500) for i in range(2000)])
con.commit()
con.execute('pragma cache_size = 10')
_ = con.execute("update t set b = 'open' || b where a < 50")
"""
CHANGES = """
log.write('more'); log.flush()
con.commit()
con.execute('delete from t where a > 100')
con.commit()
con.execute('vacuum')
con.execute('create table u as select * from t')
con.commit()
"""
COUNTS = "[con.execute('select count(*) from ' + each).fetchone()[0] for each in ('t', 'u')]"
INTEGRITY = "con.execute('pragma integrity_check').fetchone()[0]"


async def test_what_a_library_knew_of_a_file_is_not_written_over_what_it_has_become(
    servers: Servers,
) -> None:
    async with servers.agent(*FLAGS, pauses=False) as agent:
        await agent.run(DATABASE)
        await agent.run("1", checkpoint=True)
        await agent.run(CHANGES)
        dead = await agent.run("os._exit(1)")
        assert "/workspace/s.db, " in told(dead)
        assert "connect anew" in told(dead)
        assert "same.db" not in told(dead)
        assert "/workspace/log" not in told(dead), "Python knows no more of it than a position"
        held = await agent.run("fcntl.flock(os.open('log', os.O_RDONLY), fcntl.LOCK_EX)")
        assert held.status == "ok", "a checkpoint holds no locks"
        assert (await agent.run("same.execute('insert into t values (1)')")).status == "ok"
        for code in ("con.execute('select * from t')", "con.execute('delete from t')"):
            assert "OperationalError" in (await agent.run(code)).text
        await agent.run("con.close(); con = sqlite3.connect('s.db')")
        assert (await agent.run(f"print({COUNTS}, {INTEGRITY})")).text == "[101, 101] ok"

        [branch] = (await agent.call("branch", n=1)).data["branches"]
        handle = branch if isinstance(branch, str) else branch["session"]
        there = await agent.run("con.execute('delete from u')", session=handle)
        assert "OperationalError" in there.text
        assert "connect anew" in told(there)
        here = await agent.run(f"print({COUNTS}, {INTEGRITY})")
        assert (here.text, notices(here)) == ("[101, 101] ok", [])


FORGETFUL = """
import os, tempfile
def opened(text):
    file = tempfile.TemporaryFile(dir='.')
    file.write(text)
    file.seek(2)
    return file
forgotten, replaced, kept = opened(b'forgotten'), opened(b'replaced'), opened(b'kept')
def forget():
    forgotten.close()
    other = os.open('/etc/hostname', os.O_RDONLY)
    os.dup2(other, replaced.fileno())
    os.close(other)
os.register_at_fork(after_in_child=forget)
x = 1
"""


async def test_a_default_timeout_of_sockets_is_not_for_those_of_the_kernel(
    servers: Servers,
) -> None:
    async with servers.agent(*FLAGS, pauses=False) as agent:
        await agent.run("import socket; socket.setdefaulttimeout(0.01); x = 1")
        answer = await agent.run("x = 2", checkpoint=True)
        assert notices(answer) == []
        assert not (await agent.call("undo")).failed
        assert (await agent.run("x, socket.getdefaulttimeout()")).text == "(1, 0.01)"


async def test_a_package_that_closes_its_files_in_a_fork_costs_no_variable(
    servers: Servers,
) -> None:
    async with servers.agent(*FLAGS, pauses=False) as agent:
        assert (await agent.run(FORGETFUL)).status == "ok"
        await agent.run("1", checkpoint=True)
        dead = await agent.run("os._exit(1)")
        assert dead.cell["state_kept"], told(dead)
        found = await agent.run("print(x, forgotten.closed, kept.read())")
        assert found.text == "1 True b'pt'"
        await agent.run("x = 2")
        await agent.call("undo")
        assert (await agent.run("x")).text == "1"


NATIVE_THREAD = """
import ctypes
libc = ctypes.CDLL(None)
thread = ctypes.c_void_p()
libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)
"""
RAW_THREAD = """
import _thread, threading
held = _thread.allocate_lock()
_ = held.acquire()
def wait():
    threading.current_thread()  # Python makes an object for it then
    held.acquire()
_ = _thread.start_new_thread(wait, ())
"""


async def test_threads_that_no_object_stands_for_are_in_the_way(servers: Servers) -> None:
    async with servers.agent(*FLAGS, pauses=False) as agent:
        await agent.run(NATIVE_THREAD)
        asked = await agent.run("1", checkpoint=True)
        assert "it has threads of an unknown library" in told(asked)
        await agent.call("reset")
        await agent.run(RAW_THREAD)
        asked = await agent.run("held.release()", checkpoint=True)
        assert "it has the thread 'Dummy-" in told(asked)
        await agent.run("x = 5")
        asked = await agent.run("x = 6", checkpoint=True)
        assert not notices(asked), "that thread has ended"
        dead = await agent.run("import os; os._exit(1)")
        assert dead.cell["state_kept"]
        assert (await agent.run("print(x)")).text == "5"


@pytest.mark.ways
async def test_the_session_goes_on_after_exhausting_memory_and_processes() -> None:
    async with serving("--allow", "*", "--warm", "0", "--memory", "512M") as agent:
        await agent.run(f"import os, time\nblock = bytearray(b'x') * (180 << 20)\n{AT_WORK}")
        # in place: a copy of all of it; of another type, the new value would be copied once more
        assert (await agent.run("block[:] = bytearray(len(block)); block[0]")).status == "ok"
        await agent.run("block[:] = bytearray(b'y') * len(block)\ntime.sleep(1.05)")
        hungry = (
            "for _ in range(4):\n  if os.fork() == 0:\n"
            "    more = b'z' * (400 << 20); time.sleep(60)\ntime.sleep(20)"
        )
        await agent.run(hungry, timeout=3)
        left = await agent.run("print(len(block), block[-1:])")
        assert left.text.startswith("188743680 bytearray(b'y')") or "lost" in told(left)
        dead = await agent.run(
            "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "while True:\n  try: os.fork()\n  except OSError: pass",
            timeout=1,
        )
        assert dead.status == "killed"
        after = await agent.run("print(len(block))")
        assert after.text.startswith("188743680") or "lost" in told(dead)


FULL_MACHINE = """
import sys
from kernel_mcp.limits import groups
groups.available_memory = lambda: 0
from kernel_mcp.cli import main
sys.exit(main())
"""


@pytest.mark.ways
async def test_where_memory_is_short_the_checkpoint_goes_and_not_the_cell() -> None:
    served = command("--warm", "0", "--memory", "512M")
    served.args[:2] = ["-c", FULL_MACHINE]
    async with Client(served) as client:
        agent = Agent(client)
        await agent.run("import os\nblock = bytearray(b'x') * (400 << 20)")
        assert not notices(await agent.run("n = 1", checkpoint=True))
        writing = await agent.run("for at in range(0, len(block), 4096): block[at] = 1")
        assert (writing.status, notices(writing)) == ("ok", []), "more than the limit allows"
        assert (await agent.run("print(len(block), block[:2])")).text == (
            "419430400 bytearray(b'\\x01x')"
        )
        dead = await agent.run("os._exit(1)")
        if dead.cell["state_kept"]:  # without control groups nothing has to go
            assert "Variables are as after cell" in told(dead)
        else:
            assert "block" in dead.cell["lost"]


@pytest.mark.ways
async def test_without_templates_it_is_said_that_there_are_none() -> None:
    async with serving("--allow", "*", "--warm", "0", "--no-template") as agent:
        await agent.run(f"x = 5\n{AT_WORK}")
        none = "there are no checkpoints of this kernel: it was not forked from a template"
        assert none in (await agent.call("info")).data["checkpoints"]
        undone = await agent.call("undo")
        assert "as no kernel of this server is (--no-template" in undone.text
        assert "reset gives" not in undone.text
        asked = await agent.run("1", checkpoint=True)
        assert f"No checkpoint was made before this cell: {none}" in told(asked)
        dead = await agent.run("import os\nos._exit(3)")
        assert "All variables" in told(dead)
        assert dead.cell["state_kept"] is False


@pytest.mark.ways
async def test_a_session_with_packages_of_its_own_is_told_that_it_has_no_template() -> None:
    async with serving(*FLAGS, "--allow-install", "six") as agent:
        session = (await agent.call("create_session", packages=["six"])).data["session"]
        for code in ("x = 1", "x = 2"):
            await agent.run(code, session=session)
        undone = await agent.call("undo", session=session)
        assert "this session has a Python or packages of its own" in undone.text
        assert "--no-template" not in undone.text


def held(server: int, state: Path) -> tuple[int, ...]:
    """How many processes, descriptors, control groups, files of state and mounts a server has."""
    return (
        len(descendants(server)),
        len([*Path(f"/proc/{server}/fd").iterdir()]),
        len(groups_of(server)),
        len([*state.rglob("*")]),
        len(Path(f"/proc/{server}/mountinfo").read_text().splitlines()),
    )


def groups_of(server: int) -> list[Path]:
    """The control groups of its kernels, in every hierarchy; those of other servers come and go."""
    return [
        Path(folder, name)
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        if Path(folder).name.startswith(f"kernel-mcp-{server}-")
        for name in names
        if name.startswith("k-")
    ]


@pytest.mark.parametrize("total", [25, pytest.param(1000, marks=pytest.mark.full)])
async def test_deaths_in_a_row_leave_nothing_behind(total: int, tmp_path: Path) -> None:
    flags = ("--allow", "*", "--warm", "0", "--state-dir", str(tmp_path))
    async with serving(*flags) as agent:
        await agent.run("import os, subprocess\nn = 0")
        server = server_pid()
        seen: list[tuple[int, ...]] = []
        for number in range(total):
            assert (await agent.run(f"n += 1; f{number} = open('note', 'w')")).status == "ok"
            dies = "subprocess.Popen(['sleep', '999']); os.kill(os.getpid(), 9)"
            dead = await agent.run(dies, checkpoint=True)
            assert dead.cell["state_kept"], (number, dead.text)
            seen.append(held(server, tmp_path))
        assert (await agent.run("print(n)")).text == str(total)
        for early, late in zip(
            zip(*seen[5:15], strict=True), zip(*seen[-10:], strict=True), strict=True
        ):
            assert min(late) <= max(early)  # some of them while a checkpoint was being made
        assert groups_of(server) or os.geteuid() != 0
        await agent.call("close_session")
        assert groups_of(server) == []
        below = [server, *descendants(server)]
        os.kill(server, signal.SIGKILL)
        with anyio.fail_after(60):
            while any(running(pid) for pid in below):
                await anyio.sleep(0.05)
