"""Sessions of bash say what becomes of their shell."""

from __future__ import annotations

import pytest

from tests.integration.agent import agent
from tests.languages.kernels import kernel_flag

pytestmark = [pytest.mark.anyio, pytest.mark.ways]


async def test_a_cell_that_ends_its_shell_is_an_error_that_loses_variables() -> None:
    async with agent("--kernel", kernel_flag("bash")) as notebook:
        opened = await notebook.call("create_session", name="b", language="bash")
        assert not opened.failed, opened.text
        for ending in ("v=1; exit 0", "kill -9 $$", "exec true"):
            answer = await notebook.run(ending, session="b")
            assert (answer.status, answer.cell["state_kept"]) == ("error", False), answer.text
            assert "all variables and functions of this session are lost" in answer.text
            assert (await notebook.run("echo [$v]", session="b")).text == "[]"
        told = await notebook.run("echo Restarting Bash", session="b")
        assert (told.status, told.cell["state_kept"]) == ("ok", True)


async def test_a_session_that_may_start_no_more_processes_can_be_reset() -> None:
    limits = ("--kernel", kernel_flag("bash"), "--pids", "64")
    async with agent(*limits) as notebook:
        opened = await notebook.call("create_session", name="b", language="bash")
        assert not opened.failed, opened.text
        await notebook.run("for i in $(seq 58); do sleep 600 & done", session="b")
        await notebook.run("sleep 1 & sleep 1 & sleep 1 & sleep 1 &", session="b", timeout=3)
        reset = await notebook.call("reset", session="b")
        assert not reset.failed, reset.text
        assert (await notebook.run("echo fresh", session="b")).text == "fresh"
