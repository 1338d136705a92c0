"""Contain failures while showing an output, so that they affect only that output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.output.text import one_line

T = TypeVar("T")


def or_fallback(make: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """Return the result of `make`; if that fails, log it and return the result of `otherwise`.

    `otherwise` is called with a line that stands for the output.
    """
    with Barrier("showing an output") as barrier:
        return make()
    assert barrier.failure is not None
    return otherwise(f"[this output could not be shown: {one_line(reason_of(barrier.failure))}]")
