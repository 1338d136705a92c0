"""What is there already."""

from __future__ import annotations

import pytest

from kernel_mcp.environments.layer import Generation
from kernel_mcp.packages.result import Present

PRESENT = Present(
    versions={"pandas": "2.3.1", "torch": "3.0rc1"},
    modules={},
    requested=("polars",),
    permitted=frozenset({"polars"}),
)


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("pandas", True),
        ("pandas>=2", True),
        ("pandas<2", False),
        ("torch>=3.0rc1", True),
        ("pandas[excel]", False),
        ("pandas; python_version > '3'", False),
        ("numpy", False),
    ],
)
def test_only_what_is_certain_counts_as_met(text: str, met: bool) -> None:
    assert PRESENT.satisfies(text) is met


@pytest.mark.parametrize(
    ("generation", "new"),
    [
        (Generation(("polars",), permitted=("polars",)), False),
        (Generation(("polars",), ("x==1",)), True),
        (Generation(("pandas",)), True),
        (Generation(("polars",), permitted=("pandas",)), True),
    ],
)
def test_a_generation_that_adds_nothing_is_not_needed(generation: Generation, new: bool) -> None:
    assert PRESENT.lacks(generation) is new
