"""What tests of a module share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.servers import Servers, shared_servers


@pytest.fixture(scope="module")
async def servers() -> AsyncIterator[Servers]:
    """One server for each set of flags."""
    async with shared_servers() as servers:
        yield servers
