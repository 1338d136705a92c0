"""Undo, and sessions that go on side by side, by the eyes of a client."""

from __future__ import annotations

import json

import anyio
import pytest

from tests.integration.agent import Agent, Answer
from tests.integration.agent import agent as serving
from tests.integration.servers import Servers

pytestmark = [pytest.mark.anyio]

FLAGS = ("--allow", "*", "--warm", "0")


async def value(agent: Agent, code: str, session: str = "") -> str:
    return (await agent.run(code, session=session)).text


async def test_undo_takes_back_cells_and_says_what_is_gone() -> None:
    async with serving("--allow", "*", "--warm", "0") as agent:
        assert "nothing to undo" in await agent.refused("undo")
        for number in range(1, 5):
            code = f"x = {number}\ny{number} = 0\nopen('n.txt', 'w').write(str(x))"
            await agent.run(code, checkpoint=True)
        back = (await agent.call("undo")).data
        assert (back["state_as_of"], back["gone"], back["lost"]) == (3, [4], ["y4"])
        assert "what cell 4 did is gone" in back["note"]
        assert "files were not rolled back" in back["note"]
        assert await value(agent, "print(x, 'y4' in dir(), open('n.txt').read())") == "3 False 4"
        # cells 1, 2, 3 and 5 are what there is
        back = (await agent.call("undo", cells=2)).data
        assert (back["state_as_of"], back["gone"]) == (2, [3, 5])
        assert await value(agent, "print(x)") == "2"
        # the notebook has all cells, and says which of them the variables hold nothing of
        told = (await agent.call("export_notebook")).text
        assert "Cells 3–5: tagged `undone`" in told  # noqa: RUF001
        shown = await agent.run("print(open('notebook.ipynb').read())", checkpoint=True)
        book = json.loads(shown.text)
        tags = [each["metadata"].get("tags") for each in book["cells"]]
        assert tags == [None, None, ["undone"], ["undone"], ["undone"], None][: len(tags)]
        await agent.call("undo")
        assert "cells 1–2, 6 can be undone" in await agent.refused("undo", cells=9)  # noqa: RUF001
        assert "pass 1 or more" in await agent.refused("undo", cells=0)


@pytest.mark.ways
async def test_undo_says_where_no_checkpoint_reaches(servers: Servers) -> None:
    async with servers.agent(*FLAGS, pauses=False) as agent:
        await agent.run("x = 1", checkpoint=True)
        await agent.run("x = 2")
        await agent.run("x = 3")
        back = (await agent.call("undo")).data
        assert (back.get("state_as_of"), back["gone"]) == (None, [1, 2, 3])
        assert "No checkpoint lay nearer" in back["note"]
        assert "NameError" in await value(agent, "x")
        await agent.call("reset")
        await agent.run("x = 6")
        assert "No checkpoint reaches back before cell" in await agent.refused("undo")
        assert await value(agent, "print(x)") == "6"


async def test_branches_are_apart_until_one_is_adopted(servers: Servers) -> None:
    async with servers.agent(*FLAGS, pauses=False) as agent:
        await agent.run("import os, random\nrandom.seed(1)\nx = [0]\nrng = random.Random(3)")
        made = (await agent.call("branch", n=3)).data
        handles = [each["session"] for each in made["branches"]]
        answers: dict[str, Answer] = {}

        async def work(handle: str) -> None:
            answers[handle] = await agent.run(
                f"x.append('{handle}')\nopen(os.environ['BRANCH_DIR'] + '/f', 'w').write('1')\n"
                "print(random.random(), rng.random())",
                session=handle,
            )

        async with anyio.create_task_group() as tasks:
            for handle in handles:
                tasks.start_soon(work, handle)
        assert len({answers[handle].text for handle in handles}) == 3
        await agent.run("x.append('root')")
        for handle in handles:
            assert await value(agent, "print(x)", handle) == f"[0, '{handle}']"
        assert await value(agent, "print(x)") == "[0, 'root']"
        listed = (await agent.call("list_sessions")).data["sessions"]
        assert len(listed) == 4

        # one dies, one is reset, and the others do not notice
        dead = await agent.run("os.abort()", session=handles[0])
        assert "Variables are as before the first cell; run cells 1–3 again" in dead.text  # noqa: RUF001
        assert await value(agent, "print(x)", handles[0]) == "[0]"
        await agent.call("reset", session=handles[1])
        assert "NameError" in await value(agent, "x", handles[1])
        assert await value(agent, "print(x)", handles[2]) == f"[0, '{handles[2]}']"
        assert await value(agent, "print(x)") == "[0, 'root']"

        adopted = (await agent.call("adopt", branch=handles[2])).data
        assert adopted["session"] == made["session"]
        assert "What cells 2–4 did there since then is gone" in adopted["note"]  # noqa: RUF001
        assert await value(agent, "print(x)") == f"[0, '{handles[2]}']"
        path = f".branches/{handles[2]}/f"
        assert await value(agent, f"print(open('{path}').read())") == "1"
        assert len((await agent.call("list_sessions")).data["sessions"]) == 1
        assert "another branch was adopted" in await agent.refused(
            "execute", code="1", session=handles[0]
        )
        assert "no branch" in await agent.refused("adopt", branch=made["session"])


async def test_branches_outlive_what_they_came_from() -> None:
    async with serving("--allow", "*", "--warm", "0", "--max-sessions", "2") as agent:
        first = (await agent.call("create_session", name="first")).data["session"]
        await agent.run("x = 1", session="first")
        made = (await agent.call("branch", session="first", n=2)).data
        one, two = (each["session"] for each in made["branches"])
        await agent.call("close_session", session=first)
        assert await value(agent, "print(x)", one) == "1"
        adopted = (await agent.call("adopt", branch=two)).data
        assert adopted["session"] == two
        assert await value(agent, "print(x)", two) == "1"
        assert "another branch was adopted" in await agent.refused("execute", code="1", session=one)
        assert "pass 1 to 16" in await agent.refused("branch", session=two, n=17)
        await agent.call("create_session", name="other")
        assert await value(agent, "2", "other") == "2"


async def test_what_a_branch_has_lost_is_told_when_it_is_adopted_and_by_the_next_cell(
    servers: Servers,
) -> None:
    async with servers.agent(*FLAGS) as agent:
        await agent.run("x = 1")
        (branch,) = await branches(agent, 1)
        await agent.run("x = 2; y = 'work'", session=branch)
        for handle in ("", branch):  # what the session itself has lost is replaced
            ends = "import threading, os; threading.Timer(0.2, os._exit, [4]).start()"
            await agent.run(ends, session=handle)
        await anyio.sleep(1)
        adopted = await agent.call("adopt", branch=branch)
        assert f"Of branch {branch}: The kernel exited with code 4 between cells" in adopted.text
        assert "run cell" in adopted.text
        assert adopted.text.count("exited with code 4") == 1
        after = await agent.run("print(x, 'y' in globals())")
        assert after.text.startswith("1 False")
        assert "y" in after.cell["lost"]


async def test_what_is_gone_with_an_adoption_is_told_by_the_cells_that_the_branch_began_with(
    servers: Servers,
) -> None:
    async with servers.agent(*FLAGS) as agent:
        for number in range(1, 3):
            await agent.run(f"x = {number}")
        early = await branches(agent, 1)
        await agent.run("x = 3")
        late = await branches(agent, 1)
        await agent.run("x = 10", session=early[0])
        grandchild = await branches(agent, 2, early[0])
        for handle in grandchild:
            assert await value(agent, "print(x)", handle) == "10"
        adopted = (await agent.call("adopt", branch=grandchild[1])).data
        assert adopted["gone"] == [3]
        assert await value(agent, "print(x)") == "10"
        for handle in (*early, *late, grandchild[0]):
            assert "adopted" in await agent.refused("execute", code="1", session=handle)


async def test_a_branch_has_its_folder_as_long_as_it_lives(servers: Servers) -> None:
    folder = "import os; os.path.isdir(os.environ['BRANCH_DIR']), os.environ['BRANCH_DIR']"
    async with servers.agent(*FLAGS) as agent:
        await agent.run("import os, random\nx = 1\nrng = random.Random(3)\nopen('f', 'w').close()")
        one, two, three = await branches(agent, 3)
        own = {each: f"(True, '/workspace/.branches/{each}')" for each in (one, two, three)}
        drawn = set()
        for handle in (one, two):
            await agent.run("x = 2", session=handle)
            assert (await agent.call("undo", session=handle)).data["gone"] == [1]
            assert await value(agent, folder, handle) == own[handle]
            drawn.add(await value(agent, "print(rng.random(), random.random())", handle))
            await agent.run("os.abort()", session=handle)
            assert await value(agent, folder, handle) == own[handle]
            drawn.add(await value(agent, "print(rng.random(), random.random())", handle))
            await agent.call("reset", session=handle)
            assert await value(agent, folder, handle) == own[handle]
        assert len(drawn) == 4
        # what they share is not for one of them to remove
        for what in ("files", "packages"):
            assert "2 other" not in (refusal := await agent.refused("reset", **{what: True}))
            assert "3 other sessions" in refusal
        await agent.call("close_session", session=one)
        seen = await value(agent, "print(sorted(os.listdir('.branches')), os.path.exists('f'))")
        assert seen == f"{sorted([two, three])} True"
        assert "at most 16" in await agent.refused("branch", n=15)
        await agent.call("adopt", branch=three)
        assert await value(agent, "print(os.listdir('.branches'))") == f"['{three}']"
        (last,) = await branches(agent, 1)
        await agent.call("close_session", session=last)
        await agent.run("os.rmdir('.branches/' + os.listdir('.branches')[0])")
        (last,) = await branches(agent, 1)
        await agent.run("os.symlink('/etc', os.environ['BRANCH_DIR'] + '/etc')", session=last)
        await agent.call("close_session", session=last)
        assert await value(agent, "print(os.listdir('.'))") == "['f']"


@pytest.mark.ways
async def test_branches_that_sleep_are_branches_still() -> None:
    async with serving("--allow", "*", "--warm", "0", "--idle-timeout", "1s") as agent:
        await agent.run("x = 1")
        one, two = await branches(agent, 2)
        await agent.run("x = 2", session=one)
        while True:
            states = (await agent.call("list_sessions")).data["sessions"]
            if {each["state"] for each in states} == {"hibernated"}:
                break
            await anyio.sleep(0.1)
        assert "its last variables alone" in await agent.refused("undo", session=one)
        seen = await value(agent, "import os\nprint(x, os.environ['BRANCH_DIR'])", two)
        assert seen.startswith(f"1 /workspace/.branches/{two}")
        await agent.call("adopt", branch=one)
        (row,) = (await agent.call("list_sessions")).data["sessions"]
        assert (row["state"], await value(agent, "print(x)")) == ("idle", "2")


async def test_of_two_that_are_adopted_at_once_one_is_the_session(servers: Servers) -> None:
    async with servers.agent(*FLAGS) as agent:
        await agent.run("x = 0")
        handles = await branches(agent, 2)
        for number, handle in enumerate(handles):
            await agent.run(f"x = {number + 1}", session=handle)
        answers: dict[str, Answer] = {}

        async def adopt(handle: str) -> None:
            answers[handle] = await agent.call("adopt", branch=handle)

        async with anyio.create_task_group() as tasks:
            for handle in handles:
                tasks.start_soon(adopt, handle)
        (winner,) = (number for number in range(2) if not answers[handles[number]].failed)
        assert await value(agent, "print(x)") == str(winner + 1)
        assert "adopted" in answers[handles[1 - winner]].text


async def branches(agent: Agent, count: int, session: str = "") -> list[str]:
    made = (await agent.call("branch", n=count, session=session)).data
    return [each["session"] for each in made["branches"]]


@pytest.mark.ways
async def test_a_branch_that_is_ended_for_lack_of_memory_comes_back_and_the_others_go_on() -> None:
    async with serving("--allow", "*", "--warm", "0", "--memory", "1G") as agent:
        await agent.run("x = 1")
        handles = await branches(agent, 3)
        listed = (await agent.call("list_sessions")).data["sessions"]
        root = listed[0]["session"]
        assert [each["branch_of"] for each in listed] == ["", root, root, root]
        for handle in handles:
            answer = await agent.run("x += 1\nz = b'x' * (600 << 20)", session=handle)
            if answer.status == "killed":
                assert "out of memory (limit 1 GiB" in answer.text
                assert answer.cell["state_kept"], answer.text
        # without control groups a watchdog looks at the memory of all while a cell runs
        answer = await agent.run("import time\nfor _ in range(30): time.sleep(0.1)")
        assert answer.status == "ok", answer.text
        # which of them is ended is not for us to say, but never all, and never a checkpoint
        for handle in ("", *handles):
            answer = await agent.run("print(x)", session=handle)
            assert answer.status == "ok", answer.text
            assert "killed by SIGKILL between cells" not in answer.text, "no reason is told"


async def test_a_death_without_a_checkpoint_is_that_of_one_branch_and_told_as_its_own(
    servers: Servers,
) -> None:
    async with servers.agent(*FLAGS, pauses=False) as agent:
        await agent.run("import os\nx = 1")
        one, two = await branches(agent, 2)
        await agent.run("os.kill(os.getppid(), 9)", session=one)  # what both come back from
        dead = await agent.run("os.abort()", session=one)
        assert "SIGABRT (Fatal Python error: Aborted)" in dead.text
        assert "Lost: os, x." in dead.text
        assert await value(agent, "print(x)", two) == "1"
        dead = await agent.run("x = 2\nos.kill(os.getpid(), 9)", session=two)
        assert "the kernel was killed by SIGKILL" in dead.text
        assert "Aborted" not in dead.text
        assert await value(agent, "print(x)") == "1"


@pytest.mark.full
async def test_three_branches_of_a_large_frame_are_changed_apart_and_one_is_adopted() -> None:
    """2.3 GB in huge pages, as numpy has them: no branch copies what it does not change."""
    flags = ("--allow", "*", "--warm", "0", "--memory", "6G")
    async with serving(*flags) as agent:
        await agent.run(
            "import mmap\nframe = mmap.mmap(-1, 2300 << 20, flags=mmap.MAP_PRIVATE | "
            "mmap.MAP_ANONYMOUS)\nframe.madvise(mmap.MADV_HUGEPAGE)\n"
            "for at in range(0, len(frame), 4096): frame[at] = 1"
        )
        handles = await branches(agent, 3)
        change = "for at in range({0} << 28, ({0} << 28) + (64 << 20), 4096): frame[at] = 2 + {0}"
        seen = "print([frame[number << 28] for number in range(4)])"
        async with anyio.create_task_group() as tasks:
            for number, handle in enumerate(handles):
                tasks.start_soon(value, agent, change.format(number), handle)
        for number, handle in enumerate(handles):
            want = [2 + number if place == number else 1 for place in range(4)]
            assert await value(agent, seen, handle) == str(want)
        assert await value(agent, seen) == "[1, 1, 1, 1]"
        rows = (await agent.call("list_sessions")).data["sessions"]
        assert all(row["memory_mb"] < 3500 for row in rows), rows
        await agent.call("adopt", branch=handles[2])
        assert await value(agent, seen) == "[1, 1, 4, 1]"
