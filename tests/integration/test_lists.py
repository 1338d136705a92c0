"""Lists for clients, and how long they may keep them."""

from __future__ import annotations

import pytest

from tests.integration.agent import ERAS
from tests.integration.servers import Servers

pytestmark = [pytest.mark.anyio]
HOUR_MS = 3600 * 1000


@pytest.mark.parametrize("era", ERAS)
async def test_lists_may_be_kept_for_an_hour_and_prompts_are_none(
    servers: Servers, era: str
) -> None:
    async with servers.agent(era=era) as notebook:
        client = notebook.client
        lists = (
            await client.list_tools(),
            await client.list_resources(),
            await client.list_resource_templates(),
        )
        kept = HOUR_MS if era == "auto" else 0  # the older era has no such field
        assert [each.ttl_ms for each in lists] == [kept] * 3
        assert client.server_capabilities.prompts is None
        assert client.server_capabilities.tools is not None
