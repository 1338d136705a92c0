"""A loss by a failure of the server, or for its needs, is reported like any other."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import anyio
import pytest
from mcp.client import Client

from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import LaunchError
from kernel_mcp.protocol import build_mcp
from kernel_mcp.sandbox.select import proven_sandbox
from kernel_mcp.server import app_context
from kernel_mcp.sessions import bounds
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session
from kernel_mcp.units import GIB
from tests.integration.agent import Agent, lost, notices
from tests.unit.fake_kernels import Handed

pytestmark = [pytest.mark.anyio]

FIRST: dict[str, dict[str, Any]] = {
    "execute": {"code": "'x' in globals()"},
    "list_variables": {},
    "list_files": {},
    "wait": {},
}
Cause = Callable[[Session, pytest.MonkeyPatch], Awaitable[None]]


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Agent, SessionManager]]:
    """A client of a server in this process, and its sessions."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="inside-") as folder:
        settings = Settings(warm=0, no_template=True, state_dir=Path(folder))
        async with (
            app_context(settings, proven_sandbox("auto")) as built,
            Client(build_mcp(built, Handed())) as client,
        ):
            yield Agent(client), built.manager


async def with_x(notebook: Agent, manager: SessionManager) -> Session:
    """A session with one variable."""
    handle = str((await notebook.call("create_session")).data["session"])
    await notebook.run("x = 1", session=handle)
    return next(session for session in manager.sessions if session.handle == handle)


async def relieved(session: Session, patch: pytest.MonkeyPatch) -> None:
    """The server's memory ran short."""
    with patch.context() as now:
        now.setattr(bounds, "held_by", lambda _session: GIB)
        assert bounds.relieve(session, "the server's memory ran short") == "lost its kernel"
    assert session.kernel is not None
    await session.kernel.dead.wait()


async def failed(session: Session, patch: pytest.MonkeyPatch) -> None:
    """Make the runner of the session's cells fail."""

    async def fail() -> NoReturn:
        raise RuntimeError("tested")

    patch.setattr(session.scheduler, "_run_next", fail)
    session.submit("1", 0.0)
    await session.ended.wait()


@pytest.mark.parametrize("cause", [pytest.param(relieved, marks=pytest.mark.ways), failed])
async def test_what_the_server_costs_a_session_is_named(
    cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served() as (notebook, manager):
        for tool, arguments in FIRST.items():
            session = await with_x(notebook, manager)
            with anyio.fail_after(60):
                await cause(session, monkeypatch)
            answer = await notebook.call(tool, session=session.handle, **arguments)
            assert lost(answer) == ["x"], (tool, answer.text)
            assert answer.failed or notices(answer), tool
            assert "Lost: x." in answer.text, tool


async def test_a_reset_without_a_fresh_kernel_keeps_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as (notebook, manager):
        session = await with_x(notebook, manager)
        with monkeypatch.context() as now:

            async def start(*_: object) -> NoReturn:
                raise LaunchError("No kernel today.")

            now.setattr(session.lifecycle._starter._source, "start", start)
            answer = await notebook.call("reset", session=session.handle)
            assert answer.failed
            assert "Nothing was reset" in answer.text
        again = await notebook.run("x", session=session.handle)
        assert (again.text, again.cell["lost"], notices(again)) == ("1", [], [])


async def test_a_session_that_ends_names_what_its_dead_kernel_had_cost() -> None:
    async with served() as (notebook, manager):
        session = await with_x(notebook, manager)
        assert session.kernel is not None
        session.kernel.kill()
        with anyio.fail_after(60):
            await session.kernel.dead.wait()
            while not session.notifications.pending:
                await anyio.lowlevel.checkpoint()
        session.submit("y = 2", 0.0)
        await session.cells[-1].finished.wait()
        await manager.close(session, "has expired and was ended")
        answer = await notebook.call("execute", code="x", session=session.handle)
        assert lost(answer) == ["x", "y"]


async def test_a_close_whose_answer_nobody_has_read_is_told_again() -> None:
    async with served() as (notebook, manager):
        session = await with_x(notebook, manager)
        await notebook.call("close_session", session=session.handle)
        answer = await notebook.call("execute", code="x", session=session.handle)
        assert "never yours" in answer.text
        manager.tombstones.mark_undelivered(session.handle)
        answer = await notebook.call("execute", code="x", session=session.handle)
        assert lost(answer) == ["x"]
        assert "was closed: its variables" in answer.text
