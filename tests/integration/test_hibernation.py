"""Sessions that sleep and wake, in real kernels through a real client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.integration.agent import Agent, Answer, agent

pytestmark = [pytest.mark.anyio]

IDLE = ("--idle-timeout", "1")
ONE = ("--max-sessions", "1")


async def state_of(notebook: Agent, session: str = "") -> dict[str, Any]:
    """What `list_sessions` says of a session, the only one by default."""
    found = (await notebook.call("list_sessions")).data["sessions"]
    return next(item for item in found if session in ("", item["session"]))


async def asleep(notebook: Agent, session: str = "") -> None:
    """Wait until a session has been hibernated."""
    with anyio.fail_after(60):
        while (await state_of(notebook, session))["state"] != "hibernated":
            await anyio.sleep(0.02)


async def has_file(notebook: Agent, path: str) -> None:
    """Wait until the workspace holds a file."""
    with anyio.fail_after(60):
        while (await notebook.call("read_file", path=path)).failed:
            await anyio.sleep(0.02)


async def woken(notebook: Agent, code: str) -> Answer:
    """The answer of the cell that wakes the session."""
    await asleep(notebook)
    return await notebook.run(code)


async def forced_out(notebook: Agent) -> None:
    """Have another session push the only one out, as few sessions may have a kernel."""
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


DEFINITIONS = """
import dataclasses, enum, functools, json as j, math, typing, xml.etree.ElementTree
import numpy as np, pandas as pd
df = pd.DataFrame({"a": np.arange(1000), "b": ["x", "y"] * 500})
column = df["a"].to_numpy()
shared = [1, 2]
alias = {"list": shared}
base = 10
def f(x):
    return x + base
def counter():
    n = 0
    def more():
        nonlocal n
        n += 1
        return n
    def now():
        return n
    return more, now
more, now = counter()
more()
double = lambda x: f(x) * 2
@functools.lru_cache(maxsize=7)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
class Color(enum.Enum):
    RED = 1
    BLUE = 2
red = Color.RED
@dataclasses.dataclass
class Point:
    x: int
    y: int = 0
    tags: list = dataclasses.field(default_factory=list)
    def norm(self):
        return math.hypot(self.x, self.y)
point = Point(3, 4)
class Animal:
    def name(self):
        return "animal"
    @functools.cached_property
    def slow(self):
        return 42
class Cat(Animal):
    def name(self):
        return "cat, " + super().name()
cat = Cat()
ring = []
ring.append(ring)
_private = "kept too"
UserId = typing.NewType("UserId", int)
@functools.singledispatch
def kind(x):
    return "other"
@kind.register
def integer(x: int):
    return "integer"
class Refused(Exception):
    def __init__(self, who, why):
        super().__init__(f"{who}: {why}")
        self.who = who
refused = Refused("me", "no")
"""

BACK = {
    "df.shape, int(df['a'].sum()), df['b'][1]": "((1000, 2), 499500, 'y')",
    "column[-1] + 1": "np.int64(1000)",
    "alias['list'] is shared": "True",
    "f(1), double(1)": "(11, 22)",
    "base = 20; f(1)": "21",
    "more(), now()": "(2, 2)",
    "fib(60), fib.cache_parameters()['maxsize']": "(1548008755920, 7)",
    "red is Color.RED, Color(2)": "(True, <Color.BLUE: 2>)",
    "point, point.norm(), point == Point(3, 4), isinstance(point, Point)": (
        "(Point(x=3, y=4, tags=[]), 5.0, True, True)"
    ),
    "dataclasses.fields(Point)[0].default is dataclasses.MISSING": "True",
    "cat.name(), cat.slow, isinstance(cat, Animal)": "('cat, animal', 42, True)",
    "ring[0] is ring": "True",
    "_private": "'kept too'",
    "UserId(3), kind(1), kind('a')": "(3, 'integer', 'other')",
    "refused.who, str(refused)": "('me', 'me: no')",
    "j.loads('[1]'), xml.etree.ElementTree.__name__": "([1], 'xml.etree.ElementTree')",
    "Out[2]": "'the result of cell 2'",
}


async def test_what_a_notebook_holds_comes_back_and_works() -> None:
    async with agent("--allow", "numpy,pandas", *IDLE) as notebook:
        await notebook.run(DEFINITIONS)
        await notebook.run("'the result of cell 2'")
        answer = await woken(notebook, "1 + 1")
        assert answer.text.startswith("2\n")
        assert "had been hibernated after 1 s idle" in answer.text
        assert "Not back" not in answer.text
        assert answer.cell["state_kept"] is True
        names = (
            "dataclasses, enum, functools, j, math, typing, xml, np, pd, df, column, shared, alias"
        )
        assert f"Back: {names}" in answer.text
        assert "(34)" in answer.text
        for code, expected in BACK.items():
            assert (await notebook.run(code)).text == expected, code


async def test_cells_and_tracebacks_go_on_as_if_nothing_had_happened() -> None:
    async with agent(*IDLE) as notebook:
        first = await notebook.run("def broken(x):\n    return x / 0  # the culprit")
        answer = await woken(notebook, "import inspect; print(inspect.getsource(broken))")
        assert answer.cell["execution_count"] == first.cell["execution_count"] + 1
        assert "# the culprit" in answer.text
        answer = await notebook.run("broken(1)")
        assert "ZeroDivisionError" in answer.text
        assert "In[1], line 2" in answer.text
        assert "# the culprit" in answer.text
        assert "hibernated" not in answer.text


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


async def test_what_cannot_come_back_is_named_with_its_kind() -> None:
    async with agent(*ONE) as notebook:
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


async def test_hostile_objects_cost_nothing_but_themselves() -> None:
    async with agent(*ONE) as notebook:
        await notebook.run(HOSTILE)
        answer = await forced(notebook, "before, after, Raises")
        assert "(1, [1], __main__.Raises)" in answer.text
        for lost in (
            "raises (RuntimeError: not me second line)",
            "interrupts (KeyboardInterrupt",
            "exits (SystemExit: 3)",
            "loops (took longer than 5.0 s)",
            "unreadable (RuntimeError: cannot be read)",
            "slow (took longer than 5.0 s)",
        ):
            assert lost in answer.text


async def test_a_variable_that_is_too_large_is_left_out() -> None:
    async with agent("--hibernate-size", "8M", *ONE) as notebook:
        await notebook.run("huge = bytearray(9_000_000); big = 'x' * 7_000_000; small = [1]")
        answer = await forced(notebook, "len(big), small")
        assert "(7000000, [1])" in answer.text
        assert "huge (too large: a dump takes 8 MB in all)" in answer.text


async def test_a_module_of_the_workspace_comes_back() -> None:
    async with agent(*IDLE) as notebook:
        await notebook.call("write_file", path="mine.py", content="class Thing:\n    size = 3\n")
        await notebook.run("import mine; thing = mine.Thing(); thing.size = 4")
        answer = await woken(notebook, "thing.size, type(thing) is mine.Thing")
        assert "(4, True)" in answer.text
        assert "Back: mine, thing (2)" in answer.text


async def test_a_module_the_policy_refuses_does_not_come_back() -> None:
    async with agent(*ONE) as notebook:
        await notebook.run("import random; smuggled = vars(random)['_os']; x = 1")
        answer = await forced(notebook, "x")
        assert "smuggled (ModuleNotAllowedError: import of 'os' is not allowed" in answer.text
        assert "Back: random, x (2)" in answer.text


async def test_a_kernel_that_dies_while_saving_is_reported_as_lost() -> None:
    async with agent("--allow", "os", *ONE) as notebook:
        await notebook.run(
            "import os\nopen('kept.txt', 'w').write('kept')\n"
            "class Dies:\n    own = os.getpid()\n    def __reduce__(self):\n"
            "        if os.getpid() == self.own: os._exit(7)\n        return list, ()\nx = Dies()"
        )
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
        if self.how == "exit":
            os._exit(7)
        if self.how == "crash":
            ctypes.string_at(0)
        sum(range(10 ** 11))
common = ["common"]
before, exits, crashes = {"x": common}, Kills("exit"), Kills("crash")
after = [common]
tells = Tells()
"""


async def test_what_ends_the_kernel_that_pickles_it_costs_only_itself() -> None:
    async with agent("--allow", "os,ctypes", "--grace", "1", *IDLE, *ONE) as notebook:
        await notebook.run(KILLS)
        await has_file(notebook, "tried")
        answer = await notebook.run("blocks = Kills('block')\nexits.how, before['x'] is common")
        assert answer.text == "('exit', True)"
        assert answer.cell["state_kept"] is True
        answer = await forced(notebook, "before['x'] is common is after[0]")
        assert answer.text.startswith("True\n")
        assert "pickling" not in answer.text
        for name, reason in (("exits", "code 7"), ("crashes", "SIGSEGV"), ("blocks", "blocked")):
            assert f"{name} (" in answer.text
            assert reason in answer.text


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


async def test_what_ends_the_trial_costs_only_itself() -> None:
    async with agent("--allow", "os,ctypes", "--memory", "300M", *ONE) as notebook:
        await notebook.run(DEADLY)
        answer = await forced(notebook, "before['x'] is common is after[0]")
        assert answer.text.startswith("True\n")
        assert "Back: ctypes, os, time, Deadly, common, before, after (7)." in answer.text
        for name, reason in (("exits", "code 7"), ("crashes", "SIGSEGV"), ("eats", "memory")):
            assert f"{name} (" in answer.text
            assert reason in answer.text
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


async def test_nothing_is_lost_while_nothing_forces_a_kernel_out() -> None:
    async with agent(*IDLE, *ONE) as notebook:
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


async def test_arrays_share_memory_again_or_are_named_as_copies() -> None:
    async with agent("--allow", "numpy,pandas", *IDLE) as notebook:
        await notebook.run(SHARED)
        for copies in (True, False):
            answer = await woken(notebook, STILL_SHARED)
            assert answer.text.startswith("11\n")
            assert ("memory with another object: copied." in answer.text) is copies


async def test_names_beyond_those_that_are_kept_are_told() -> None:
    async with agent(*ONE) as notebook:
        await notebook.run("globals().update({f'v{i}': i for i in range(2010)})")
        answer = await forced(notebook, "v1999")
        assert answer.text.startswith("1999\n")
        assert "v2000 (only 2,000 variables are kept), v2001" in answer.text
        assert "v2009 (only" in answer.text


async def test_a_cell_does_not_wait_for_a_dump_that_has_begun() -> None:
    async with agent(*IDLE) as notebook:
        await notebook.run(
            "import time\nfrom pathlib import Path\nclass Slow:\n    def __reduce__(self):\n"
            "        open('saving', 'w').close()\n        time.sleep(1000)\n"
            "        open('saved', 'w').close()\n        return list, ()\n"
            "x = Slow(); y = 5"
        )
        await has_file(notebook, "saving")
        answer = await notebook.run("y, type(x), Path('saved').exists()")
        assert answer.text == "(5, __main__.Slow, False)"
        assert answer.cell["state_kept"] is True


async def test_a_sleeping_session_answers_without_being_woken() -> None:
    async with agent(*IDLE) as notebook:
        await notebook.run("print('said'); x = [1, 2]; open('a.txt', 'w').write('content')")
        await asleep(notebook)
        state = await state_of(notebook)
        assert state["memory_mb"] == 0
        assert state["cells"] == 1
        session = state["session"]
        files = (await notebook.call("list_files")).data["entries"]
        assert [entry["path"] for entry in files] == ["a.txt"]
        assert (await notebook.call("read_file", path="a.txt")).text == "content"
        log = await notebook.call("read_file", path=f"kernel://{session}/cells/1")
        assert "said" in log.text
        listed = (await notebook.call("list_variables")).data
        assert [item["name"] for item in listed["variables"]] == ["x"]
        assert listed["variables"][0]["preview"] == "[1, 2]"
        assert "hibernated" in listed["note"]
        await notebook.call("write_file", path="b.txt", content="new")
        assert "Nothing is running" in (await notebook.call("interrupt")).text
        assert (await state_of(notebook))["state"] == "hibernated"
        assert "('new', [1, 2])" in (await notebook.run("open('b.txt').read(), x")).text


async def test_reset_drops_what_was_saved_and_close_ends_the_session() -> None:
    async with agent(*IDLE) as notebook:
        await notebook.run("x = 1")
        await asleep(notebook)
        await notebook.call("reset")
        answer = await notebook.run("x")
        assert "NameError" in answer.text
        assert "hibernated" not in answer.text
        await asleep(notebook)
        session = (await state_of(notebook))["session"]
        await notebook.call("close_session", session=session)
        assert "no session" in await notebook.refused("execute", code="1", session=session)


async def test_the_longest_idle_session_makes_room_for_a_new_one() -> None:
    async with agent("--max-sessions", "2") as notebook:
        first = (await notebook.call("create_session")).data["session"]
        await notebook.run("x = 'first'", session=first)
        second = (await notebook.call("create_session")).data["session"]
        await notebook.run("import threading; x = 'second'", session=second)
        third = (await notebook.call("create_session")).data["session"]
        assert (await state_of(notebook, first))["state"] == "hibernated"
        assert (await notebook.run("1", session=third)).text == "1"
        answer = await notebook.run("x", session=first)
        assert "'first'" in answer.text
        assert "to make room for another session. Back: x (1)" in answer.text
        assert (await state_of(notebook, second))["state"] == "hibernated"


async def test_no_session_is_opened_while_all_are_busy() -> None:
    async with agent("--max-sessions", "1") as notebook:
        await notebook.run("import threading; threading.Event().wait(60)", wait=0.2)
        assert "none of them is idle and can" in await notebook.refused("create_session")
        await notebook.call("interrupt")
        assert not (await notebook.call("create_session")).failed


async def test_the_oldest_sleeping_session_is_dropped_and_its_handle_expires() -> None:
    async with agent("--max-sessions", "1", "--hibernate-sessions", "1") as notebook:
        handles = []
        for number in range(3):
            handles.append((await notebook.call("create_session")).data["session"])
            await notebook.run(f"x = {number}", session=handles[-1])
        assert "expired" in await notebook.refused("execute", code="x", session=handles[0])
        assert "1" in (await notebook.run("x", session=handles[1])).text


async def test_a_sleeping_session_is_gone_with_the_server(tmp_path: Path) -> None:
    state = tmp_path / "s"
    async with agent("--state-dir", str(state), *IDLE) as notebook:
        await notebook.run("x = 1")
        await asleep(notebook)
        dumps = list(state.rglob("*.dump"))
        assert [path.stat().st_mode & 0o777 for path in dumps] == [0o600]
        assert all("/w/" not in str(path) for path in dumps)
    with anyio.fail_after(60):
        while [path for path in state.rglob("*") if path.is_file()]:
            await anyio.sleep(0.02)


async def test_a_session_can_sleep_again_and_again() -> None:
    async with agent(*IDLE) as notebook:
        await notebook.run("def add(): \n    global n\n    n += 1\n    return n\nn = 0")
        for expected in (1, 2, 3):
            answer = await woken(notebook, "add()")
            assert answer.text.startswith(f"{expected}\n")
            assert "Back: add, n (2)" in answer.text


async def test_a_session_from_the_reserve_sleeps_and_wakes_too() -> None:
    async with agent("--warm", "1", *IDLE) as notebook:
        await notebook.call("write_file", path="mine.py", content="value = 1\n")
        await notebook.run("import mine; x = [mine.value]; open('own.txt', 'w').write('own')")
        answer = await woken(notebook, "x, open('own.txt').read()")
        assert "([1], 'own')" in answer.text
        assert "Back: mine, x (2)" in answer.text


async def test_other_sessions_cannot_read_what_was_saved(tmp_path: Path) -> None:
    state = tmp_path / "s"
    flags = ("--allow", "os", "--max-sessions", "1", "--state-dir", str(state))
    async with agent(*flags) as notebook:
        await notebook.run("secret = 'hidden'")
        other = (await notebook.call("create_session")).data["session"]
        (dump,) = state.rglob("*.dump")
        answer = await notebook.run(f"open({str(dump)!r}, 'rb').read()", session=other)
        assert "FileNotFoundError" in answer.text or "PermissionError" in answer.text
        answer = await notebook.run(
            f"import os; [f for p, _, f in os.walk({str(state)!r})]", session=other
        )
        assert "dump" not in answer.text
