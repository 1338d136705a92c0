"""A hostile kernel that the operator has named: what it sends is bounded, others go on."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.escape.hostile_kernel import MODES
from tests.integration.agent import Agent
from tests.integration.servers import Servers
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

FINITE = (
    *("flood_unsigned", "flood_headers", "flood_values", "flood_replies", "flood_tiny"),
    *("forge_for_others", "forge_parents", "wrong_types", "ask_for_input"),
)
ENDLESS = ("flood_output", "flood_big_output", "flood_shell", "never")
ENDS = {
    "many_parts": "a message of more than 64 parts on its iopub channel",
    "close_everything": "closed its",
    "die": "the kernel exited with code 3",
}
FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
async def notebook(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Agent]:
    """A client of a server on which each mode is a language."""
    folder, flags = tmp_path_factory.mktemp("specs"), []
    for mode in ("honest", "huge_message", *FINITE, *ENDLESS, *ENDS):
        spec = folder / mode
        spec.mkdir()
        for file in ("hostile_kernel.py", "hostile_program.py"):
            shutil.copy(FOLDER / file, spec)
        program = "{resource_dir}/hostile_program.py"
        argv = [sys.executable, "-I", "-B", program, mode, "{connection_file}"]
        (spec / "kernel.json").write_text(json.dumps({"argv": argv, "language": "none"}))
        flags += ["--kernel", f"{mode}={spec}"]
    async with servers.agent("--grace", "1", *flags) as notebook:
        yield notebook


async def answers(notebook: Agent) -> None:
    """Check that another session does its work."""
    assert (await notebook.run("6 * 7")).text == "42"


async def opened(notebook: Agent, mode: str) -> str:
    answer = await notebook.call("create_session", language=mode)
    assert not answer.failed, answer.text
    assert len(answer.text) < 2000
    assert "\x1b" not in answer.text
    return str(answer.data["session"])


def test_every_mode_is_one_of_the_hostile_kernel() -> None:
    assert {*FINITE, *ENDLESS, *ENDS} <= MODES.keys()


@pytest.mark.parametrize(
    "mode", sampled(FINITE, "flood_headers", "forge_for_others", "wrong_types")
)
async def test_noise_does_not_change_what_a_cell_is_told_to_have_done(
    notebook: Agent, mode: str
) -> None:
    session = await opened(notebook, mode)
    answer = await notebook.run("x", session=session, timeout=60, wait=60)
    assert answer.status == "ok"
    assert "forged" not in answer.text
    await answers(notebook)
    await notebook.call("close_session", session=session)


@pytest.mark.parametrize("mode", sampled(ENDLESS, "flood_output"))
async def test_a_kernel_that_never_ends_its_cell_is_killed(notebook: Agent, mode: str) -> None:
    session = await opened(notebook, mode)
    answer = await notebook.run("x", session=session, timeout=1, wait=60)
    assert answer.status == "killed"
    assert "it reached its time limit of 1 s" in answer.text
    await answers(notebook)
    await notebook.call("close_session", session=session)


async def test_a_message_that_is_too_large_is_left_out(notebook: Agent) -> None:
    session = await opened(notebook, "huge_message")
    answer = await notebook.run("x", session=session, timeout=3, wait=60)
    assert "left out: an output of 17.8 MB; write it to a file" in answer.text
    assert "it reached its time limit of 3 s" in answer.text
    await answers(notebook)
    await notebook.call("close_session", session=session)


@pytest.mark.parametrize("mode", ENDS)
async def test_the_end_of_such_a_kernel_is_told_with_its_cause(notebook: Agent, mode: str) -> None:
    session = await opened(notebook, mode)
    answer = await notebook.run("x", session=session, timeout=60, wait=60)
    assert answer.status == "killed"
    assert ENDS[mode] in answer.text
    await answers(notebook)
    await notebook.call("close_session", session=session)
