"""Globals of functions that belong neither to the notebook nor to an importable module.

They belong to a module made by code, to `%run`, or to a dict that code was run in. Functions still
share them after loading, also with values that hold them as a dict or a module.
"""

# IPython's functions have no types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

from IPython.core.getipython import get_ipython

_OF_MODULES = ("__name__", "__package__", "__path__", "__file__")
"""Globals of a module that relative imports and tracebacks need."""
_OF_PYTHON = ("__builtins__", "__doc__", "__loader__", "__spec__", "__cached__", "__annotations__")
"""Further globals that Python sets itself."""


class Foreign:
    """Pickles such globals as a dict to which each function adds the names that it uses.

    The others are not saved, so that one which cannot be pickled does no harm.
    """

    def __init__(self, owner: dict[str, Any]) -> None:
        self.owner = owner

    def has_only(self, names: Iterable[str]) -> bool:
        """Return True if there are no other globals."""
        return self.owner.keys() <= {*_OF_MODULES, *names, *_OF_PYTHON}

    def __reduce__(self) -> Any:
        return make_globals, ({name: self.owner[name] for name in _OF_MODULES & self.owner.keys()},)


class Homes:
    """The globals of functions in one dump; `whole` are ids of those that values also refer to."""

    def __init__(self) -> None:
        self.whole: set[int] = set()
        self._foreign: dict[int, Foreign] = {}
        self._modules: dict[int, types.ModuleType] = {}

    def of(self, function: Any) -> Any:
        """Return the object to pickle for a function's globals: `Foreign`, a dict, or a module."""
        owner = function.__globals__
        if id(owner) in self.whole:
            return self._modules.get(id(owner), owner)
        return self._foreign.setdefault(id(owner), Foreign(owner))

    def reduce_module(self, module: types.ModuleType) -> Any:
        """Return the reduction of a module; NotImplemented for one that is imported by its name."""
        if (name := registered(module)) is not None:
            same = name == vars(module).get("__name__")
            return NotImplemented if same else (the_module, (name,))
        self._modules[id(vars(module))] = module
        state = {name: value for name, value in vars(module).items() if name != "__builtins__"}
        return types.ModuleType, (module.__name__,), state, None, None, set_module_state


def registered(module: types.ModuleType) -> str | None:
    """Return the name by which a module can be imported again; None for one made by code."""
    name = vars(module).get("__name__")
    if type(name) is str and sys.modules.get(name) is module:
        return name
    return next((name for name, each in list(sys.modules.items()) if each is module), None)


def the_module(name: str) -> types.ModuleType:
    """Import and return a module by a name that is not its `__name__`. Raises ImportError."""
    __import__(name)
    return sys.modules[name]


def make_globals(own: dict[str, Any]) -> dict[str, Any]:
    """Return the dict that a pickled `Foreign` is loaded as."""
    return {**own, "__builtins__": _builtins()}


def set_module_state(module: types.ModuleType, state: dict[str, Any]) -> None:
    """Fill a module after it is memoized: functions in it refer to it."""
    vars(module).update(state, __builtins__=_builtins())


def _builtins() -> Any:
    """Return the `__builtins__` of cells."""
    shell: Any = get_ipython()
    return shell.user_ns["__builtins__"]
