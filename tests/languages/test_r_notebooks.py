"""Tools in a session of R: what they say is true there, and notebooks are R's."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.agent import Agent
from tests.integration.servers import Servers
from tests.languages.kernels import kernel_flag

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def notebook(servers: Servers) -> AsyncIterator[Agent]:
    async with servers.agent("--kernel", kernel_flag("r")) as notebook:
        yield notebook


@pytest.fixture(autouse=True)
async def session(notebook: Agent) -> AsyncIterator[None]:
    opened = await notebook.call("create_session", name="r", language="r")
    assert not opened.failed, opened.text
    yield
    await notebook.call("close_session", session="r")


async def test_syntax_is_that_of_the_language(notebook: Agent) -> None:
    good = await notebook.call("check_syntax", session="r", code="x <- 1:3; f = function(a) a^2")
    assert good.data["valid"]
    bad = await notebook.call("check_syntax", session="r", code="x <- 1\nimport numpy")
    assert not bad.data["valid"]
    (found,) = bad.data["diagnostics"]
    assert (found["line"], found["source_line"]) == (2, "import numpy")
    assert "dependencies and python are for Python alone" in await notebook.refused(
        "check_syntax", session="r", code="1", dependencies=["six"]
    )


async def test_a_fence_of_the_language_is_taken_off_and_quoted_names_stay(notebook: Agent) -> None:
    answer = await notebook.run("```{r}\n`my column` <- 2\n```", session="r")
    assert "fence was taken off" in answer.text
    assert (await notebook.run("`my column`", session="r")).text.startswith("[1] 2")


async def test_a_script_of_the_language_has_its_streams(notebook: Agent) -> None:
    answer = await notebook.call(
        "run_script", script="cat('out'); message('err'); writeLines('a', 'o.txt')", language="r"
    )
    assert (answer.status, answer.cell["stdout"]) == ("ok", "out")
    assert answer.cell["stderr"].strip() == "err"
    assert "the script wrote o.txt" in answer.text
    failed = await notebook.call("run_script", script="stop('no')", language="r")
    assert (failed.failed, failed.status) == (True, "error")


async def test_a_death_and_a_reset_tell_what_is_lost_in_the_words_of_the_language(
    notebook: Agent,
) -> None:
    answer = await notebook.run("tools::pskill(Sys.getpid(), 9)", session="r")
    assert "All variables, functions and loaded packages of this session are lost" in answer.text
    answer = await notebook.call("reset", session="r", packages=True)
    assert "all variables, functions and loaded packages are gone" in answer.text
    assert "imports" not in answer.text
