"""Invariants after every test of a template."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.integration.processes import descendants, open_descriptors


@pytest.fixture(autouse=True)
def nothing_is_left(anyio_backend: str) -> Iterator[None]:
    """Every test here ends without a child process and with the descriptors it began with."""
    descriptors = open_descriptors()
    yield
    assert descendants(os.getpid()) == []
    assert open_descriptors() == descriptors
