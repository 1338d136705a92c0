"""A back-end that fails harms its own sessions alone, and every answer says what happened."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import pytest
from mcp.client import Client

from tests.contracts.test_backends import installed
from tests.integration.agent import Agent, command
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

Serve = Callable[[str], AbstractAsyncContextManager[Agent]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """A server with a back-end that has a fault, and a session of it."""

    @asynccontextmanager
    async def served(fault: str = "none") -> AsyncIterator[Agent]:
        flags = ("--kernel", f"odd=faulty:{fault}", "--grace", "500ms", "--max-sessions", "3")
        given = ("--warm", "0", "--no-template", *flags)
        async with Client(command(*given, env=installed(tmp_path))) as client:
            yield Agent(client)

    return served


RAISED = {
    "exit": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "cancel": "CancelledError",
    "odd": "OddError",
    "group": "ValueError: one",
    "silent": "its back-end gave no reason",
}


async def test_whatever_a_cell_raises_is_its_error(serve: Serve) -> None:
    async with serve("none") as notebook:
        for code, told in RAISED.items():
            await notebook.call("create_session", name="odd", language="odd")
            failed = await notebook.run(code, session="odd")
            assert (failed.status, told in failed.text) == ("error", True), failed.text
            assert "still here" in (await notebook.run("still here", session="odd")).text
            assert (await notebook.run("6 * 7")).text == "42", code
            await notebook.call("close_session", session="odd")


async def test_content_of_any_kind_harms_nobody(serve: Serve) -> None:
    async with serve("none") as notebook:
        await notebook.call("create_session", name="odd", language="odd")
        assert (await notebook.run("malformed", session="odd")).status in ("ok", "error")
        assert "left out" in (await notebook.run("huge", session="odd")).text
        flood = await notebook.run("flood", session="odd")
        assert flood.text.startswith("0\n1\n")
        assert "19999" in flood.text
        assert "from a thread" in (await notebook.run("thread", session="odd")).text


@pytest.mark.parametrize("code", sampled(["block", "stubborn"], "stubborn"))
async def test_a_cell_that_does_not_stop_loses_its_kernel_alone(serve: Serve, code: str) -> None:
    async with serve("none") as notebook:
        await notebook.call("create_session", name="odd", language="odd")
        async with anyio.create_task_group() as tasks:

            async def stuck() -> None:
                stopped = await notebook.run(code, session="odd", timeout=1)
                assert stopped.status == "killed"
                assert "time limit of 1 s" in stopped.text

            tasks.start_soon(stuck)
            assert (await notebook.run("6 * 7")).text == "42"
        assert (await notebook.run("6 * 7")).text == "42"


@pytest.mark.parametrize("fault", sampled(["none", "ended raises"], "ended raises"))
async def test_the_end_of_a_kernel_needs_no_reason(serve: Serve, fault: str) -> None:
    async with serve(fault) as notebook:
        await notebook.call("create_session", name="odd", language="odd")
        died = await notebook.run("die", session="odd")
        assert died.status == "killed"
        assert "Traceback" not in died.text


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("start raises", "No kernel was started at nowhere. SystemExit: 3"),
        pytest.param(
            *("start cancels", "No kernel was started at nowhere. CancelledError"),
            marks=pytest.mark.ways,
        ),
        pytest.param(
            *("start returns nothing", "its back-end returned NoneType"), marks=pytest.mark.ways
        ),
    ],
)
async def test_a_start_that_fails_is_a_sentence(serve: Serve, fault: str, told: str) -> None:
    async with serve(fault) as notebook:
        assert told in await notebook.refused("create_session", language="odd")
        assert (await notebook.run("6 * 7")).text == "42"


@pytest.mark.ways
async def test_a_kernel_that_does_not_close_takes_no_room_for_good(serve: Serve) -> None:
    async with serve("close hangs") as notebook:
        for _ in range(4):
            opened = await notebook.call("create_session", name="odd", language="odd")
            assert not opened.failed, opened.text
            await notebook.call("close_session", session="odd")
        assert (await notebook.run("6 * 7")).text == "42"


@pytest.mark.parametrize("fault", sampled(["end hangs", "end raises", "close hangs"], "end raises"))
async def test_the_server_ends_all_the_same(serve: Serve, fault: str) -> None:
    async with serve(fault) as notebook:
        await notebook.call("create_session", name="odd", language="odd")
        await notebook.run("something", session="odd")


async def test_limits_that_nobody_would_keep_are_refused(serve: Serve) -> None:
    async with serve("none") as notebook:
        text = await notebook.refused("create_session", language="odd", memory="1G")
        assert "this server limits nothing at nowhere" in text
        about = (await notebook.call("info")).data
        assert about["languages"] == ["odd: Faults, outside the sandbox at nowhere"]
        opened = await notebook.call("create_session", language="odd")
        assert "at nowhere, outside the sandbox" in opened.text


async def test_late_output_is_that_of_its_cell(serve: Serve) -> None:
    async with serve("none") as notebook:
        await notebook.call("create_session", name="odd", language="odd")
        await notebook.run("later", session="odd")
        told = await notebook.run("now", session="odd")
        while "earlier" not in told.text:
            told = await notebook.call("wait", session="odd", cell=1)
        shown = (await notebook.call("wait", session="odd", cell=2)).text
        assert "mine" in shown
        assert "of the earlier cell" not in shown
        assert "of the earlier cell" in (await notebook.call("wait", session="odd", cell=1)).text
