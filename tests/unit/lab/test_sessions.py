"""Sessions as JupyterLab's server knows them: which notebook is which session's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.lab import sessions
from kernel_mcp.lab.sessions import Sessions

pytestmark = pytest.mark.anyio


class Servers:
    """The answers of running servers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: list[list[dict[str, Any]]] = []
        self.name = "first"
        monkeypatch.setattr(sessions, "LISTED_S", 0.0)
        monkeypatch.setattr(sessions, "ask_all", self._ask_all)
        self.sessions = Sessions(Path("/nowhere"))

    def _ask_all(self, _state: Path, _question: object) -> list[dict[str, Any]]:
        return [{"sessions": sessions, "server": self.name} for sessions in self.now]

    async def listed(self) -> dict[str, str]:
        """Handles of sessions by the names of their notebooks."""
        return {path: each.handle for path, each in (await self.sessions.listed()).items()}


def session(handle: str, name: str = "", kept: str = "") -> dict[str, Any]:
    return {"session": handle, "name": name, "persisted_id": kept}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    return Servers(monkeypatch)


async def test_a_notebook_stays_with_its_session_when_another_has_the_name(
    servers: Servers,
) -> None:
    servers.now = [[session("s-b", "work")]]
    assert await servers.listed() == {"work.ipynb": "s-b"}
    servers.now = [[session("s-a", "work")], [session("s-b", "work")]]
    both = {"work.ipynb": "s-b", "work s-a.ipynb": "s-a"}
    assert await servers.listed() == both
    servers.now = servers.now[::-1]
    assert await servers.listed() == both
    servers.now = [[session("s-a", "work")], [session("s-c", "work")]]
    assert await servers.listed() == {"work s-a.ipynb": "s-a", "work s-c.ipynb": "s-c"}


async def test_a_session_that_comes_back_with_the_next_server_has_its_notebook(
    servers: Servers,
) -> None:
    servers.now = [[session("s-a", kept="1"), session("s-b", "work", kept="2")]]
    assert await servers.listed() == {"s-a.ipynb": "s-a", "work.ipynb": "s-b"}
    servers.now = []
    assert await servers.listed() == {}
    servers.now = [[session("s-d", "work", kept="2"), session("s-c", kept="1")]]
    assert await servers.listed() == {"s-a.ipynb": "s-c", "work.ipynb": "s-d"}


async def test_a_session_that_keeps_its_handle_is_another_kernel_on_the_next_server(
    servers: Servers,
) -> None:
    servers.now = [[session("s-a", kept="1")]]
    [before] = (await servers.sessions.listed()).values()
    [same] = (await servers.sessions.listed()).values()
    servers.name = "next"
    [after] = (await servers.sessions.listed()).values()
    assert before == same
    assert before != after
    assert (before.handle, before.path) == (after.handle, after.path)
    assert before.kernel_id == same.kernel_id != after.kernel_id
