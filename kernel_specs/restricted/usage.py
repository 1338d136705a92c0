"""Processor time and memory of each cell; what holds memory when it is short.

Frames of a failed cell are part of that: the error that `sys.last_value` keeps refers to them.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from typing import Any

from kernel_specs.restricted import variables
from kernel_specs.restricted.originals import gc, os, resource, time

SHORT = 0.8
"""Fraction of the memory limit from which memory counts as short."""
NOTABLE = 1 / 8
"""Fraction of the limit that a failed cell may leave behind before its frames are cleared."""
LEAST_GROWTH = 16 * 1024 * 1024
"""Bytes that a cell must add until what holds memory is listed, once it is short."""
MOST_HOLDERS = 5
LEAST_BYTES = 1024 * 1024
"""Least bytes of a value that is listed."""


class UsageMeter:
    """Measures the cells of a kernel, one after the other.

    Memory is that of this process, without files that are mapped, such as those of libraries. The
    peak is that since the server has last reset it, or that of a child that has held more.
    """

    def __init__(self) -> None:
        self._cpu_s = 0.0
        self._held = self._child_bytes = 0

    def begin(self) -> None:
        """Begin to count the processor time of a cell, and the memory of its children."""
        self._cpu_s, self._child_bytes = _cpu_s(), _child_bytes()

    def report(
        self, namespace: Mapping[str, Any], limit: int, error: BaseException | None
    ) -> dict[str, Any]:
        """Return the usage since `begin`; with a `limit` in bytes, also what holds much of it.

        If memory is short, or a failed cell has left much, frames of the last error are cleared.
        """
        before, child, (peak, held, files) = self._held, _child_bytes(), _memory()
        if child > max(self._child_bytes, peak + files):  # a new child begins with what we hold
            peak = child
        found: dict[str, Any] = {"cpu_s": _cpu_s() - self._cpu_s, "peak_bytes": peak}
        much = error is not None and held - before >= NOTABLE * limit
        if limit and (held >= SHORT * limit or much):
            clear_last_error()
            found["cleared_bytes"], held = held - _memory()[1], _memory()[1]
        grown = held >= SHORT * limit and held - before >= LEAST_GROWTH
        if limit and (grown or isinstance(error, MemoryError)):
            found["holders"] = holders(namespace)
        found["before_bytes"], found["memory_bytes"] = before, held
        self._held = held
        return found


def clear_last_error() -> None:
    """Clear the local variables in frames of the last error, and of those that led to it."""
    errors, seen = [getattr(sys, "last_value", None)], set()
    while errors:
        error = errors.pop()
        if isinstance(error, BaseException) and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            errors += [error.__cause__, error.__context__]
    gc.collect()


def holders(namespace: Mapping[str, Any]) -> list[list[Any]]:
    """Return names and bytes of the largest values: variables, then earlier results."""
    results = namespace.get("Out")
    named = [(name, value) for name, value in namespace.items() if name[:1] != "_"]
    if type(results) is dict:
        named += [(f"Out[{number}]", value) for number, value in results.items()]
    named += [(name, namespace[name]) for name in ("_", "__", "___") if name in namespace]
    sizes: dict[int, tuple[str, int]] = {}
    for name, value in named:
        size = variables.size_of(value) or 0
        if size >= LEAST_BYTES and id(value) not in sizes:
            sizes[id(value)] = name, size
    largest = sorted(sizes.values(), key=lambda each: -each[1])
    return [list(each) for each in largest[:MOST_HOLDERS]]


def _cpu_s() -> float:
    """Return the processor seconds of this process, and of children that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return float(time.process_time() + children.ru_utime + children.ru_stime)


def _child_bytes() -> int:
    """Return the memory that the largest child held that this process has waited for."""
    return int(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024


def _memory() -> tuple[int, int, int]:
    """Return peak and present memory of this process, and its mapped files. Raises OSError."""
    status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        lines = os.read(status, 4096).splitlines()
    finally:
        os.close(status)
    found = {}
    for line in lines:
        name, _, size = line.partition(b":")
        if name in (b"VmHWM", b"VmRSS", b"RssFile"):
            found[name] = int(size.split()[0]) * 1024
    files = found[b"RssFile"]
    return found[b"VmHWM"] - files, found[b"VmRSS"] - files, files
