"""A session that joins a running kernel of R: by its connection file, and on a Jupyter server."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from mcp.client import Client

from tests.contracts.interpreter import R, words
from tests.integration.agent import Agent, command, losses, notices
from tests.integration.jupyter_kernels import Opened, by_file, jupyter_server
from tests.languages.kernels import kernel_flag

pytestmark = [pytest.mark.anyio, pytest.mark.full]


@pytest.fixture(params=["file", "server"])
async def theirs(request: pytest.FixtureRequest) -> AsyncIterator[Opened]:
    kernel_flag("r")  # where there is none, the test is not run
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        if request.param == "file":
            yield await stack.enter_async_context(by_file(folder / "kernel.json", "ir"))
        else:
            server = await stack.enter_async_context(jupyter_server(folder))
            yield await stack.enter_async_context(server.notebook("ir"))


async def test_it_shares_variables_and_says_what_it_lacks(theirs: Opened) -> None:
    await theirs.run("theirs <- 41")
    async with Client(command("--attach", theirs.flag, "--grace", "30")) as client:
        agent = Agent(client)
        opened = await agent.call("create_session", name="x", attach=theirs.place)
        assert not opened.failed, opened.text
        answer = await agent.run("ours <- theirs + 1; ours", session="x")
        assert "42" in words(answer.text)
        assert "in an external kernel" in notices(answer)[-1]
        await theirs.run("ours <- ours + 1")
        assert "43" in words((await agent.run("ours", session="x")).text)
        failed = await agent.run(R.fails, session="x")
        assert (failed.status, "wrong" in failed.text) == ("error", True)
        for tool, code in {"check_syntax": {"code": "1 +"}, "list_variables": {}}.items():
            refused = await agent.refused(tool, session="x", **code)
            assert f"{tool} is not available" in refused
        await theirs.restart()
        lost = await agent.run("exists('ours')", session="x")
        assert "FALSE" in words(lost.text)
        assert "variables, functions and loaded packages" in losses(lost)[0]
        await theirs.run("ours <- 43")
        stopped = await agent.run("repeat Sys.sleep(0.1)", session="x", timeout=1)
        if theirs.place.startswith("http"):
            assert stopped.status == "timeout"
            assert "43" in words((await agent.run("ours", session="x")).text)
        else:
            assert "goes on in the attached kernel" in stopped.text
