"""What an answer tells of a cell, in its flag, its text and its machine-readable part."""

from __future__ import annotations

import anyio
import pytest

from tests.integration.agent import Answer, agent

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


async def test_an_answer_is_an_error_where_its_cell_did_not_end_well() -> None:
    async with agent() as notebook:
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


async def test_a_long_error_keeps_both_ends_and_the_whole_can_be_read() -> None:
    async with agent() as notebook:
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
