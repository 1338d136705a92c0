"""How often is looked at what an installer has written."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from kernel_mcp.environments import folder
from kernel_mcp.environments.folder import REST, Spending

pytestmark = pytest.mark.anyio
MOST = 1000


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "LOOK_S", 0)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is held at each look at the folders: 100 bytes more than at the last."""
    found: list[int] = []

    def size(_: Path) -> int:
        found.append(100 * (len(found) + 1))
        return found[-1]

    monkeypatch.setattr(folder, "tree_size", size)
    return found


async def test_folders_are_looked_at_for_a_part_of_the_time(
    tmp_path: Path, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = count()
    calls = count()
    bounded = Spending(MOST, [tmp_path], clock=lambda: next(moments))
    monkeypatch.setattr(bounded, "_written", lambda: next(calls) * 0)
    await bounded.beyond()
    assert looks[-1] == MOST + 100
    assert next(calls) >= len(looks) * (REST - 1)


async def test_what_is_written_meanwhile_is_seen(
    tmp_path: Path, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = count(step=10**6)
    bounded = Spending(MOST, [tmp_path], clock=lambda: next(moments))
    written = iter((0, MOST, 2 * MOST, 2 * MOST + 1))
    monkeypatch.setattr(bounded, "_written", lambda: next(written))
    await bounded.beyond()
    assert len(looks) == 1
