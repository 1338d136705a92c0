"""Immortal objects (PEP 683): a forked process does not copy pages to count their references.

Done only in the versions of Python in which it passed stress tests (`TRIED`). Only objects of exact
builtin types are changed, and only builtin containers are traversed. The traverse function of an
extension may return objects that have been freed.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import sysconfig
import types
from typing import Any

TRIED = ("3.13.0",)
"""Versions in which `.ci/full pythons` has forked and revived stressed kernels."""
IMMORTAL = 0xFFFFFFFF
"""The lower half of an immortal object's reference count."""
CONTAINERS = frozenset(
    (
        *(dict, list, tuple, set, frozenset, property, staticmethod, classmethod),
        *(types.FunctionType, types.MethodType, types.CellType),
    )
)
"""Exact types whose objects are changed and traversed: gc.get_referents is safe for them."""
_LEAVES = frozenset(
    (
        *(str, bytes, int, float, complex, type, types.CodeType, types.ModuleType),
        *(types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType),
        *(types.ClassMethodDescriptorType, types.GetSetDescriptorType),
        types.MemberDescriptorType,
    )
)
"""Exact types whose objects are changed but not traversed."""


def possible() -> bool:
    """Return True if this interpreter is of a tried version, in its usual build."""
    version = ".".join(map(str, sys.version_info[:3]))
    laid_out = sys.byteorder == "little" and sys.maxsize > 1 << 32
    shares = not sysconfig.get_config_var("Py_GIL_DISABLED")
    known = sys.implementation.name == "cpython" and version in TRIED
    return known and laid_out and shares and not hasattr(sys, "gettotalrefcount") and _is_kept()


def keep() -> int:
    """Make the objects of this process immortal; return their number, 0 if it is not `possible`.

    Frozen ones are included, and no longer frozen. Takes 0.25 s for the 250,000 objects of a kernel
    with pandas.
    """
    if not possible():
        return 0
    gc.unfreeze()  # gc.get_objects leaves out frozen objects
    gc.collect()
    found = _found()
    for address in found:
        _make_immortal(address)
    return len(found)


def _found() -> set[int]:
    """Return the addresses of all reachable objects of known types, except those of this search.

    `todo` keeps each of them alive until it has been visited.
    """
    known: set[int] = set()
    todo: list[Any] = gc.get_objects()
    own = {id(known), id(todo)}
    while todo:
        one = todo.pop()
        kind, address = type(one), id(one)
        if address in known or address in own:
            continue
        if kind in CONTAINERS:
            known.add(address)
            todo += gc.get_referents(one)
        elif kind in _LEAVES:
            known.add(address)
            if kind is types.CodeType:
                todo += _parts_of_code(one)
    return known


def _parts_of_code(code: types.CodeType) -> list[Any]:
    """Return the objects that a code object refers to, which gc.get_referents does not report."""
    names = ("consts", "names", "linetable", "exceptiontable", "filename", "name", "qualname")
    return [getattr(code, f"co_{name}") for name in names]


def _make_immortal(address: int) -> None:
    ctypes.c_uint32.from_address(address).value = IMMORTAL


def _is_kept() -> bool:
    """Return True if the references of an object that was made immortal are not counted."""
    one = object()
    _make_immortal(id(one))
    before = sys.getrefcount(one)
    more = [one] * 3
    return sys.getrefcount(more[0]) == before
