"""Reduces numpy arrays that are views, so that loading makes views of the same memory."""

# mypy: disable-error-code="import-not-found, import-untyped, unused-ignore"

from __future__ import annotations

import sys
from typing import Any


class _Probe:
    """An object with one attribute `base`, as arrays have."""

    def __init__(self) -> None:
        self.base = object()


def _references(obj: Any) -> int:
    return sys.getrefcount(obj.base)


_ALONE = _references(_Probe())
"""sys.getrefcount of a base that only its view references, in this version of Python."""
_LENT = sys.getrefcount(memoryview(bytearray()).obj)
"""sys.getrefcount of an object with one memoryview."""


class ArrayReducer:
    """Reduces exact `numpy.ndarray`s; `copied` is set when a shared one had to be copied."""

    def __init__(self) -> None:
        self.copied = False

    def reduce(self, array: Any) -> Any:
        """A view of its base when others share the base, else NotImplemented."""
        if array.base is None or not array.size or _alone(array):
            return NotImplemented
        base = _owner(array)
        flat = _flat(base)
        if flat is None or (flat.dtype.hasobject and flat.dtype != array.dtype):
            self.copied = True
            return NotImplemented
        offset = _address(array) - _address(flat)
        arguments = (base, offset, array.shape, array.strides, array.dtype, array.flags.writeable)
        return make_view, arguments


def make_view(
    base: Any,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: Any,
    writeable: bool,
) -> Any:
    """An array of the memory of `base`; `offset` and `strides` in bytes.

    Raises ValueError when `base` has not come back as it was.
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


def _alone(array: Any) -> bool:
    """Whether only `array` references its memory."""
    if _references(array) > _ALONE:
        return False
    base = array.base
    if type(base) is memoryview:
        return sys.getrefcount(base.obj) <= _LENT
    return getattr(base, "base", None) is None or _alone(base)


def _owner(array: Any) -> Any:
    """The object that owns the memory of `array`."""
    base = array.base
    while type(base) is not bytearray:
        below = base.obj if type(base) is memoryview else getattr(base, "base", None)
        if below is None or not isinstance(below, _memory()):
            break
        base = below
    return base


def _memory() -> tuple[type, ...]:
    import numpy as np

    return (np.ndarray, bytearray, memoryview)


def _flat(base: Any) -> Any:
    """The memory of `base` as a flat view; None for a base that is not pickled."""
    import numpy as np

    if type(base) is bytearray:
        return np.frombuffer(base, np.uint8)
    if type(base) is not np.ndarray:
        return None
    if not base.flags.c_contiguous:
        base = base.T
    if not base.flags.c_contiguous:
        return None
    flat = base.reshape(-1)
    return flat if base.dtype.hasobject else flat.view(np.uint8)


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
