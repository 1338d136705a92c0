"""Native thread pools: empty in the template, of their usual size in a kernel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 4
"""As `confine.environment` sets it for a cold start: each thread costs address space."""
OPENBLAS = "openblas"
SETTERS = {
    OPENBLAS: (
        "scipy_openblas_set_num_threads64_",
        "scipy_openblas_set_num_threads",
        "openblas_set_num_threads64_",
        "openblas_set_num_threads",
    ),
    "libmkl_rt": ("MKL_Set_Num_Threads",),
    "libgomp": ("omp_set_num_threads",),
    "libiomp5": ("omp_set_num_threads",),
}
"""Functions that take the number of threads, by a part of the library's name."""


@dataclass(frozen=True)
class Pools:
    """The setters of the libraries that are loaded.

    sized    those of pools that make their threads when they need them, for the calling thread
    filled   those that make them at once; each thread then spins for some 25 ms before it sleeps
    """

    sized: Sequence[Any] = ()
    filled: Sequence[Any] = ()


def find() -> Pools:
    """What is loaded now."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line[line.index("/") :] for line in lines if "/" in line}
    sized: list[Any] = []
    filled: list[Any] = []
    for path in sorted(paths):
        for part, names in SETTERS.items():
            if part in Path(path).name:
                library = ctypes.CDLL(path)
                known = [getattr(library, name) for name in names if hasattr(library, name)]
                (filled if part == OPENBLAS else sized).extend(known[:1])
    return Pools(sized, filled)


def set_size(setters: Sequence[Any]) -> None:
    """Give pools their size in a kernel, now that it has its own processor set."""
    threads = min(LARGEST, len(os.sched_getaffinity(0)))
    for setter in setters if threads > 1 else ():
        setter(ctypes.c_int(threads))
