"""Replace methods of single objects for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporary_method(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Set a function as attribute of an object inside the block, unless it has one of that name."""
    if name in vars(owner):
        yield
        return
    setattr(owner, name, function)
    try:
        yield
    finally:
        vars(owner).pop(name, None)
