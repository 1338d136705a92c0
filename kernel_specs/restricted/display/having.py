"""Objects of libraries have functions of their own for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def having(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Let an object have a function of its own, unless it has one already."""
    if name in vars(owner):
        yield
        return
    setattr(owner, name, function)
    try:
        yield
    finally:
        vars(owner).pop(name, None)
