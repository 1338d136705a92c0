"""The contract of calls on sessions, kept by those of this process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.sandbox.select import proven_sandbox
from kernel_mcp.server import app_context
from kernel_mcp.tools.local import LocalCalls
from tests.integration.calls_contract import CONTRACT, Clause, links

pytestmark = [pytest.mark.anyio]


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda each: each.__name__)
async def test_sessions_of_this_process(clause: Clause) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="calls-") as folder:
        settings = Settings(
            warm=0,
            persist=None,
            state_dir=Path(folder) / "s",
            allow_install=("*",),
            find_links=(str(links(Path(folder) / "links")),),
        )
        async with app_context(settings, proven_sandbox("auto")) as built:
            await clause(LocalCalls(built))
