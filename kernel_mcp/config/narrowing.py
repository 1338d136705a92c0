"""Rules for values of a settings file that no flag names.

Each returns True if the first value permits no more than the second, the operator's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

Narrows: TypeAlias = Callable[[Any, Any], bool]


def never(_given: object, _own: object) -> bool:
    """Return False: only the operator sets paths, programs and the way the server runs."""
    return False


def no_more(given: float, own: float) -> bool:
    """Return True for a number, size or time that is at most the operator's."""
    return given <= own


def asks_less(given: tuple[float, ...], own: tuple[float, ...]) -> bool:
    """Return True if a person has no more time for an answer; empty for no questions."""
    return given <= own


def no_more_or_unlimited(given: float, own: float) -> bool:
    """Return True as `no_more` does, for limits that 0 lifts."""
    return own == 0 or 0 < given <= own


def only_on(given: bool, own: bool) -> bool:
    """Return True unless a switch that forbids something would be turned off."""
    return given or not own


def only_off(given: bool, own: bool) -> bool:
    """Return True unless a switch that permits something would be turned on."""
    return own or not given


def among(given: tuple[str, ...], own: tuple[str, ...]) -> bool:
    """Return True for names that are all among the operator's."""
    return "*" in own or set(given) <= set(own)


_LABEL_OF_HOST = re.compile(r"[\w-]+")


def fewer_hosts(given: tuple[str, ...], own: tuple[str, ...]) -> bool:
    """Return True for the operator's own entries, and for host names if all are permitted."""
    named = (each for each in given if "*" in own and _is_name_of_host(each))
    return set(given) <= {*own, *named}


def _is_name_of_host(text: str) -> bool:
    labels = text.removeprefix("*.").split(".")
    lettered = any("a" <= char <= "z" for char in labels[-1])
    return lettered and all(map(_LABEL_OF_HOST.fullmatch, labels))


def no_further(order: tuple[str, ...]) -> Narrows:
    """Return the rule for words: none later in `order`, which begins with the strictest."""

    def narrows(given: str, own: str) -> bool:
        return order.index(given) <= order.index(own)

    return narrows
