"""Messages for the operator of a front."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError, ServerFailure
from kernel_mcp.fleet import commands
from kernel_mcp.fleet.link import Link
from kernel_mcp.fleet.members import Load, Member


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (ConfigError("--tokens /gone: No such file"), ConfigError),
        (ValueError("odd"), ServerFailure),
    ],
)
def test_what_ends_a_front_is_told_in_words(
    failure: Exception, told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise failure

    async def serve(*_: Any) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)

    monkeypatch.setattr(Link, "connect", lambda _: None)
    monkeypatch.setattr(commands, "_serve_stdio", serve)
    with pytest.raises(told, match=str(failure)):
        commands.run_front(Settings(fleet="127.0.0.1:6379"))


def test_sessions_of_a_lost_node_are_not_counted() -> None:
    load = Load(free_bytes=2**30, sessions=3, busy=1, most=8)
    there, lost = Member("one", "1", "10.0.0.5", "1", load=load), Member("two", "2", "10.0.0.6")
    lines = commands.status([there, replace(lost, lost=True, load=load)]).splitlines()
    assert lines == [
        "one  10.0.0.5  ready, 3 of 8 sessions (1 run cells), 1.0 GiB free, kernel-mcp 1",
        "two  10.0.0.6  lost",
        "2 nodes, 1 of which take sessions; 3 sessions",
    ]
