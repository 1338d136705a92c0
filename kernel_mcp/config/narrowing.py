"""What a file that nobody named may still set: values that permit no more than the operator's.

Each function takes the value given and the one that holds without it, and says whether the first
permits no more than the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Narrows: TypeAlias = Callable[[Any, Any], bool]


def never(_given: object, _own: object) -> bool:
    """The operator alone sets it: a place, a program, or how the server runs."""
    return False


def no_more(given: float, own: float) -> bool:
    """A number, size or time that is at most the operator's."""
    return given <= own


def no_more_or_unlimited(given: float, own: float) -> bool:
    """As `no_more` for limits that 0 lifts."""
    return own == 0 or 0 < given <= own


def only_on(given: bool, own: bool) -> bool:
    """A switch that forbids something may be turned on."""
    return given or not own


def only_off(given: bool, own: bool) -> bool:
    """A switch that permits something may be turned off."""
    return own or not given


def among(given: tuple[str, ...], own: tuple[str, ...]) -> bool:
    """Names that are all among the operator's."""
    return "*" in own or set(given) <= set(own)


def no_further(order: tuple[str, ...]) -> Narrows:
    """A word that comes no later in `order`, which begins with the strictest."""

    def narrows(given: str, own: str) -> bool:
        return order.index(given) <= order.index(own)

    return narrows
