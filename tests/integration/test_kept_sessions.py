"""Sessions that outlive the server, through a real client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from tests.integration.agent import ANALYSIS, lost, notices
from tests.integration.lives import Life, Place
from tests.integration.rawserver import RawServer
from tests.integration.test_hibernation_losses import forced_out
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def below_tmp() -> Iterator[Path]:
    """A folder in a place that kernels have, too."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


WORK = """
import pandas as pd, sqlite3
df = pd.DataFrame({"a": range(12_000)})
shared = [1]
both = [shared]
conn = sqlite3.connect(":memory:")
def twice(x):
    return 2 * x
open("notes.txt", "w").write("hello")
"""


async def test_a_session_goes_on_in_the_next_server_and_the_first_answer_says_what_came_back(
    place: Place, below_tmp: Path
) -> None:
    (data := below_tmp / "data").mkdir()
    (data / "given.csv").write_text("a\n1\n")
    flags = ("--allow", ANALYSIS, "--mount", str(data))
    async with place.life(*flags) as first:
        await first.run(WORK)
        await first.run("'the result of cell 2'")
    log = place.root / "audit"
    async with place.life(*flags, "--audit-log", str(log)) as second:
        answer = await second.run("df.shape, both[0] is shared, twice(21), Out[2]")
        assert answer.text.startswith("((12000, 1), True, 42, 'the result of cell 2')")
        (notice,) = notices(answer)
        assert "Continued from today " in notice
        assert "pd, sqlite3, df (12 k × 1), shared, both, twice" in notice  # noqa: RUF001
        assert "Not back: conn (sqlite connection)" in notice
        assert answer.cell["lost"] == ["conn"]
        assert (answer.cell["cell"], answer.cell["state_as_of"]) == (3, 3)
        assert notices(await second.run("1")) == []
        assert "hello" in (await second.call("read_file", path="notes.txt")).text
        exported = await second.call("export_notebook")
        assert not exported.failed
        code = "import glob; open(glob.glob('*.ipynb')[0]).read()"
        assert "sqlite3.connect" in (await second.run(code)).text
        assert '"event": "resume"' in log.read_text()
        await second.call("close_session")
    assert place.manifests() == []
    async with place.life() as third:
        answer = await third.run("'df' in globals()")
        assert (answer.text, answer.cell["cell"]) == ("False", 1)


async def test_a_killed_server_loses_the_cells_since_the_last_save_and_says_which(
    place: Place,
) -> None:
    async with place.life("--template") as first:
        await first.run("a = 1")
        await place.saved(1)
        await first.run("b = 2")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.call, "execute")
            await first.call("execute", code="c = 3\nimport time; time.sleep(60)", wait=0)
            first.kill()
            tasks.cancel_scope.cancel()
    async with place.life("--template") as second:
        shown = await second.call("list_variables")
        assert [each["name"] for each in shown.data["variables"]] == ["a"]
        assert "Cells 2–3 ran after that was saved" in shown.data["note"]  # noqa: RUF001
        answer = await second.run("a, 'b' in globals()")
        assert answer.text.startswith("(1, False)")
        assert "Cells 2–3 ran after that was saved" in answer.text  # noqa: RUF001
        assert (answer.cell["cell"], answer.cell["state_kept"]) == (4, False)
        lost = await second.call("wait", cell=3)
        assert lost.status == "killed"


NICENESS = """
import os
class Niceness:
    def __reduce__(self): return int, (os.nice(0),)
now = Niceness()
"""


@pytest.mark.ways
async def test_only_a_save_in_the_background_lets_all_others_go_first(place: Place) -> None:
    async with place.life() as first:
        await first.run(NICENESS)
        await place.saved(1)
        first.kill()  # which saves no more
    async with place.life() as second:
        answer = await second.run("now")
        assert answer.text.startswith("19"), answer.text
        await place.saved(2)  # the next save in the background is a minute away
        await second.run(NICENESS)
        usual = os.getpriority(os.PRIO_PROCESS, second.pid)  # that of the tests, mostly 0
        assert usual < 19
    async with place.life() as third:
        answer = await third.run("now")
        assert answer.text.split()[0] == str(usual), answer.text


SLOW = """
import time
class Slow:
    def __reduce__(self):
        open("begun", "w").close()
        time.sleep(0.5)
        return int, (7,)
slow = Slow()
"""


@pytest.mark.ways
@pytest.mark.parametrize("first", sampled(["SIGINT", "end of input"], "SIGINT"))
async def test_a_signal_while_the_server_ends_cuts_no_save_short(place: Place, first: str) -> None:
    """Claude Code sends SIGINT, and SIGTERM a tenth of a second later."""

    async def terminate(pid: int) -> None:
        while not list(place.kept.glob("w/*/begun")):
            await anyio.sleep(0.01)
        os.kill(pid, signal.SIGTERM)

    async with anyio.create_task_group() as tasks, place.life() as life:
        await life.run("1")
        await place.saved(1)  # the next save in the background is a minute away
        await life.run(SLOW)
        tasks.start_soon(terminate, life.pid)
        if first == "SIGINT":
            os.kill(life.pid, signal.SIGINT)
    async with place.life() as life:
        assert (await life.run("slow")).text.startswith("7")


LOOP = """
import itertools
for later in itertools.count():
    work = [later] * 10
    if later == 0:
        open("begun", "w").close()
"""
ENDS = {
    "end of input": lambda server: server.process.stdin.close(),
    "SIGTERM": lambda server: server.process.send_signal(signal.SIGTERM),
    "SIGHUP": lambda server: server.process.send_signal(signal.SIGHUP),
}


@pytest.mark.ways
@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(0, id="in the background", marks=pytest.mark.full),
        pytest.param(30, id="in a call"),
    ],
)
@pytest.mark.parametrize("end", sampled(ENDS, "end of input"))
def test_a_server_that_ends_while_a_cell_runs_keeps_its_work_and_what_was_there_before(
    tmp_path: Path, end: str, wait: float
) -> None:
    for number in range(2):
        server = RawServer(tmp_path / str(number), "--persist", "1G,1d")
        server.call(2, "execute", code="earlier = 41")
        server.call(3, "execute", answer=wait == 0, code=LOOP, wait=wait)
        server.call(4, "interrupt", cell=1)
        while not list(server.state.glob("**/begun")):
            time.sleep(0.01)
        ENDS[end](server)
        assert server.process.wait(60) == 0
        server.close()
        server = RawServer(tmp_path / str(number), "--persist", "1G,1d")
        answer = server.call(2, "execute", code="earlier, 'later' in globals(), len(work)")
        server.close()
        assert "(41, True, 10)" in json.dumps(answer)


@pytest.mark.ways
async def test_what_was_undone_does_not_come_back_when_the_server_is_killed(place: Place) -> None:
    async with place.life("--template") as first:
        await first.run("a = [1]")
        await first.call("execute", code="a.append(2)", checkpoint=True)
        await place.saved(2)
        assert "as after cell 1" in (await first.call("undo")).text
        first.kill()
    async with place.life("--template") as second:
        answer = await second.run("globals().get('a')")
        if "Continued" in answer.text:  # it was saved again, at once
            assert answer.text.startswith("[1]")
        else:
            assert answer.text.startswith("(no output)")
            assert "its variables are as after cell 2, to before which the session" in answer.text
            await second.call("create_session", name="default", resume=True)
            assert (await second.run("a", session="default")).text.startswith("[1, 2]")


@pytest.mark.ways
async def test_branches_end_with_their_server_and_the_next_one_says_so(place: Place) -> None:
    async with place.life("--template") as life:
        await life.run("x = 1")
        made = (await life.call("branch", n=2)).data["branches"]
        await life.run("x = 2", session=made[0]["session"])
        await place.saved(1)
        life.kill()
    async with place.life("--template") as life:
        told = (await life.run("print(x)")).text
        assert told.startswith("1\n")
        assert "Branches end with their server: those of this session are gone" in told
        made = (await life.call("branch", n=1)).data["branches"]
        closed = (await life.call("close_session")).data["note"]
        assert "its files were kept for the branches beside it" in closed
        fresh = (await life.run("'x' in dir()")).text
        assert fresh.startswith("False\n")
        assert "Branches of the session that was here before still have its folder" in fresh
        (branch,) = (each["session"] for each in made)
        assert "removed" in (await life.call("close_session", session=branch)).data["note"]
        await life.call("close_session")
        assert "Branches" not in (await life.run("x = 3")).text
        await life.call("branch", n=1)
    async with place.life("--template") as life:
        told = (await life.run("print(x)")).text
        assert told.startswith("3\n")
        assert "Branches" not in told


async def test_one_of_two_servers_in_a_folder_has_the_session_and_the_other_says_so(
    place: Place, tmp_path: Path
) -> None:
    async with place.life() as first, place.life() as second:
        assert notices(await first.run("a = 1")) == []
        await place.saved(1)
        (notice,) = notices(await second.run("a = 2"))
        assert "Another server that runs in this folder" in notice
        assert notices(await second.run("a")) == []
        async with place.life(work=tmp_path / "elsewhere") as third:
            assert notices(await third.run("a = 3")) == []
    async with place.life() as after:
        assert (await after.run("a")).text.startswith("1\n")


THREAD = """
import threading
end = threading.Event()
thread = threading.Thread(target=end.wait, daemon=True); thread.start(); a = 1
"""


@pytest.mark.ways
async def test_sessions_come_back_by_their_names_and_not_after_their_end(place: Place) -> None:
    """One has a thread: its own kernel saves it."""
    async with place.life() as first:
        for name in ("kept", "closed", "emptied"):
            await first.call("create_session", name=name)
            await first.run("value = 7", session=name)
            await place.saved(1, name)
        await first.call("create_session", name="threaded")
        await first.run(THREAD, session="threaded")
        await place.saved(1, "threaded")
        await first.run("x = 1")
        await place.saved(1)
        await first.call("close_session", session="closed")
        await first.call("reset", session="emptied")
        first.kill()
    async with place.life() as second:
        assert (await second.run("value + 1", session="kept")).text.startswith("8\n")
        assert "NameError" in (await second.run("value", session="emptied")).text
        assert "There is no session 'closed'" in await second.refused(
            "execute", code="value", session="closed"
        )
        await second.call("close_session", session="emptied")
        answer = await second.run("a", session="threaded")
        assert answer.text.startswith("1\n")
        assert "thread (thread)" in answer.text
        # a reset leaves no word of variables that come back
        answer = await second.call("reset")
        assert "Lost: x." in answer.text
        assert "brings back" not in answer.text
        assert (await second.run("'x' in globals()")).text == "False"
    async with place.life() as third:
        await third.call("create_session", name="kept", fresh=True)
        answer = await third.run("'value' in globals()", session="kept")
        assert (answer.text, answer.cell["cell"]) == ("False", 1)


SPY = """
class Spy:
    def __reduce__(self): return (print, ('loaded',))
spy = Spy(); a = 1
"""


@pytest.mark.ways
@pytest.mark.parametrize("name", sampled(["named", "default"], "default"))
async def test_nothing_is_loaded_by_itself_where_more_is_open_and_takes_its_place_when_asked_for(
    name: str, place: Place
) -> None:
    handle = "" if name == "default" else name
    async with place.life() as first:
        if handle:
            await first.call("create_session", name=name)
        await first.run("a = 1", session=handle)
        await first.call("create_session", name="spied")
        await first.run(SPY, session="spied")
    async with place.life("--env", "TOKEN=value-of-it") as second:
        answer = await second.run("'a' in globals()", session="spied")
        (notice,) = notices(answer)
        assert "env TOKEN" in notice
        assert "create_session(name='spied', resume=true)" in notice
        assert answer.text.startswith("False")
        resumed = await second.call("create_session", name="spied", resume=True)
        answer = await second.run("a", session=resumed.data["session"])
        assert answer.text.startswith("1\n")
        if handle:
            begun = await second.call("create_session", name=name)
            assert any("env TOKEN" in each for each in begun.data["notices"])
        answer = await second.run("b = 2", session=handle)
        if not handle:
            (notice,) = notices(answer)
            assert "env TOKEN" in notice
            assert "create_session(name='default', resume=true)" in notice
        taken = await second.call("create_session", name=name, resume=True)
        assert not taken.failed
        assert "Lost: b." in taken.text
        assert lost(taken) == ["b"]
        answer = await second.run("a, 'b' in globals()", session=handle)
        assert answer.text.startswith("(1, False)\n")
        assert answer.cell["lost"] == ["b"]
        again = await second.call("create_session", name=name, fresh=True)
        assert again.failed, "it is there now, and nobody asked to end it"
        assert (await second.run("a", session=name)).text == "1"
    async with place.life("--env", "TOKEN=another-value", "--env", "MORE=1") as third:
        answer = await third.run("'a' in globals()", session=name)
        assert "env MORE" in answer.text
        assert not (await third.call("create_session", name=name, fresh=True)).failed
        answer = await third.run("'a' in globals()", session=name)
        assert answer.text.startswith("False")
        assert len((await third.call("list_sessions")).data["sessions"]) == 1
        await third.run("c = 3", session=name)
    async with place.life() as fourth:  # less is open: they come back
        assert (await fourth.run("c", session=name)).text.startswith("3")
        assert len((await fourth.call("list_sessions")).data["sessions"]) == 1
        assert (await fourth.run("a", session="spied")).text.startswith("1\n")


@pytest.mark.ways
async def test_what_is_asked_of_a_past_that_is_not_there_is_answered(place: Place) -> None:
    async with place.life() as first:
        both = await first.refused("create_session", name="one", fresh=True, resume=True)
        assert "pass one of them" in both
        assert "pass `name`" in await first.refused("create_session", resume=True)
        made = await first.call("create_session", name="one", resume=True)
        assert "Nothing was kept" in made.text
        made = await first.call("create_session", name="default", fresh=True)
        assert "default session" in made.data["note"]
        await first.run("a = 1", session="default")
        assert (await first.run("a")).text == "1"
        there = await first.refused("create_session", name="default", resume=True)
        assert "your default session" in there
        async with place.life() as second:
            made = await second.call("create_session", name="one")
            assert "Another server" in made.text
    async with place.life("--persist", "off") as third:
        made = await third.call("create_session", name="one", resume=True)
        assert "Nothing is kept" in made.text


POISON = """
import os, signal, time
class Deadly:
    def __reduce__(self):
        return (eval, ("__import__('os').kill(__import__('os').getpid(), 9)",))
class Endless:
    def __reduce__(self):
        return (eval, ("[0 for _ in iter(int, 1)]",))
class Unstorable:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGSEGV)
before = "fine"
deadly = Deadly()
endless = Endless()
unstorable = Unstorable()
shared = [1]
holder = {"deadly": deadly, "shared": shared}
after = "fine, too"
"""


@pytest.mark.full
async def test_variables_that_kill_kernels_or_never_end_cost_themselves_and_what_they_share_with(
    place: Place,
) -> None:
    async with place.life() as first:
        await first.run(POISON)
        await place.saved(1)
        assert (await first.run("before")).text == "'fine'"
    async with place.life() as second:
        answer = await second.run("before, after, 'endless' in globals()")
        assert answer.text.startswith("('fine', 'fine, too', False)")
        assert set(answer.cell["lost"]) >= {"deadly", "endless", "unstorable", "holder", "shared"}
        assert "deadly (ended the kernel that read it" in answer.text
        assert "unstorable (ended the process that stored it" in answer.text


@pytest.mark.ways
async def test_what_threads_and_tasks_have_changed_since_the_last_save_is_there_after_the_end(
    place: Place,
) -> None:
    async with place.life("--template") as first:
        await first.run(
            "import asyncio, threading\ndone, ticks = [], []\n"
            "async def tick():\n"
            "    await asyncio.sleep(4)\n"
            "    ticks.append(1)\n"
            "task = asyncio.create_task(tick())\n"
            "threading.Timer(5, done.append, [1]).start()"
        )
        await place.saved(1)
        with anyio.fail_after(60):
            while not await shows(first, "done", "[1]"):
                await anyio.sleep(0.5)
    async with place.life("--template") as second:
        assert (await second.run("done, ticks")).text.startswith("([1], [1])")


@pytest.mark.ways
async def test_what_is_saved_and_left_alone_is_not_saved_again(place: Place) -> None:
    async with place.life("--template") as first:
        await first.run("x = bytes(10_000_000)")
        await place.saved(1)
        saved = place.manifests()
        await first.call("list_sessions")
    assert place.manifests()[0]["moment"] == saved[0]["moment"]


@pytest.mark.ways
async def test_a_session_whose_state_was_removed_is_told_why_and_what_it_was(place: Place) -> None:
    async with place.life() as first:
        await first.run("precious = 42")
        await place.saved(1)
    old = time.time() - 8 * 86_400
    for path in (place.kept, *place.kept.rglob("*")):
        os.utime(path, (old, old))
    async with place.life() as second:
        answer = await second.run("'precious' in globals()")
        assert answer.text.startswith("False")
        assert "was removed, as it was not used for 7 days (--persist)" in answer.text
        assert answer.cell["lost"] == ["precious"]
    async with place.life() as third:
        assert "removed" not in (await third.run("1")).text


async def shows(life: Life, name: str, preview: str) -> bool:
    """Return True if a variable has this value; nothing runs in its thread for that."""
    variables = (await life.call("list_variables")).data["variables"]
    return any((each["name"], each["preview"]) == (name, preview) for each in variables)


@pytest.mark.ways
async def test_in_the_home_folder_only_sessions_with_names_are_kept(place: Place) -> None:
    async with place.life(work=place.root) as first:
        await first.run("a = 1")
        await first.call("create_session", name="named")
        await first.run("a = 2", session="named")
        assert "sessions with names" in (await first.call("info")).data["kept"]
    async with place.life(work=place.root) as second:
        assert "NameError" in (await second.run("a")).text
        assert (await second.run("a", session="named")).text.startswith("2\n")


@pytest.mark.ways
async def test_what_is_off_or_inside_the_working_folder_keeps_nothing(place: Place) -> None:
    async with place.life("--persist", "off") as first:
        await first.run("a = 1")
        assert (await first.call("info")).data["kept"] == "off (--persist off)"
    assert not place.kept.exists()
    place.work.mkdir(exist_ok=True)
    async with place.life("--state-dir", str(place.work / "s")) as second:
        await second.run("a = 1")
        assert (
            "is in the folder that the server works in" in (await second.call("info")).data["kept"]
        )


@pytest.mark.ways
async def test_a_kernel_without_checkpoints_that_dies_comes_back_as_it_was_saved_last(
    place: Place,
) -> None:
    async with place.life() as server:
        await server.run("a = [1]; b = (each for each in a)")
        await place.saved(1)
        await server.run("c = 3")
        answer = await server.run("import os; os.kill(os.getpid(), 9)")
        assert answer.status == "killed"
        assert "Variables are as after cell 1; run cells 2–3 again" in answer.text  # noqa: RUF001
        assert answer.cell["state_as_of"] == 1
        answer = await server.run("a, 'c' in globals()")
        assert answer.text.startswith("([1], False)")
        assert "Not back: b (generator)" in answer.text
        await server.call("reset")
        await server.run("os = 5")
        answer = await server.run("import os; os._exit(1)")
        assert "All variables, imports and definitions of this session are lost" in answer.text


@pytest.fixture
def full(place: Place) -> Iterator[Path]:
    """A small disk for what is kept."""
    if os.geteuid() != 0:
        pytest.skip("takes root, to mount a small disk")
    folder = place.root / "s"
    folder.mkdir(mode=0o700)
    words = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", str(folder)]
    subprocess.run(words, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_disk_keeps_what_fits_and_names_the_rest(place: Place, full: Path) -> None:
    async with place.life() as first:
        await first.run("large = __import__('os').urandom(40_000_000)\nsmall = 41")
        await place.saved(1)
        told = await first.run("1")
        assert "no room to save large in the background" in told.text
        await place.saved(2)
        assert "no room" not in (await first.run("1")).text  # once
        first.kill()
    async with place.life() as second:
        answer = await second.run("small, 'large' in globals()")
        assert answer.text.startswith("(41, False)")
        assert "large (too large" in notices(answer)[0]
        assert "large" in answer.cell["lost"]


@pytest.mark.ways
async def test_a_save_that_finds_no_room_at_all_is_told(place: Place, full: Path) -> None:
    async with place.life() as first:
        await first.run("1")
        await place.saved(1)
        with (full / "filling").open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        await first.run("small = 41")
        with anyio.fail_after(60):
            while "not saved now" not in (shown := await first.call("info")).data["kept"]:
                await anyio.sleep(0.1)
        assert "could not be saved in the background" in shown.text
        first.kill()
    (full / "filling").unlink()
    async with place.life() as second:
        answer = await second.run("'small' in globals()")
        assert answer.text.startswith("False")
        assert "Cell" in notices(answer)[0]


@pytest.mark.ways
async def test_a_session_that_makes_room_loses_nothing_that_was_saved(place: Place) -> None:
    async with place.life("--max-sessions", "1") as life:
        answer = await life.run("import os\nlarge = os.urandom(9_000_000)\nprint(sum(large))")
        await place.saved(answer.cell["cell"])
        await forced_out(life)
        woken = await life.run("print(sum(large))")
        assert woken.text.splitlines()[0] == answer.text.splitlines()[0]
        assert woken.cell["lost"] == []
