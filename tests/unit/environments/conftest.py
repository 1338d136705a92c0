"""Fixtures of the tests of environments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.environments.kit import Gate, Kit


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path)
