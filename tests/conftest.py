"""Fixtures shared by every level of the suite."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """The event loop the server runs on."""
    return "asyncio"
