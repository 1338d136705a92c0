"""Objects that are never freed, so that nobody counts their references: Python 3.12 and newer.

A forked process copies each page that it writes to, and Python writes to whatever it looks at, to
count references. Of an object whose count has every bit set it keeps no count (PEP 683).
"""

from __future__ import annotations

import ctypes
import gc
import sys
import sysconfig
from types import CodeType
from typing import Any

FOR_EVER = 0xFFFFFFFF
"""The lower half of such a count: of the upper one Python 3.14 has made flags."""
_SINCE = (3, 12)


def possible() -> bool:
    """Whether this Python has such objects, as they were laid out where this was tried."""
    laid_out = sys.byteorder == "little" and sys.maxsize > 1 << 32
    shares = not sysconfig.get_config_var("Py_GIL_DISABLED")
    known = sys.implementation.name == "cpython" and sys.version_info >= _SINCE
    return known and laid_out and shares and not hasattr(sys, "gettotalrefcount") and _is_kept()


def keep() -> int:
    """Have all objects of this process stay for ever; how many those are, 0 where that cannot be.

    Takes 0.25 s for the 250,000 objects of a kernel with pandas.
    """
    if not possible():
        return 0
    gc.collect()
    found = _all_objects()
    for address in found:
        _make_immortal(address)
    return len(found)


def _all_objects() -> set[int]:
    """The addresses of all objects that can be reached, but for those of this search."""
    known: set[int] = set()
    todo: list[Any] = gc.get_objects()
    own = {id(known), id(todo)}
    while todo:
        one = todo.pop()
        address = id(one)
        if address in known or address in own:
            continue
        known.add(address)
        todo += _parts_of_code(one) if type(one) is CodeType else gc.get_referents(one)
    return known


def _parts_of_code(code: CodeType) -> list[Any]:
    """What code refers to; before Python 3.13 the collector does not ask it."""
    names = ("consts", "names", "linetable", "exceptiontable", "filename", "name", "qualname")
    return [getattr(code, f"co_{name}") for name in names]


def _make_immortal(address: int) -> None:
    ctypes.c_uint32.from_address(address).value = FOR_EVER


def _is_kept() -> bool:
    """Whether an object that is made so is not counted."""
    one = object()
    _make_immortal(id(one))
    before = sys.getrefcount(one)
    more = [one] * 3
    return sys.getrefcount(more[0]) == before
