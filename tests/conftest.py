"""Fixtures shared by every level of the suite."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# how fast examples are made says something about the machine, not about them
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")


@pytest.fixture
def anyio_backend() -> str:
    """The event loop the server runs on."""
    return "asyncio"
