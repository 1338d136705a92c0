"""An answer about a cell: its flag, its text and its machine-readable part."""

from __future__ import annotations

import json

import anyio
import pytest

from tests.integration.agent import Answer
from tests.integration.servers import Servers

pytestmark = [pytest.mark.anyio]

LONGEST_ERROR = 10_000
"""Characters of an error that Claude Code shows, its blocks joined and its links written out."""
PICTURE = """
from IPython.display import display
display({"image/png": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ\
AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="}, raw=True)
"""


def shown(answer: Answer) -> int:
    """Characters of an error as Claude Code shows it."""
    links = [f"[Resource link: {link.name}] {link.uri}" for link in answer.links]
    return len("\n".join([answer.text, *links]))


async def test_an_answer_is_an_error_where_its_cell_did_not_end_well(servers: Servers) -> None:
    async with servers.agent() as notebook:
        for code, arguments, status in (
            ("1", {}, "ok"),
            ("1/0", {}, "error"),
            ("import tensorflow", {}, "error"),
            ("1 +", {}, "error"),
            ("while True: pass", {"timeout": 0.2}, "timeout"),
            (f"{PICTURE}\n1/0", {}, "error"),
        ):
            answer = await notebook.run(code, **arguments)
            assert answer.status == status, code
            wanted = status != "ok" and not answer.images
            assert answer.failed is wanted, code
        answer = await notebook.run("import time\nwhile True: time.sleep(0.01)", wait=0)
        assert (answer.status, answer.failed) == ("running", False)
        queued = await notebook.run("'next'", wait=0)
        assert (queued.status, queued.failed) == ("queued", False)
        stopped = await notebook.call("interrupt")
        assert (stopped.status, stopped.failed) == ("interrupted", True)
        assert (await notebook.call("wait")).failed is False
        assert (await notebook.call("read_file", path="nowhere")).failed


async def test_a_long_error_keeps_both_ends_and_the_whole_can_be_read(servers: Servers) -> None:
    async with servers.agent() as notebook:
        answer = await notebook.run(
            "for i in range(3000): print('row', i)\nraise ValueError('e' * 9000)"
        )
        assert answer.failed
        assert shown(answer) < LONGEST_ERROR
        assert answer.text.startswith("row 0\n")
        assert answer.text.endswith("eee")
        link = answer.links[0]
        whole = await notebook.client.read_resource(link.uri)
        assert "row 2999\n" in whole.contents[0].text  # type: ignore[union-attr]
        code = "".join(f"import missing_{i}\n" for i in range(1000))
        refused = await notebook.run(code)
        assert refused.failed
        assert shown(refused) < LONGEST_ERROR
        died = await notebook.run(
            "for i in range(60): globals()[f'name_of_some_variable_{i}'] = i\n"
            "import os\nprint('x' * 20_000, flush=True)\nos.kill(os.getpid(), 9)"
        )
        assert died.failed
        assert shown(died) < LONGEST_ERROR
        with anyio.fail_after(60):
            wrong = await notebook.call(
                "run_script", script="# /// script\n# " + "x" * 20_000 + "\n# ///"
            )
        assert wrong.failed
        assert shown(wrong) < LONGEST_ERROR


async def test_a_cell_has_one_number_wherever_it_is_named(servers: Servers) -> None:
    failing = "def f():\n    return 1 / 0\nf()"

    async def numbered(number: int) -> None:
        answer = await notebook.run(failing)
        assert f"Cell In[{number}]" in answer.text
        assert (answer.cell["cell"], answer.cell["execution_count"]) == (number, number)

    async with servers.agent(
        "--profile", "guarded", "--allow", "os", "--max-sessions", "1"
    ) as notebook:
        await numbered(1)
        refused = await notebook.run("import tensorflow")
        assert (refused.cell["cell"], refused.cell["execution_count"]) == (2, None)
        await numbered(3)
        value = await notebook.run("'value'")
        assert (await notebook.run("(Out[4], _4, In[4])")).text == "('value', 'value', \"'value'\")"
        assert value.cell["execution_count"] == 4
        await numbered(6)
        await notebook.call("reset")
        await numbered(7)
        died = await notebook.run("import os; os._exit(3)")
        assert (died.status, died.cell["execution_count"], died.cell["exit_code"]) == (
            "killed",
            8,
            3,
        )
        await numbered(9)
        await notebook.run("kept = 10")
        home = await notebook.call("info")
        other = await notebook.call("create_session")
        await notebook.run("1", session=other.data["session"])
        states = (await notebook.call("list_sessions")).data["sessions"]
        assert "hibernated" in [each["state"] for each in states]
        assert (await notebook.run("kept, len(In)")).text.startswith("(10, 12)")
        await numbered(12)
        await notebook.call("export_notebook", path="all.ipynb")
        uri = f"kernel://{home.data['session']}/notebook"
        text = (await notebook.client.read_resource(uri)).contents[0].text  # type: ignore[union-attr]
        every = json.loads(text)["cells"]
        cells = [cell for cell in every if cell["cell_type"] == "code"]
        boundaries = [cell["source"] for cell in every if cell["cell_type"] != "code"]
        assert len(boundaries) == 2, boundaries  # the reset, and the death of the kernel
        counts = [cell["execution_count"] for cell in cells]
        assert counts == [1, None, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
        results = [out for cell in cells for out in cell["outputs"] if "execution_count" in out]
        assert [out["execution_count"] for out in results] == [4, 5, 11]


async def test_the_outcome_says_how_far_a_cell_came_and_what_its_variables_hold(
    servers: Servers,
) -> None:
    async with servers.agent("--profile", "guarded", "--allow", "os,sys") as notebook:
        for code, arguments, status, phase, exit_code, state in (
            ("x = 1", {}, "ok", "run", 0, 1),
            ("1/0", {}, "error", "run", 1, 2),
            ("import tensorflow", {}, "error", "check", None, 2),
            ("import sys; sys.exit(7)", {}, "error", "run", 7, 4),
            ("sys.exit('a word')", {}, "error", "run", 1, 5),
            ("while True: pass", {"timeout": 0.2}, "timeout", "run", 130, 6),
            ("def f(:", {}, "error", "check", None, 6),
            ("import os; os._exit(9)", {}, "killed", "run", 9, None),
            ("1 +", {}, "error", "check", None, None),
            ("y = 2", {}, "ok", "run", 0, 10),
            ("os.kill(os.getpid(), 9)", {}, "error", "run", 1, 11),
            ("import os; os.kill(os.getpid(), 9)", {}, "killed", "run", 137, None),
        ):
            answer = await notebook.run(code, **arguments)
            found = [answer.cell[key] for key in ("phase", "exit_code", "state_as_of")]
            assert answer.status == status, code
            assert found == [phase, exit_code, state], (code, found)
        assert answer.cell["lost"] == ["y"]
        assert answer.cell["state_kept"] is False
        running = await notebook.run("while True: pass", wait=0)
        assert running.cell["exit_code"] is None
        queued = await notebook.run("1", wait=0)
        assert (queued.cell["phase"], queued.cell["exit_code"]) == ("queue", None)
        await notebook.call("interrupt")


async def test_what_does_not_compile_was_not_run_whoever_finds_that(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run("x = 1")
        answer = await notebook.run("def f(:\n    pass")
        assert "Cell In[2]" in answer.text
        found = [answer.cell[key] for key in ("phase", "exit_code", "execution_count")]
        assert (found, answer.cell["state_as_of"]) == (["check", None, 2], 1)
        assert (await notebook.run("x")).cell["state_as_of"] == 3


@pytest.mark.ways
async def test_a_script_gives_its_streams_apart_and_every_cell_its_record(servers: Servers) -> None:
    script = (
        "import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('more')\n"
        "from IPython.display import display\n"
        "display({'application/json': {'a': 1}, 'text/html': '<b>x</b>'}, raw=True)\n1 / 0"
    )
    async with servers.agent("--allow", "sys") as notebook:
        answer = await notebook.call("run_script", script=script)
        assert (answer.cell["exit_code"], answer.cell["phase"]) == (1, "run")
        assert answer.cell["stdout"] == "out\nmore\n"
        assert answer.cell["stderr"].startswith("err\n")
        assert answer.cell["stderr"].endswith("ZeroDivisionError: division by zero\n")
        for link in answer.links:
            page = await notebook.call("read_file", path=link.uri)
            assert not page.failed, page.text
        left = await notebook.call("run_script", script="import sys\nsys.exit(3)")
        assert left.cell["exit_code"] == 3
        good = await notebook.call("run_script", script="import sys\nsys.exit(0)")
        assert (good.cell["exit_code"], good.failed) == (0, False)
        cell = await notebook.run("import sys\nprint('one')\nprint('two', file=sys.stderr)\n3")
        path = f"kernel://{cell.cell['session']}/cells/{cell.cell['cell']}.json"
        text = (await notebook.client.read_resource(path)).contents[0].text  # type: ignore[union-attr]
        record = json.loads(text)
        assert record.pop("client").startswith("mcp ")
        assert record == {**cell.cell, "stdout": "one\n", "stderr": "two\n"}
