"""How classes define the pickling of their instances."""

from __future__ import annotations

import copyreg
import enum
import sys
import types
from collections.abc import Iterable
from typing import Any

from kernel_specs.restricted.hibernation import objects
from kernel_specs.restricted.hibernation.attempt_limits import module_of

FRAMES = ("NDFrame", "Index")
"""Classes of pandas to whose instances code can add attributes."""
HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: set for every class of Python code."""


def reduces_as_usual(kind: Any, *base: type) -> bool:
    """Return True if a class has the default reduction, or that of a base."""
    return kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ in (
        object.__reduce__,
        *(each.__reduce__ for each in base),
    )


def has_usual_dict(kind: type) -> bool:
    """Return True if instances have a `__dict__` which is pickled as it is, and can be replaced."""
    return (
        bool(kind.__dictoffset__)
        and has_usual_state(kind)
        and type(attribute(kind, "__dict__")) is types.GetSetDescriptorType
    )


def has_usual_state(kind: type) -> bool:
    """Return True if the attributes of instances are all that is pickled of them."""
    usual: Any = getattr(object, "__getstate__", None)  # from Python 3.11 on
    return (
        reduces_as_usual(kind)
        and getattr(kind, "__getstate__", None) is usual
        and not hasattr(kind, "__setstate__")
    )


def reduces_itself(kind: type) -> bool:
    """Return True if code of this session defines how instances are reduced."""
    module = sys.modules.get(module_of(kind))
    if kind in copyreg.dispatch_table or (module is not None and is_library(module)):
        return False
    return any(is_python(attribute(kind, name)) for name in ("__reduce_ex__", "__reduce__"))


def attribute(kind: type, name: str) -> Any:
    """Return an attribute as the class that defines it has it, or None."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def overridden(kind: type) -> type | None:
    """Return the container type of which a class overrides methods that pickle calls, or None."""
    container = next((base for base in objects.CONTAINERS if issubclass(kind, base)), None)
    if container is None or not reduces_as_usual(kind, container):
        return None
    names: Iterable[str] = objects.CONTAINERS[container][0]
    return container if any(is_python(attribute(kind, name)) for name in names) else None


def is_python(method: object) -> bool:
    """Return True for a function of Python code."""
    return type(method) is types.FunctionType


def is_library(module: types.ModuleType) -> bool:
    """Return True if a module belongs to Python or a package, and so not to this session."""
    if module.__name__.partition(".")[0] in sys.stdlib_module_names:
        return True
    return "site-packages" in str(getattr(module, "__file__", ""))


def reducing_base(kind: type) -> type | None:
    """Return the library base that pickles instances without further attributes, or None."""
    if issubclass(kind, (enum.Enum, types.ModuleType)) or kind in copyreg.dispatch_table:
        return None
    for base in kind.__mro__[:-1]:  # first, as some kinds of index reduce themselves
        if base.__name__ in FRAMES and module_of(base).partition(".")[0] == "pandas":
            return base
    for base in kind.__mro__[:-1]:
        top = module_of(base).partition(".")[0]
        if "__reduce_ex__" in vars(base) or "__reduce__" in vars(base):
            is_known = top in sys.stdlib_module_names or top == "numpy"
            return base if is_known or _keeps_attributes(base) else None
        if "__getstate__" in vars(base):
            return base if _keeps_attributes(base) else None
    return None


def _keeps_attributes(base: type) -> bool:
    """Return True for a class of an installed package whose instances have a `__dict__`."""
    module = sys.modules.get(module_of(base))
    if module is None or not base.__dictoffset__ or not is_library(module):
        return False
    top = module_of(base).partition(".")[0]
    return top not in (*sys.stdlib_module_names, "numpy", "pandas")


def is_of_library(kind: type) -> bool:
    """Return True if a class was not defined by code of this session."""
    module = sys.modules.get(module_of(kind))
    return module is None or is_library(module)
