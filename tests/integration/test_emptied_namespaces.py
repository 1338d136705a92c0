"""Whatever empties a namespace is reported, unless code names what it deletes."""

from __future__ import annotations

import pytest

from tests.integration.agent import agent, lost, notices
from tests.integration.servers import Servers

pytestmark = [pytest.mark.anyio]

MAKE = "a, b, c = 1, [2], 'three'"
EMPTYING = (
    "%reset",
    "%reset -f",
    "%reset_selective -f [abc]",
    "get_ipython().reset()",
    "globals().clear()",
    "import sys; sys.modules['__main__'].__dict__.clear()",
    "for name in 'abc': del globals()[name]",
    "for name in 'abc': globals().pop(name)",
    "exec('del a, b, c')",
    "def clean(space): [space.pop(name) for name in 'abc']\nclean(globals())",
    "globals().clear(); 1/0",
)
PLAIN = (
    "del a",
    "del a, b, c",
    "a = b = c = 0; del a, b, c",
    "def drop():\n    global b\n    del b\ndrop()",
    "try: 1/0\nexcept ArithmeticError as a: pass",
    "a = None",
)


async def test_a_cell_that_empties_the_namespace_says_which_variables_are_gone(
    servers: Servers,
) -> None:
    async with servers.agent("--allow", "*") as notebook:
        for code in EMPTYING:
            await notebook.run(MAKE)
            answer = await notebook.run(code)
            (notice,) = [text for text in notices(answer) if "removed" in text]
            assert "without a `del` of them. Lost: " in notice, code
            assert {"a", "b", "c"} <= set(lost(answer)), code
            assert answer.cell["state_kept"] is False, code
            answer = await notebook.run("'a' in globals()")
            assert (answer.text, answer.cell["state_kept"], lost(answer)) == ("False", True, [])


async def test_a_deletion_by_name_is_nothing_to_report(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        for code in PLAIN:
            await notebook.run(MAKE)
            answer = await notebook.run(code)
            assert (notices(answer), answer.cell["state_kept"]) == ([], True), code


@pytest.mark.ways
async def test_variables_that_a_cell_removed_come_back_by_undo() -> None:
    async with agent("--allow", "*", "--warm", "0", pauses=False) as notebook:
        await notebook.run(MAKE)
        answer = await notebook.run("%reset -f", checkpoint=True)
        assert "undo brings variables back as they were after cell 1." in answer.text
        assert not (await notebook.call("undo")).failed
        assert (await notebook.run("a, b, c")).text == "(1, [2], 'three')"


async def test_of_many_variables_that_are_gone_the_first_are_named_and_all_counted(
    servers: Servers,
) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("globals().update({f'v{i}': i for i in range(1500)})")
        answer = await notebook.run("%reset -f")
        assert "removed 1,500 variables" in answer.text
        assert "Lost: v0, v1, v2" in answer.text
        assert len(lost(answer)) + answer.cell["lost_omitted"] == 1500
