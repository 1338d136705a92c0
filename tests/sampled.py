"""Several ways to run a test: some are tried with every change, all of them with `--full`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def sampled(ways: Iterable[str], *always: str) -> list[ParameterSet]:
    """Return all `ways` as parameters; those not in `always` run with `--full` alone."""
    return [
        pytest.param(way, id=way, marks=() if way in always else (pytest.mark.full,))
        for way in ways
    ]
