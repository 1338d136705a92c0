"""Trouble of one session, or of the machine, is told and ends neither the server nor the others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.agent import agent

pytestmark = [pytest.mark.anyio]


async def test_folders_removed_under_a_server_cost_files_and_are_told(tmp_path: Path) -> None:
    shared, state = tmp_path / "w", tmp_path / "s"
    flags = ("--warm", "1", "--workspace", str(shared), "--state-dir", str(state))
    async with agent(*flags) as notebook:
        await notebook.run("x = 1; open('f', 'w').write('data')")
        fresh = (await notebook.call("create_session")).data["session"]
        third = (await notebook.call("create_session")).data["session"]
        remove(shared)
        told = await notebook.run("x + 1")
        assert "2" in told.text
        assert "removed from outside" in told.text
        assert (await notebook.run("x + 1")).text == "2"
        assert "reset" in await notebook.refused("write_file", path="g", content="g")
        began = await notebook.run("open('g', 'w').write('g')", session=fresh)
        assert began.status == "ok"
        for folder in state.glob("s-*/[wrpk]"):
            remove(folder)
        await notebook.call("reset", files=True)
        again = await notebook.run("import pathlib; list(pathlib.Path().iterdir())")
        assert again.text.startswith("[]")
        for name in ("list_files", "list_variables", "list_sessions", "info"):
            assert not (await notebook.call(name)).failed
        assert (await notebook.run("open('g').read()", session=fresh)).text == "'g'"
        assert (await notebook.run("y = 1; y", session=third)).text.startswith("1")
        made = (await notebook.call("create_session")).data["session"]
        assert (await notebook.run("1", session=made)).text == "1"
        for session in (fresh, third, made):
            assert not (await notebook.call("close_session", session=session)).failed
        assert (await notebook.run("1")).text == "1"


def remove(folder: Path) -> None:
    """Remove a folder although the server makes others in it meanwhile."""
    shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}-removed")))
