"""Times, sizes and numbers with units: what is taken, and what the refusal says."""

from __future__ import annotations

import math

import pytest

from kernel_mcp import units
from kernel_mcp.units import GIB, KIB, MIB


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("30", 30.0),
        ("30s", 30.0),
        ("5m", 300.0),
        ("2h", 7200.0),
        ("1.5h", 5400.0),
        ("500ms", 0.5),
        (" 1D ", 86400.0),
        (12, 12.0),
        (0.25, 0.25),
    ],
)
def test_a_duration_is_a_number_with_an_optional_unit(given: object, seconds: float) -> None:
    assert units.duration(given) == seconds


@pytest.mark.parametrize(
    "given", ["", "0", "-5", "5 minutes", "1h30m", "nan", "inf", True, -1, math.inf, None, [5]]
)
def test_a_duration_above_zero_is_demanded(given: object) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        units.duration(given)


def test_a_limit_of_zero_seconds_lifts_it() -> None:
    assert units.limit_duration("0") == 0


def test_an_idle_time_can_be_never() -> None:
    assert units.idle_duration("Never") == math.inf
    with pytest.raises(ValueError, match="or never"):
        units.idle_duration("0")


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("512M", 512 * MIB),
        ("2G", 2 * GIB),
        ("2GiB", 2 * GIB),
        ("2gb", 2 * GIB),
        ("1.5k", 1536),
        ("64 K", 64 * KIB),
        ("4000000b", 4_000_000),
        ("0", 0),
        (4 * MIB, 4 * MIB),
        (str(MIB), MIB),
    ],
)
def test_a_size_counts_in_powers_of_1024(given: object, size: int) -> None:
    assert units.size(given) == size


@pytest.mark.parametrize("given", ["", "-1", "2X", "G", "1e9", 1.5, True, -1, None])
def test_a_size_that_is_none_says_what_one_looks_like(given: object) -> None:
    with pytest.raises(ValueError, match="512M or 2G"):
        units.size(given)


@pytest.mark.parametrize(
    ("given", "meant"), [(2, "2G"), ("0.5", "0.5G"), (" 200", "200M"), ("2b", "2G")]
)
def test_a_number_that_lacks_its_unit_is_no_size(given: object, meant: str) -> None:
    with pytest.raises(ValueError, match=f"write {meant} if you mean that"):
        units.size(given)


@pytest.mark.parametrize("given", ["", "x", "1.5", "-3", True, 1.5, -1])
def test_a_count_is_a_whole_number(given: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        units.count(given)
