"""Reductions of numpy arrays: views share memory after loading, subclasses keep attributes."""

# numpy is a package of the session, which the kernel may not have.
# mypy: disable-error-code="import-not-found, import-untyped, unused-ignore"

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

from kernel_specs.restricted.hibernation.attempt_limits import module_of
from kernel_specs.restricted.hibernation.memory_ranges import COPIED, MemoryRanges

UNMAPPED = "in memory now: changes no longer reach its file"


class _ArrayProbe:
    """An object with one attribute `base`, as arrays have."""

    def __init__(self) -> None:
        self.base = object()


def _references(obj: Any) -> int:
    return sys.getrefcount(obj.base)


_ALONE = _references(_ArrayProbe())
"""sys.getrefcount of a base that only its view references, in this version of Python."""
_LENT = sys.getrefcount(memoryview(bytearray()).obj)
"""sys.getrefcount of an object with one memoryview."""


class ArrayReducer:
    """Reduces instances of `numpy.ndarray`; `changed` gets a reason for each that is not equal."""

    def __init__(self, changed: Callable[[str], None], memory: MemoryRanges) -> None:
        self._changed = changed
        self._memory = memory

    def reduce(self, array: Any) -> Any:
        """Return the reduction; NotImplemented for one with its own memory or its own reduction."""
        import numpy as np

        kind = type(array)
        if kind is np.ndarray:
            return self._view(array) or self._whole(array)
        if kind is np.ma.core.MaskedConstant:
            return NotImplemented
        if _has_own_reduction(kind):
            if array.base is not None and not self._alone(array):
                self._copied(array)
            return NotImplemented
        function, arguments = self._view(array) or (_itself, (_Plain(self._whole(array)),))
        attributes = attributes_of(array)
        if attributes.pop("_mmap", None) is not None and isinstance(array, np.memmap):
            self._changed(UNMAPPED)
        made = (kind, function, arguments)
        return make_subclass, made, attributes or None, None, None, set_attributes

    def reduce_record(self, record: Any) -> Any:
        """Return NotImplemented for a structured array's scalar; report that it is copied."""
        if record.base is not None:
            self._changed(COPIED)
        return NotImplemented

    def _view(self, array: Any) -> Any:
        """Return the reduction of a view on shared memory; None for an array that has all of it."""
        if array.base is None or not array.size:
            return None
        repeats = array.nbytes > _span(array)
        if self._alone(array) and not repeats:
            return None
        base = self._owner(array)
        flat = _flat(base)
        if flat is None or (flat.dtype.hasobject and flat.dtype != array.dtype):
            if not self._alone(array):
                self._copied(array)
            return None
        if repeats and flat.nbytes > array.nbytes and self._alone(array):
            return None
        offset = _address(array) - _address(flat)
        writeable = array.flags.writeable
        return make_view, (base, offset, array.shape, array.strides, array.dtype, writeable)

    def _whole(self, array: Any) -> Any:
        """Return numpy's reduction of an array with memory of its own, which is noted."""
        if array.size:
            self._memory.add(array, *_bounds(array), writable=array.flags.writeable)
        return _plain(array, self._memory)

    def _alone(self, array: Any) -> bool:
        """Return True if only `array` references its memory.

        Pickling an instance of a subclass adds a reference to its base: the first result is kept.
        """
        if self._memory.is_alone(array):
            return True
        if _references(array) > _ALONE:
            return False
        base = array.base
        if type(base) is memoryview:
            return sys.getrefcount(base.obj) <= _LENT
        if getattr(base, "base", None) is not None and not self._alone(base):
            return False
        if _is_of_subclass(array):
            self._memory.add_alone(array)
        return True

    def _owner(self, array: Any) -> Any:
        """Return the object that is pickled with the memory of `array`: its last shared base."""
        base = array.base
        while type(base) not in (bytearray, bytes):
            if _is_view(base) and self._alone(base):
                break
            below = base.obj if type(base) is memoryview else getattr(base, "base", None)
            if below is None or not isinstance(below, _memory()):
                break
            base = below
        return base

    def _copied(self, array: Any) -> None:
        """Report a copy, unless its memory is a memory map or of an object that restores it."""
        if not self._memory.is_restored(array) and getattr(array, "_mmap", None) is None:
            self._changed(COPIED)


class _Plain:
    """Pickles the memory of an instance of a subclass as an exact `numpy.ndarray`."""

    def __init__(self, reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced


def _plain(array: Any, memory: MemoryRanges) -> Any:
    """Return the reduction of an array as an exact `numpy.ndarray`."""
    import numpy as np

    # A view would be another reference to the base of an exact array.
    plain = array if type(array) is np.ndarray else np.ndarray.view(array, np.ndarray)
    made = np.ndarray.__reduce_ex__(plain, 5)
    for each in made[1]:
        if type(each) is pickle.PickleBuffer:
            memory.lend(each)
    return made


def make_view(
    base: Any,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: Any,
    writeable: bool,
) -> Any:
    """Return an array on the memory of `base`; `offset` and `strides` are in bytes.

    Raises ValueError if `base` was not loaded as it was.
    """
    import numpy as np

    flat = _flat(base)
    if flat is None:
        raise ValueError("the memory that it looks at has not come back")
    if dtype.hasobject:
        start = flat[offset // dtype.itemsize :]
        view = np.lib.stride_tricks.as_strided(start, shape, strides)
    else:
        view = np.ndarray(shape, dtype, flat, offset, strides)
    if not writeable:
        view.flags.writeable = False
    return view


def make_subclass(kind: type, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return an instance of a subclass on the memory of the array that `function` returns."""
    import numpy as np

    return np.ndarray.view(function(*arguments), kind)


def attributes_of(obj: Any, below: type | None = None) -> dict[str, Any]:
    """Return an instance's attributes, with those in slots of classes before `below` in its MRO."""
    own = getattr(obj, "__dict__", None)  # of another object, for an alias such as `list[int]`
    found = dict(own) if isinstance(own, dict) else {}
    for base in type(obj).__mro__:
        if base is below:
            break
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            name = f"_{base.__name__.lstrip('_')}{slot}" if _is_private(slot) else slot
            if slot not in ("__dict__", "__weakref__") and hasattr(obj, name):
                found[name] = getattr(obj, name)
    return found


def set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    """Set attributes after the object is memoized: they may refer to it."""
    own = getattr(obj, "__dict__", None)
    for name, value in attributes.items():
        if own is not None and not isinstance(
            getattr(type(obj), name, None), types.MemberDescriptorType
        ):
            own[name] = value
        else:
            object.__setattr__(obj, name, value)


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _itself(plain: Any) -> Any:
    return plain


def _has_own_reduction(kind: type) -> bool:
    """Return True if a subclass defines its own pickling; that of numpy loses shared memory."""
    for base in kind.__mro__:
        if any(name in vars(base) for name in ("__reduce__", "__reduce_ex__", "__setstate__")):
            return module_of(base).partition(".")[0] != "numpy"
    return False


def _bounds(array: Any) -> tuple[int, int]:
    """Return the address of the first byte, and the number of bytes to the last."""
    steps = zip(array.shape, array.strides, strict=True)
    before = sum((count - 1) * stride for count, stride in steps if stride < 0)
    return _address(array) + before, _span(array)


def _span(array: Any) -> int:
    """Return the bytes from the first to the last element."""
    steps = zip(array.shape, array.strides, strict=True)
    return int(array.itemsize + sum((count - 1) * abs(stride) for count, stride in steps))


def _is_view(base: Any) -> bool:
    import numpy as np

    return isinstance(base, np.ndarray) and base.base is not None


def _is_of_subclass(base: Any) -> bool:
    import numpy as np

    return isinstance(base, np.ndarray) and type(base) is not np.ndarray


def _memory() -> tuple[type, ...]:
    import numpy as np

    return (np.ndarray, bytearray, bytes, memoryview)


def _flat(base: Any) -> Any:
    """Return the memory of `base` as a flat view; None if it is not pickled or not contiguous."""
    import numpy as np

    if type(base) in (bytearray, bytes):
        return np.frombuffer(base, np.uint8) if base else None
    if not isinstance(base, np.ndarray) or _has_own_reduction(type(base)):
        return None
    base = np.ndarray.view(base, np.ndarray)
    if not base.flags.c_contiguous:
        base = base.T
    if not base.flags.c_contiguous:
        return None
    flat = base.reshape(-1)
    return flat if base.dtype.hasobject else flat.view(np.uint8)


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
