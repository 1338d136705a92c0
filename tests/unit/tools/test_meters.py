"""Events of calls that meters receive."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.telemetry import Meters
from tests.unit.tools.served import served

pytestmark = [pytest.mark.anyio]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tools that have answered, and reasons of refusals."""
    found: list[str] = []
    monkeypatch.setattr(Meters, "call", lambda _, tool, seconds: found.append(tool))
    monkeypatch.setattr(Meters, "refusal", lambda _, reason: found.append(reason))
    return found


async def test_each_call_is_counted_by_its_tool(tmp_path: Path, heard: list[str]) -> None:
    async with served(tmp_path) as server:
        await server.call("execute", code="x = 1")
        await server.agent.refused("read_file", path="missing")
    assert heard == ["execute", "read_file"]


async def test_what_a_quota_refuses_is_counted(tmp_path: Path, heard: list[str]) -> None:
    async with served(tmp_path, quotas=Quotas(cells=1)) as server:
        await server.hanging()
        heard.clear()
        await server.agent.refused("execute", code="x = 1")
    assert heard == ["quota", "execute"]
