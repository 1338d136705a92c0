"""The state of the last verification of a session."""

from __future__ import annotations

from collections.abc import Mapping

from kernel_mcp.records import dataclass


@dataclass(frozen=True, slots=True)
class Verified:
    """A verification: the result of each cell by its number, and the receipt as JSON."""

    cells: Mapping[int, str]
    receipt: bytes
