"""Kernels outside of a sandbox: a subprocess and a raw ZMQ client."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.guest_client import (
    GuestKernel,
    guest,
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: socket names end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kg") as name:
        yield Path(name)


@pytest.fixture
def kernel(folder: Path) -> Iterator[GuestKernel]:
    """An unrestricted kernel."""
    with guest(folder) as running:
        yield running
