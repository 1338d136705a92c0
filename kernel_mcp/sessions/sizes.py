"""How much of the server's memory hangs on some objects, whatever those are made of."""

from __future__ import annotations

import gc
import sys
from collections import deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

MOST_OBJECTS = 300_000
"""What is looked at, in some tenths of a second; the rest does not count."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_OWN = (
    "kernel_mcp.kernels.",
    "kernel_mcp.output.",
    "kernel_mcp.sessions.cell",
    "kernel_mcp.sessions.history",
    "kernel_mcp.sessions.queue",
    "kernel_mcp.sessions.rows",
    "kernel_specs.restricted.zmtp",
)
"""Modules of objects that belong to one session. All others may be shared, and are not entered."""
_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def size_of(*roots: object) -> int:
    """Bytes of `roots` and of all they hold that belongs to one session, each once."""
    seen: set[int] = set()
    pending: list[object] = list(roots)
    total = 0
    while pending and len(seen) < MOST_OBJECTS:
        item = pending.pop()
        if id(item) in seen or isinstance(item, _SHARED):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item, 0)
        if isinstance(item, _CONTAINERS) or type(item).__module__.startswith(_OWN):
            pending += gc.get_referents(item)
    return total
