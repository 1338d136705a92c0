"""No variable is lost without word of it, whatever ends a kernel and whatever is asked next."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.integration.agent import ERAS, PREFIX, Agent, Answer, losses, lost, notices
from tests.integration.servers import Servers
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

DIES_LATER = (
    "x = 1; y = 2; open('kept.txt', 'w').write('z')\n"
    "import os, threading; threading.Timer(0.3, lambda: os._exit(7)).start()"
)
STUBBORN = "sum(range(10**11))"
TOOLS: dict[str, dict[str, Any]] = {
    "execute": {"code": "1 + 1"},
    "wait": {},
    "interrupt": {},
    "list_variables": {},
    "list_sessions": {},
    "check_syntax": {"code": "x"},
    "reset": {},
    "info": {},
    "list_files": {},
    "read_file": {"path": "kept.txt"},
    "read_file of nothing": {"path": "nothing.txt"},
    "write_file": {"path": "new.txt", "content": "y"},
    "list_packages": {},
    "install": {"packages": ["cloudpickle"]},
    "install of nothing": {"packages": ["nothing-of-this-name"]},
    "export_notebook": {},
    "execute of nothing": {"code": ""},
}
OTHERS: dict[str, dict[str, Any]] = {"run_script": {"script": "print(1)"}, "create_session": {}}
"""Tools that are about no session that there is."""


async def use(notebook: Agent, tool: str, session: str) -> Answer:
    name = tool.split()[0]
    if name == "list_sessions":
        return await notebook.call(name)
    return await notebook.call(name, **TOOLS[tool], session=session)


async def handed_in(notebook: Agent, queued: int) -> None:
    """Return when so many cells wait behind the one that runs."""
    with anyio.fail_after(60):
        while (await notebook.call("list_sessions")).data["sessions"][0]["queued"] < queued:
            await anyio.sleep(0.01)


async def kills(audit: Path, count: int) -> None:
    """Return when the server has noticed that so many kernels ended."""
    with anyio.fail_after(60):
        while audit.read_text().count('"event": "kill"') < count:
            await anyio.sleep(0.05)


@pytest.mark.ways
async def test_any_tool_tells_first_of_a_kernel_that_died_between_cells(
    tmp_path: Path, servers: Servers
) -> None:
    audit = tmp_path / "audit.jsonl"
    flags = ("--allow", "*", "--allow-install", "cloudpickle", "--max-sessions", "20")
    async with servers.agent(*flags, "--audit-log", str(audit)) as notebook:
        sessions = {}
        for tool in TOOLS:
            sessions[tool] = (await notebook.call("create_session")).data["session"]
            await notebook.run(DIES_LATER, session=sessions[tool])
        await kills(audit, len(TOOLS))
        sessions["list_sessions"], others = "", sessions
        for tool, session in others.items():
            if tool == "list_sessions":
                continue
            answer = await use(notebook, tool, session)
            (notice,) = losses(answer)
            assert "code 7" in notice, tool
            assert lost(answer) == ["x", "y", "os", "threading"], tool
            if answer.result.structured_content is not None:
                assert answer.data["notices"] == [notice], tool
            answer = await use(notebook, tool, session)
            repeated = tool == "list_variables"
            assert ("code 7" in json.dumps(answer.data)) is repeated if repeated else True
            assert losses(answer) == [], tool
        first = (await notebook.call("list_sessions")).data
        (notice,) = [notice for each in first["sessions"] for notice in each["notices"]]
        assert notice.startswith(f"{PREFIX}The kernel exited with code 7")
        named = [name for each in first["sessions"] for name in each["lost"]]
        assert named == ["x", "y", "os", "threading"]
        assert "code 7" not in json.dumps((await notebook.call("list_sessions")).data)


@pytest.mark.ways
async def test_an_answer_that_is_not_about_a_session_says_whose_loss_it_tells(
    tmp_path: Path, servers: Servers
) -> None:
    audit = tmp_path / "audit.jsonl"
    async with servers.agent("--allow", "*", "--audit-log", str(audit)) as notebook:
        for count, (tool, arguments) in enumerate(OTHERS.items(), start=1):
            default = (await notebook.run(DIES_LATER)).cell["session"]
            await kills(audit, count)
            answer = await notebook.call(tool, **arguments)
            (notice,) = losses(answer)
            assert notice.startswith(f"{PREFIX}Session {default}: The kernel exited with code 7")
            assert (answer.result.meta or {})["kernel-mcp/lost"]["session"] == default
            if tool == "run_script":
                assert (answer.cell["lost"], answer.cell["state_kept"]) == ([], True)
            else:
                assert answer.data["notices"] == [notice]


@pytest.mark.ways
async def test_a_loss_told_by_another_tool_still_marks_the_next_cell(
    tmp_path: Path, servers: Servers
) -> None:
    audit = tmp_path / "audit.jsonl"
    async with servers.agent("--allow", "*", "--audit-log", str(audit)) as notebook:
        await notebook.run(DIES_LATER)
        await kills(audit, 1)
        assert losses(await notebook.call("list_files"))
        answer = await notebook.run("'x' in globals()")
        assert answer.cell["state_kept"] is False
        assert answer.cell["lost"] == ["x", "y", "os", "threading"]
        answer = await notebook.run("1")
        assert (answer.cell["state_kept"], answer.cell["lost"]) == (True, [])
        assert notices(answer) == []


@pytest.mark.parametrize("era", sampled(ERAS, "legacy"))
async def test_what_a_cancelled_answer_told_is_told_again(era: str, servers: Servers) -> None:
    async with servers.agent("--grace", "0.5", "--allow", "*", era=era) as notebook:
        await notebook.run("x = 1")
        with anyio.move_on_after(0.5):
            await notebook.run(STUBBORN)
        with anyio.move_on_after(1.5):  # begins on the fresh kernel and is given up as well
            await notebook.run("import time; time.sleep(60)")
        answer = await notebook.call("list_variables")
        assert len(losses(answer)) == 1
        assert lost(answer) == ["x"]
        answer = await notebook.run("1 + 1")
        assert "2" in answer.text


@pytest.mark.ways
async def test_a_killer_that_nobody_waits_for_is_told_by_what_comes_next(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("x = 1")
        killer = await notebook.run("import os; os._exit(3)", wait=0)
        behind = await notebook.run("'x' in globals()")
        assert killer.status in ("queued", "running")
        assert (behind.cell["state_kept"], behind.cell["lost"]) == (False, ["x"])
        assert "code 3" in "".join(losses(behind))
        assert (await notebook.call("wait")).status == "killed"


async def test_old_news_of_a_loss_names_nothing_that_was_made_anew(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("x = 1; y = 2")
        await notebook.run("import os; os._exit(3)", wait=0)
        assert (await notebook.run("x = 3")).cell["lost"] == ["x", "y"]
        old = await notebook.call("wait")
        assert (old.status, old.cell["lost"]) == ("killed", ["y"])
        assert "made before are lost" in old.text
        assert "Lost: y." in old.text
        assert (await notebook.run("x")).text == "3"


async def test_every_cell_that_waited_behind_a_killer_says_so(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("x = 1")
        answers: dict[int, Answer] = {}

        async def run(place: int, code: str) -> None:
            answers[place] = await notebook.run(code)

        async with anyio.create_task_group() as tasks:
            killer = (
                "import os, pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)"
            )
            codes = [f"{killer}\nos._exit(3)", "a = 2", "'x' in globals()"]
            for place, code in enumerate(codes):
                tasks.start_soon(run, place, code)
                await handed_in(notebook, place)
            await notebook.call("write_file", path="go", content="")
        assert [answers[i].status for i in range(3)] == ["killed", "ok", "ok"]
        assert all(answers[i].cell["lost"] == ["x"] for i in range(3))
        assert all("x" in losses(answers[i])[0] for i in range(3))
        assert not (await notebook.run("a")).cell["lost"]


async def test_the_names_of_what_was_lost_follow_the_code(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("a, b, _c = 1, 2, 3")
        await notebook.run("del a; d = 4\ndef f(): ...")
        await notebook.run("1/0")
        await notebook.run("globals().update({f'n{i}': i for i in range(600)})")
        answer = await notebook.run("import os; os._exit(3)")
        assert answer.cell["lost"][:4] == ["b", "d", "f", "n0"]
        assert len(answer.cell["lost"]) == 500
        assert answer.cell["lost_omitted"] == 103
        assert "Lost: b, d, f, n0" in answer.text
        assert "more" in answer.text


@pytest.mark.ways
async def test_a_cell_that_meets_the_death_of_its_kernel_runs_or_says_what_happened(
    servers: Servers,
) -> None:
    async with servers.agent("--allow", "*", "--warm", "0") as notebook:
        for name in "abcdef":
            await notebook.run(
                "import os, pathlib, threading, time\n"
                f"x = 1; go = pathlib.Path('{name}')\n"
                "def die():\n"
                "    while not go.exists(): time.sleep(0.0005)\n"
                "    os._exit(7)\n"
                "threading.Thread(target=die, daemon=True).start()"
            )
            await notebook.call("write_file", path=name, content="")
            answer = await notebook.call("execute", code="'x' in globals()")
            if not answer.failed and answer.text == "True":  # it was quicker
                answer = await notebook.run(
                    "import time\nwhile 'x' in globals(): time.sleep(0.01)\n'x' in globals()"
                )
            assert "code 7" in answer.text
            assert "x" in answer.cell["lost"]
            assert answer.status == "killed" or "False" in answer.text


async def opened(notebook: Agent, code: str = "x = 1") -> str:
    handle = str((await notebook.call("create_session")).data["session"])
    await notebook.run(code, session=handle)
    return handle


async def killed_unseen(notebook: Agent) -> str:
    """A cell that nobody waits for has killed its kernel."""
    handle = await opened(notebook)
    await notebook.run("import os; os._exit(3)", session=handle, wait=0)
    return handle


async def cancelled(notebook: Agent) -> str:
    """A cell whose call was given up did not stop."""
    handle = await opened(notebook)
    with anyio.move_on_after(0.5):
        await notebook.run(STUBBORN, session=handle)
    await notebook.run("1", session=await opened(notebook))  # as long as the kill takes, and more
    return handle


async def too_long(notebook: Agent) -> str:
    """A cell did not stop at its time limit, and its answer is still to be fetched."""
    handle = await opened(notebook)
    await notebook.run(STUBBORN, session=handle, wait=0, timeout=0.3)
    return handle


async def hibernated_in_part(notebook: Agent) -> str:
    """A session had to make room, and one of its variables cannot be kept."""
    handle = await opened(notebook, "import threading; y = 2; x = threading.Lock()")
    for _ in range(4):
        await opened(notebook)
    return handle


async def dropped(notebook: Agent) -> str:
    """A session had to make room, and then its dump had to."""
    handle = await opened(notebook)
    for _ in range(8):
        await opened(notebook)
    return handle


CAUSES: dict[str, tuple[Callable[[Agent], Awaitable[str]], tuple[str, ...]]] = {
    "a cell killed its kernel unseen": (killed_unseen, ()),
    "a cancelled cell was killed": (cancelled, ("--grace", "0.3")),
    "a cell was killed at its limit": (too_long, ("--grace", "0.3")),
    "hibernated without a variable": (hibernated_in_part, ("--max-sessions", "4")),
    "dropped": (dropped, ("--max-sessions", "4", "--quota", "asleep=1")),
}
FIRST: dict[str, dict[str, Any]] = {
    "execute": {"code": "'x' in globals()"},
    "wait": {},
    "list_variables": {},
    "list_files": {},
    "reset": {},
}


LOSSES = [f"{cause}, {tool}" for cause in CAUSES for tool in FIRST]
ALWAYS = [f"{cause}, {tool}" for cause, tool in zip(CAUSES, cycle(FIRST), strict=False)]
"""Each cause with a tool."""


@pytest.mark.parametrize("loss", sampled(LOSSES, *ALWAYS))
async def test_what_is_asked_first_after_a_loss_tells_it(loss: str, servers: Servers) -> None:
    name, tool = loss.split(", ")
    cause, flags = CAUSES[name]
    arguments = FIRST[tool]
    async with servers.agent(
        "--allow", "*", "--warm", "0", "--checkpoints", "off", *flags
    ) as notebook:
        handle = await cause(notebook)
        with anyio.fail_after(60):
            answer = await notebook.call(tool, **arguments, session=handle)
            while "x" not in lost(answer) and tool in ("wait", "list_files", "list_variables"):
                answer = await notebook.call(tool, **arguments, session=handle)  # not yet dead
        assert "x" in lost(answer), answer.text
        assert answer.failed or notices(answer), answer.text
        assert "ost: x" in answer.text or "x (" in answer.text, answer.text
