"""Which sessions hibernate, when, and what they answer then."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tests.integration.agent import agent
from tests.integration.servers import Servers
from tests.integration.sleepers import IDLE, asleep, has_file, state_of, woken

pytestmark = [pytest.mark.anyio]


@pytest.mark.ways
async def test_a_cell_does_not_wait_for_a_dump_that_has_begun(servers: Servers) -> None:
    async with servers.agent(*IDLE) as notebook:
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


async def test_a_sleeping_session_answers_without_being_woken(servers: Servers) -> None:
    async with servers.agent(*IDLE) as notebook:
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


async def test_reset_drops_what_was_saved_and_close_ends_the_session(servers: Servers) -> None:
    async with servers.agent(*IDLE) as notebook:
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


@pytest.mark.ways
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


@pytest.mark.ways
async def test_no_session_is_opened_while_all_are_busy(servers: Servers) -> None:
    async with servers.agent("--max-sessions", "1") as notebook:
        await notebook.run("import threading; threading.Event().wait(60)", wait=0.2)
        assert "none of them is idle and can" in await notebook.refused("create_session")
        await notebook.call("interrupt")
        assert not (await notebook.call("create_session")).failed


@pytest.mark.ways
async def test_the_oldest_sleeping_session_is_dropped_and_its_handle_expires() -> None:
    async with agent("--max-sessions", "1", "--quota", "asleep=1", "--warm", "1") as notebook:
        handles = []
        for number in range(3):
            handles.append((await notebook.call("create_session")).data["session"])
            await notebook.run(f"x = {number}", session=handles[-1])
        assert "expired" in await notebook.refused("execute", code="x", session=handles[0])
        assert "1" in (await notebook.run("x", session=handles[1])).text


@pytest.mark.ways
async def test_a_sleeping_session_is_gone_with_the_server(tmp_path: Path) -> None:
    state = tmp_path / "s"
    async with agent("--state-dir", str(state), *IDLE) as notebook:
        await notebook.run("x = 1")
        await asleep(notebook)
        dumps = list(state.rglob("variables-*"))
        assert [path.stat().st_mode & 0o777 for path in dumps] == [0o600]
        assert all("/w/" not in str(path) for path in dumps)
    with anyio.fail_after(60):
        while [path for path in state.rglob("*") if path.is_file()]:
            await anyio.sleep(0.02)


async def test_a_session_can_sleep_again_and_again(servers: Servers) -> None:
    async with servers.agent(*IDLE) as notebook:
        await notebook.run("def add(): \n    global n\n    n += 1\n    return n\nn = 0")
        for expected in (1, 2, 3):
            answer = await woken(notebook, "add()")
            assert answer.text.startswith(f"{expected}\n")
            assert "Back: add, n (2)" in answer.text


async def test_a_session_from_the_reserve_sleeps_and_wakes_too(servers: Servers) -> None:
    async with servers.agent(*IDLE) as notebook:
        await notebook.call("write_file", path="mine.py", content="value = 1\n")
        await notebook.run("import mine; x = [mine.value]; open('own.txt', 'w').write('own')")
        answer = await woken(notebook, "x, open('own.txt').read()")
        assert "([1], 'own')" in answer.text
        assert "Back: mine, x (2)" in answer.text


LARGE = """
import os, pickle
class Large:
    def __init__(self, data): self.data = data
    def __reduce_ex__(self, _): return Large, (pickle.PickleBuffer(self.data),)
    def view(self): return memoryview(self.data)
fds = set(os.listdir('/proc/self/fd'))
large = Large(bytearray(os.urandom(1 << 20) * 12)); text = 'x' * 9_000_000; both = [large, text]
total = sum(large.view()[::4096])
"""
STILL_LARGE = """
large.view()[0] ^= 0
print(sum(large.view()[::4096]) == total, len(text), both[0] is large,
      type(large.data) is bytearray, set(os.listdir('/proc/self/fd')) - fds)
"""


@pytest.mark.ways
async def test_large_variables_go_through_pipes_of_which_nothing_stays(servers: Servers) -> None:
    async with servers.agent("--allow", "os,pickle", *IDLE) as notebook:
        await notebook.run(LARGE)
        for _ in range(2):
            answer = await woken(notebook, STILL_LARGE)
            assert answer.text.startswith("True 9000000 True True set()\n")


async def test_other_sessions_cannot_read_what_was_saved(tmp_path: Path) -> None:
    state = tmp_path / "s"
    flags = ("--allow", "os", "--max-sessions", "1", "--state-dir", str(state), "--warm", "0")
    async with agent(*flags) as notebook:
        await notebook.run("secret = 'hidden'")
        other = (await notebook.call("create_session")).data["session"]
        (dump,) = state.rglob("variables-*")
        answer = await notebook.run(f"open({str(dump)!r}, 'rb').read()", session=other)
        assert "FileNotFoundError" in answer.text or "PermissionError" in answer.text
        answer = await notebook.run(
            f"import os; [f for p, _, f in os.walk({str(state)!r})]", session=other
        )
        assert "variables-" not in answer.text
