"""Messages for the operator of a front."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError, ServerFailure
from kernel_mcp.fleet import commands


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

    monkeypatch.setattr(commands, "connect", lambda *_, **__: None)
    monkeypatch.setattr(commands, "registry_of", lambda _: None)
    monkeypatch.setattr(commands, "_serve_stdio", serve)
    with pytest.raises(told, match=str(failure)):
        commands.run_front(Settings(fleet="127.0.0.1:6379"))
