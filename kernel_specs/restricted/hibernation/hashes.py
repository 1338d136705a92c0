"""Find dicts and sets that are not equal after loading: by ids, or by hashes that have changed."""

from __future__ import annotations

from typing import Any

from kernel_specs.restricted.hibernation.classes import attribute, is_python

IDS = "its keys are ids of objects, which have others now"
STALE_HASH = "a key is found again now: its hash had changed since it was added"
SETS = (set, frozenset)
_ALIGNED = 15
"""Bits that are 0 in the address of each object, which is its id."""
_LEAST, _MOST = 1 << 16, 1 << 48
"""Bounds of addresses."""


def keys_of(table: Any) -> list[Any]:
    """Return the keys of a dict or the members of a set, unless all are of type `str`.

    Methods of a derived class are not called.
    """
    if isinstance(table, dict):
        keys = list(dict.__iter__(table))
    else:
        keys = list((set if isinstance(table, set) else frozenset).__iter__(table))
    return [] if set(map(type, keys)) <= {str} else keys


def possible_ids(keys: list[Any]) -> list[int]:
    """Return those keys that may be ids, also those in tuples."""
    inside = [each for key in keys if type(key) is tuple for each in key]
    return [
        each
        for each in (*keys, *inside)
        if type(each) is int and not each & _ALIGNED and _LEAST < each < _MOST
    ]


def has_stale_hash(table: Any, keys: list[Any]) -> bool:
    """Return True if a key does not find itself: an attribute that it is hashed by has changed.

    Loading computes all hashes anew. Runs `__hash__` and `__eq__` of the keys' classes, if these
    are code of Python.
    """
    kinds = set(map(type, keys))
    if tuple in kinds:
        kinds |= {type(each) for key in keys if type(key) is tuple for each in key}
    if not any(is_python(attribute(kind, "__hash__")) for kind in kinds):
        return False
    return len(dict.fromkeys(keys)) < len(keys) or not all(_has(table, key) for key in keys)


def _has(table: Any, key: Any) -> bool:
    owner = next(kind for kind in (dict, *SETS) if isinstance(table, kind))
    found: bool = owner.__contains__(table, key)
    return found
