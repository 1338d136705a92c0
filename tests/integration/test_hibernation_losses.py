"""A variable that hibernation cannot save is named, and costs nothing else."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tests.integration.agent import ANALYSIS, Agent, Answer, agent
from tests.integration.servers import Servers
from tests.integration.sleepers import IDLE, has_file, state_of, woken

pytestmark = [pytest.mark.anyio]


ONE = ("--max-sessions", "1")


async def forced_out(notebook: Agent) -> None:
    """Hibernate the only session by a second one, as few sessions may have a kernel."""
    with anyio.fail_after(300):
        while (answer := await notebook.call("create_session")).failed:
            assert "is being hibernated" in answer.text  # a busy machine takes long for limits
    other = answer.data["session"]
    assert (await state_of(notebook))["state"] == "hibernated"
    await notebook.call("close_session", session=other)


async def forced(notebook: Agent, code: str) -> Answer:
    """The answer of the cell that wakes the session after it was pushed out."""
    await forced_out(notebook)
    return await notebook.run(code)


OUTSIDE = """
import threading
lock = threading.Lock()
gen = (i for i in range(3))
file = open("data.txt", "w")
thread = threading.Thread(target=print)
class Holder:
    pass
holder = Holder()
holder.inside = {"deep": [lock]}
def uses(lock=lock):
    return lock
good = 1
"""


async def test_what_cannot_come_back_is_named_with_its_kind(servers: Servers) -> None:
    async with servers.agent(*ONE) as notebook:
        await notebook.run(OUTSIDE)
        answer = await forced(notebook, "good")
        assert "Back: threading, Holder, good (3)." in answer.text
        for lost in (
            "lock (thread lock)",
            "gen (generator)",
            "file (open file)",
            "thread (thread)",
            "holder (holds a thread lock)",
            "uses (holds a thread lock)",
        ):
            assert lost in answer.text
        assert "create them again" in answer.text
        assert answer.cell["state_kept"] is False
        assert "NameError" in (await notebook.run("lock")).text


HOSTILE = """
class Raises:
    def __reduce__(self):
        raise RuntimeError("not me\\nsecond line")
class Interrupts:
    def __reduce__(self):
        raise KeyboardInterrupt
class Exits:
    def __reduce__(self):
        raise SystemExit(3)
class Loops:
    def __reduce__(self):
        while True:
            pass
class Unreadable:
    def __init__(self):
        self.x = 1
    def __setstate__(self, state):
        raise RuntimeError("cannot be read")
class SlowToRead(Unreadable):
    def __setstate__(self, state):
        while True:
            pass
before = 1
raises, interrupts, exits, loops, unreadable, slow = (
    Raises(), Interrupts(), Exits(), Loops(), Unreadable(), SlowToRead()
)
after = [before]
"""


@pytest.mark.full
async def test_hostile_objects_cost_nothing_but_themselves(servers: Servers) -> None:
    async with servers.agent(*ONE) as notebook:
        await notebook.run(HOSTILE)
        answer = await forced(notebook, "before, after, Raises")
        assert "(1, [1], __main__.Raises)" in answer.text
        for lost in (
            "raises (RuntimeError: not me second line)",
            "interrupts (KeyboardInterrupt",
            "exits (SystemExit: 3)",
            "loops (took longer than 15.0 s)",
            "unreadable (RuntimeError: cannot be read)",
            "slow (took longer than 5.0 s)",
        ):
            assert lost in answer.text


@pytest.mark.ways
async def test_a_variable_that_is_too_large_is_left_out(tmp_path: Path) -> None:
    async with agent("--persist", "8M,1d", "--state-dir", str(tmp_path), *ONE) as notebook:
        await notebook.run("huge = bytearray(9_000_000); big = 'x' * 7_000_000; small = [1]")
        answer = await forced(notebook, "len(big), small")
        assert "(7000000, [1])" in answer.text
        assert "huge (too large: a dump takes 8 MB in all)" in answer.text


async def test_a_module_of_the_workspace_comes_back(servers: Servers) -> None:
    async with servers.agent(*IDLE) as notebook:
        await notebook.call("write_file", path="mine.py", content="class Thing:\n    size = 3\n")
        await notebook.run("import mine; thing = mine.Thing(); thing.size = 4")
        answer = await woken(notebook, "thing.size, type(thing) is mine.Thing")
        assert "(4, True)" in answer.text
        assert "Back: mine, thing (2)" in answer.text


@pytest.mark.ways
async def test_a_module_the_policy_refuses_does_not_come_back(servers: Servers) -> None:
    async with servers.agent("--profile", "guarded", *ONE) as notebook:
        await notebook.run("import random; smuggled = vars(random)['_os']; x = 1")
        answer = await forced(notebook, "x")
        assert "smuggled (ModuleNotAllowedError: import of 'os' is not allowed" in answer.text
        assert "Back: random, x (2)" in answer.text


DIES = """
import os, threading
open('kept.txt', 'w').write('kept')
class Dies:
    own = os.getpid()
    def __reduce__(self):
        if os.getpid() == self.own: os._exit(7)
        return list, ()
x = Dies()
"""
UNFIT = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
"""Keeps a kernel from being forked."""


async def test_a_kernel_that_dies_while_saving_is_reported_as_lost(servers: Servers) -> None:
    async with servers.agent("--allow", "os", "--persist", "off", *ONE) as notebook:
        await notebook.run(DIES + UNFIT)
        answer = await forced(notebook, "open('kept.txt').read()")
        assert "'kept'" in answer.text
        assert "could not be saved" in answer.text
        assert "code 7" in answer.text
        assert "All variables of earlier cells are lost" in answer.text
        assert answer.cell["state_kept"] is False
        assert "NameError" in (await notebook.run("x")).text


KILLS = """
import ctypes, os, time
class Tells:
    def __reduce__(self):
        open('tried', 'w').close()
        return list, ()
class Kills:
    def __init__(self, how): self.how = how
    def __reduce__(self):
        print("pickling")
        if self.how == "exits":
            os._exit(7)
        if self.how == "crashes":
            ctypes.string_at(0)
        sum(range(10 ** 11))
common = ["common"]
tells = Tells()
before, after = {"x": common}, [common]
"""


@pytest.mark.ways
@pytest.mark.parametrize(
    "names", [("exits", "crashes"), pytest.param(("blocks",), marks=pytest.mark.full)]
)
async def test_what_ends_the_kernel_that_pickles_it_costs_only_itself(
    servers: Servers, names: tuple[str, ...]
) -> None:
    async with servers.agent("--allow", "os,ctypes", "--grace", "1", *IDLE, *ONE) as notebook:
        await notebook.run(KILLS)
        await has_file(notebook, "tried")
        made = "\n".join(f"{name} = Kills({name!r})" for name in names)
        answer = await notebook.run(f"{made}\n{names[0]}.how, before['x'] is common")
        assert answer.text == f"({names[0]!r}, True)"
        assert answer.cell["state_kept"] is True
        answer = await forced(notebook, "before['x'] is common is after[0]")
        assert answer.text.startswith("True\n")
        assert "pickling" not in answer.text
        for name in names:
            assert f"{name} (ended the process that stored it" in answer.text


DEADLY = """
import ctypes, os, time
class Deadly:
    def __init__(self, how): self.how = how
    def __setstate__(self, state):
        if state["how"] == "exit":
            os._exit(7)
        if state["how"] == "crash":
            ctypes.string_at(0)
        if state["how"] == "memory":
            self.much = [bytearray(1 << 20) for _ in range(1 << 20)]
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                pass
common = ["common"]
before, exits, crashes, eats = {"x": common}, Deadly("exit"), Deadly("crash"), Deadly("memory")
after = [common]
"""


@pytest.mark.ways
async def test_what_ends_the_kernel_that_wakes_costs_what_it_shares_with(servers: Servers) -> None:
    async with servers.agent("--allow", "os,ctypes", "--memory", "300M", *ONE) as notebook:
        await notebook.run(DEADLY)
        answer = await forced(notebook, "before['x'] is common is after[0]")
        assert answer.text.startswith("True\n")
        assert "Back: ctypes, os, time, Deadly, common, before, after (7)." in answer.text
        assert "exits (ended the kernel that read it: its kernel ended meanwhile" in answer.text
        assert answer.cell["lost"] == ["exits", "crashes", "eats"]
        assert answer.text.count("shares objects with one that ended the kernel") == 2
        assert answer.cell["state_kept"] is False


LOSES = """
import threading
lock, kept = threading.Lock(), [1]
open('/tmp/mine.csv', 'w').write('x')
class Tells:
    def __reduce__(self):
        open('tried', 'w').close()
        return list, ()
tells = Tells()
"""


@pytest.mark.ways
async def test_nothing_is_lost_while_nothing_forces_a_kernel_out(servers: Servers) -> None:
    async with servers.agent(*IDLE, *ONE) as notebook:
        await notebook.run(LOSES)
        await has_file(notebook, "tried")
        answer = await notebook.run("lock.acquire(), kept")
        assert answer.text == "(True, [1])"
        assert answer.cell["state_kept"] is True
        answer = await forced(notebook, "'lock' in dir(), kept")
        assert answer.text.startswith("(False, [1])\n")
        assert "lock (thread lock)" in answer.text
        assert "/tmp/mine.csv (1)" in answer.text
        assert answer.cell["state_kept"] is False


SHARED = """
import numpy as np, pandas as pd
base = np.arange(100000.0).reshape(100, 1000)
row, rest, flat = base[3], base[::-2, ::3], base.reshape(-1)
columns = np.asfortranarray(np.arange(12).reshape(3, 4))
column = columns[:, 1]
objects = np.array([[1], None, "x"], dtype=object)
tail = objects[1:]
days = np.array(["2024-01-01", "2024-01-02"], dtype="M8[ns]")
day = days[1:]
memory = bytearray(1000)
window = np.frombuffer(memory, "u1")[10:20]
frame = pd.DataFrame({"a": np.arange(1000), "b": ["x", "y"] * 500, "c": np.arange(1000.0)})
alias, block = frame, frame._mgr.blocks[0].values
values = {"base": base, "rows": [row]}
import array
plain = array.array("d", [1, 2, 3])
copied = np.frombuffer(plain)
"""


STILL_SHARED = """
base[3, 5], base[99, 0], columns[0, 1], objects[1], days[1], memory[12] = -7, 5, 99, 1, days[0], 7
[row[5] == -7, rest[0, 0] == 5, flat[3005] == -7, column[0] == 99, tail[0] == 1,
 day[0] == days[0], window[2] == 7, values["base"] is base, values["rows"][0] is row,
 alias is frame, np.shares_memory(block, frame._mgr.blocks[0].values)].count(True)
"""


@pytest.mark.ways
async def test_arrays_share_memory_again_or_are_named_as_copies(servers: Servers) -> None:
    async with servers.agent("--allow", ANALYSIS, *IDLE) as notebook:
        await notebook.run(SHARED)
        for copies in (True, False):
            answer = await woken(notebook, STILL_SHARED)
            assert answer.text.startswith("11\n")
            assert ("copied (a copy now: it shared memory" in answer.text) is copies


@pytest.mark.ways
async def test_names_beyond_those_that_are_kept_are_told(servers: Servers) -> None:
    async with servers.agent(*ONE) as notebook:
        await notebook.run("globals().update({f'v{i}': i for i in range(2010)})")
        answer = await forced(notebook, "v1999")
        assert answer.text.startswith("1999\n")
        assert "v2000 (only 2,000 variables are kept), v2001" in answer.text
        assert "v2009 (only" in answer.text


WORK = """
import asyncio, threading, time
stop = False
def work():
    while not stop:
        time.sleep(0.1)
async def tick():
    while not stop:
        await asyncio.sleep(0.1)
threading.Thread(target=work, name="worker", daemon=True).start()
tasks = len([asyncio.create_task(tick())])
"""


@pytest.mark.ways
async def test_work_that_no_variable_holds_is_named_and_keeps_an_idle_session_awake(
    servers: Servers,
) -> None:
    async with servers.agent(*ONE, "--idle-timeout", "1s") as notebook:
        await notebook.run(WORK)
        await anyio.sleep(4)
        assert (await state_of(notebook))["state"] == "idle"
        answer = await forced(notebook, "tasks")
        assert "worker (a running thread)" in answer.text
        assert "tick (a running task)" in answer.text
        assert {"worker", "tick"} <= set(answer.cell["lost"])
        with anyio.fail_after(60):  # and nothing of it is left
            while (await state_of(notebook))["state"] != "hibernated":
                await anyio.sleep(0.1)
        assert "running" not in (await notebook.run("tasks")).text
