"""Find objects of different libraries that share memory: each has a copy of its own after loading.

Arrays of numpy that share memory are loaded so. Other objects are pickled with a copy, and code
that writes through one would find the other unchanged.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import pickle
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

COPIED = "a copy now: it shared memory with another object"
TELLING_PILLOW = 13
"""First version of Pillow that can be asked: 12.3 ends the process for memory of others."""
BYTES = "plain bytes in place of a pickle buffer"

_PLAIN = (bytearray, bytes, array.array, mmap.mmap)
"""Types whose objects do not lend their memory to pickle themselves."""


class MemoryRange(NamedTuple):
    """Memory of an object, by address in bytes; `owner` is the id of the object that restores it.

    Code cannot write through one that is not `writable`.
    """

    begin: int
    end: int
    owner: int
    writable: bool


class MemoryRanges:
    """The memory of the current value, as the picklers of one dump have seen it."""

    def __init__(self) -> None:
        self.found: list[MemoryRange] = []
        self._owners: set[int] = set()
        self._alone: set[int] = set()
        self._lent: set[int] = set()

    def add(self, obj: object, begin: int, size: int, *, writable: bool = True) -> None:
        """Note the memory of an object, which its pickle has a copy of."""
        if size:
            self.found.append(MemoryRange(begin, begin + size, id(obj), writable))

    def lend(self, buffer: pickle.PickleBuffer) -> pickle.PickleBuffer:
        """Note a buffer that a reduction has made, and return it."""
        self._lent.add(id(buffer))
        return buffer

    def is_of_code(self, buffer: pickle.PickleBuffer) -> bool:
        """Return True for a buffer that code has made of plain memory; call it once for each."""
        if id(buffer) in self._lent:
            self._lent.remove(id(buffer))
            return False
        owner = type(memoryview(buffer).obj)
        return owner in _PLAIN or (owner.__name__, owner.__module__) == ("ndarray", "numpy")

    def add_owner(self, obj: Any) -> None:
        """Note an object of a value that restores its memory itself."""
        self._owners.add(id(obj))

    def is_restored(self, array: Any) -> bool:
        """Return True if the memory is of an object of this value that was noted."""
        base = array.base
        while base is not None:
            if id(base) in self._owners:
                return True
            base = base.obj if type(base) is memoryview else getattr(base, "base", None)
        return False

    def add_alone(self, obj: Any) -> None:
        """Note an instance whose `__dict__`, or an array whose base, nothing else references."""
        self._alone.add(id(obj))

    def is_alone(self, obj: Any) -> bool:
        """Return True if it was noted, before pickling referenced its `__dict__` or base too."""
        return id(obj) in self._alone

    def begin(self) -> None:
        """Prepare for the next value."""
        self.found = []
        self._owners.clear()


def of_bytearrays(objects: Iterable[object]) -> list[MemoryRange]:
    """Return the memory of those objects that are bytearrays, which no reducer sees."""
    ranges = MemoryRanges()
    for each in objects:
        if isinstance(each, bytearray) and each:
            ranges.add(each, ctypes.addressof(ctypes.c_char.from_buffer(each)), len(each))
    return ranges.found


def copies(ranges: Sequence[tuple[MemoryRange, str]]) -> set[str]:
    """Return names of values that have a copy of memory which code can write to by another one.

    `ranges` are in order of definition, each with the name of its value. The first writable object
    counts as the one that has the memory itself.
    """
    found: set[str] = set()
    cluster: list[int] = []
    end = 0
    for place in sorted(range(len(ranges)), key=lambda each: ranges[each][0].begin):
        if ranges[place][0].begin >= end:
            found |= _copies_in(sorted(cluster), ranges)
            cluster = []
        cluster.append(place)
        end = max(end, ranges[place][0].end)
    return found | _copies_in(sorted(cluster), ranges)


def _copies_in(cluster: list[int], ranges: Sequence[tuple[MemoryRange, str]]) -> set[str]:
    """Return the names among ranges that overlap; all but those of the first writable object."""
    some = [ranges[place] for place in cluster]
    first = next((each.owner for each, _ in some if each.writable), None)
    return {name for each, name in some if first is not None and each.owner != first}


class _ArrowArray(ctypes.Structure):
    """The beginning of an array of Arrow's C data interface."""


_ArrowArray._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "nulls", "offset", "n_buffers", "n_children")),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
]


def of_picture(picture: Any) -> tuple[int, int] | None:
    """Return address and size of a picture of PIL; None if its version or mode does not tell."""
    version = str(getattr(sys.modules.get("PIL"), "__version__", "")).partition(".")[0]
    if not version.isdecimal() or int(version) < TELLING_PILLOW:
        return None
    try:
        capsule = picture.__arrow_c_array__()[1]
    except (AttributeError, ValueError):  # a mode that Arrow has not
        return None
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    pixels = _ArrowArray.from_address(get(capsule, b"arrow_array") or 0)
    if pixels.children:  # its bands
        pixels = pixels.children[0].contents
    return pixels.buffers[1], pixels.length
