"""Objects whose own pickling forgets a part of them: that part is added, or reported."""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import enum
import gc
import logging
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kernel_specs.restricted.hibernation.arrays import attributes_of, set_attributes
from kernel_specs.restricted.hibernation.attempt_limits import module_of
from kernel_specs.restricted.policy.guard import CELL_PREFIX

IMPORT = compile("__import__(name)", f"{CELL_PREFIX}hibernation>", "eval")

NO_TRACEBACK = "an exception without its traceback"
NO_HANDLERS = "a logger without its handlers and filters"
EMPTY_CACHE = "its cache starts empty"
PLAIN_SCALAR = "a plain scalar of numpy now"
MODULES = {"duckdb": "its default connection starts empty"}
"""Modules with contents that users take for their own, and how those change."""

_MAPPINGS: tuple[dict[str, int], ...] = ({}, OrderedDict())
_DICT_VIEWS: dict[type, str] = {
    type(getattr(made, name)()): name for made in _MAPPINGS for name in ("keys", "values", "items")
}
_FRAMES = ("NDFrame", "Index")
"""Classes of pandas whose instances take further attributes."""
_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: set for every class of Python code."""
_BUILT_HOOKS = ("__prepare__", "__new__", "__init__", "__call__")


class ObjectReducer:
    """Reduces objects by kind; `changed` gets a reason for each that will not be equal."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        self._changed = changed
        self._held: dict[type, dict[int, str]] = {}
        self._forgetful: dict[type, type | None] = {}
        self.special: dict[type, Callable[[Any], Any]] = {
            logging.Logger: self._logger,
            logging.RootLogger: self._logger,
            types.MappingProxyType: _reduce_proxy,
            **dict.fromkeys(_DICT_VIEWS, _reduce_dict_view),
        }

    def reduce(self, obj: Any) -> Any:
        """How to rebuild it with what its own reduction forgets, or NotImplemented."""
        kind = type(obj)
        if (name := self._names(kind).get(id(obj))) is not None:
            return the_attribute, (kind.__module__, name)
        if isinstance(obj, BaseException):
            return self._exception(obj)
        if (below := self._forgets(kind)) is None:
            return NotImplemented
        return self._with_attributes(obj, below)

    def _names(self, kind: type) -> dict[int, str]:
        """The instances of a library's class that its module holds, by id."""
        if (names := self._held.get(kind)) is None:
            module = sys.modules.get(module_of(kind))
            found = dict(vars(module)) if module is not None and _is_library(module) else {}
            names = {id(each): name for name, each in found.items() if type(each) is kind}
            self._held[kind] = names
        return names

    def _forgets(self, kind: type) -> type | None:
        """The base of a library that pickles instances without further attributes, if any."""
        if kind not in self._forgetful:
            self._forgetful[kind] = _reducing_base(kind)
        return self._forgetful[kind]

    def _with_attributes(self, obj: Any, below: type) -> Any:
        attributes = attributes_of(obj, below)
        if below.__name__ in _FRAMES:  # the others are caches
            attributes = {k: v for k, v in attributes.items() if not k.startswith("_")}
        if module_of(below).startswith("numpy") and type(obj).__flags__ & _HEAP_TYPE:
            self._changed(PLAIN_SCALAR)
            return NotImplemented
        usual = obj.__reduce_ex__(5) if attributes else ""
        if isinstance(usual, str):
            return NotImplemented
        function, arguments, state, *items = (*usual, None, None, None, None)[:5]
        known = state if isinstance(state, dict) else {}
        if isinstance(state, tuple) and len(state) == 2:
            known = {**(state[0] or {}), **(state[1] or {})} if type(state[1]) is dict else {}
        more = {name: value for name, value in attributes.items() if name not in known}
        if not more:
            return NotImplemented
        return function, arguments, (state, more), *items, set_state_and_attributes

    def _exception(self, error: BaseException) -> Any:
        kind = type(error)
        if error.__traceback__ is not None:
            self._changed(NO_TRACEBACK)
        if own := _has_own_arguments(kind):
            usual: Any = (make_exception, (kind, error.args), vars(error) or None)
        else:
            usual = error.__reduce_ex__(5)
        members = _members(error)
        if isinstance(usual, str) or (not members and not own):
            return NotImplemented
        function, arguments, state = (*usual, None)[:3]
        return function, arguments, (state, members), None, None, set_exception_state

    def _logger(self, logger: logging.Logger) -> Any:
        if logger.handlers or logger.filters:
            self._changed(NO_HANDLERS)
        state = (logger.level, logger.propagate, logger.disabled)
        name = None if logger is logger.root else logger.name
        return logging.getLogger, (name,), state, None, None, set_logger_state


def import_module(name: str, submodules: list[str]) -> types.ModuleType:
    """Import as a cell would: the import policy applies. Raises ImportError."""
    eval(IMPORT, {"__builtins__": builtins, "name": name})
    for submodule in submodules:
        with contextlib.suppress(ImportError):
            eval(IMPORT, {"__builtins__": builtins, "name": submodule})
    return sys.modules[name]


def the_attribute(module: str, name: str) -> Any:
    """Return the attribute `name` of a module. Raises ImportError, AttributeError."""
    return getattr(import_module(module, []), name)


def set_state_and_attributes(obj: Any, state: tuple[Any, dict[str, Any]]) -> None:
    """Set the state of an object's own reduction, then further attributes."""
    usual, more = state
    if usual is not None:
        if hasattr(obj, "__setstate__"):
            obj.__setstate__(usual)
        else:
            parts = usual if isinstance(usual, tuple) else (usual,)
            set_attributes(obj, {k: v for part in parts for k, v in (part or {}).items()})
    set_attributes(obj, more)


def make_exception(kind: Any, arguments: tuple[Any, ...]) -> Any:
    """An exception made without its `__init__`, which may take other arguments."""
    return kind.__new__(kind, *arguments)


def set_exception_state(error: BaseException, state: tuple[Any, dict[str, Any]]) -> None:
    """Set its state, then its chain and other members; those that are fixed stay."""
    usual, members = state
    if usual is not None:
        error.__setstate__(usual)
    for name, value in members.items():
        with contextlib.suppress(AttributeError, TypeError):
            setattr(error, name, value)


def set_logger_state(logger: logging.Logger, state: tuple[int, bool, bool]) -> None:
    """Set the level of a logger and which records it takes and hands on."""
    level, logger.propagate, logger.disabled = state
    logger.setLevel(level)


def make_class(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """A class of a cell, without what its bases and metaclass do when one is defined.

    They have done that once: what they wrote into variables comes back with those.
    """
    meta, _, bases = arguments[:3]
    below = {
        each: ("__init_subclass__",) for base in bases for each in getattr(base, "__mro__", ())
    }
    hooks = {**below, **dict.fromkeys(getattr(meta, "__mro__", ()), _BUILT_HOOKS)}
    removed = []
    try:
        for owner, names in hooks.items():
            if owner.__module__ != "__main__":
                continue
            for name in names:
                if name in vars(owner):
                    removed.append((owner, name, vars(owner)[name]))
                    type.__delattr__(owner, name)
        return make(*arguments)
    finally:
        for owner, name, value in removed:
            type.__setattr__(owner, name, value)


def make_dict_view(mapping: Any, name: str) -> Any:
    """The keys, values or items of a dict."""
    return getattr(mapping, name)()


def _reduce_dict_view(view: Any) -> Any:
    (mapping,) = gc.get_referents(view)
    return make_dict_view, (mapping, _DICT_VIEWS[type(view)])


def _reduce_proxy(proxy: Any) -> Any:
    (mapping,) = gc.get_referents(proxy)
    return types.MappingProxyType, (mapping,)


def _members(error: BaseException) -> dict[str, Any]:
    """The chain of an exception, and what builtin classes keep beside its arguments."""
    found: dict[str, Any] = {
        name: value
        for base in type(error).__mro__
        if base.__module__ == builtins.__name__
        for name, member in vars(base).items()
        if type(member) is types.MemberDescriptorType
        and name not in ("obj", "__suppress_context__")
        and (value := getattr(error, name, None)) is not None
    }
    if isinstance(error, OSError):
        found.clear()  # all of them are arguments
    for name in ("__context__", "__cause__"):
        if getattr(error, name) is not None:
            found[name] = getattr(error, name)
    if error.__suppress_context__:
        found["__suppress_context__"] = True
    return found


def _has_own_arguments(kind: Any) -> bool:
    """Return True if an exception has the default `__reduce__` and a Python `__init__`."""
    usual = kind.__reduce__ is BaseException.__reduce__
    return usual and type(kind.__init__) is types.FunctionType


def _is_library(module: types.ModuleType) -> bool:
    """Return True if a module belongs to Python or a package, and so not to this session."""
    if module.__name__.partition(".")[0] in sys.stdlib_module_names:
        return True
    return "site-packages" in str(getattr(module, "__file__", ""))


def _reducing_base(kind: type) -> type | None:
    if issubclass(kind, (enum.Enum, types.ModuleType)) or kind in copyreg.dispatch_table:
        return None
    for base in kind.__mro__[:-1]:
        if module_of(base).partition(".")[0] == "pandas" and base.__name__ in _FRAMES:
            return base
        if "__reduce_ex__" in vars(base) or "__reduce__" in vars(base):
            top = module_of(base).partition(".")[0]
            return base if top in sys.stdlib_module_names or top == "numpy" else None
    return None
