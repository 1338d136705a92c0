"""Globals of functions that neither the notebook has nor a module that can be imported.

They belong to a module made by code, to `%run`, or to a dict that code was run in. Functions keep
them in common, and with whatever value has them as a dict or as a module's.
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
"""What relative imports and tracebacks need of a module's globals."""
_OF_PYTHON = ("__builtins__", "__doc__", "__loader__", "__spec__", "__cached__", "__annotations__")
"""What Python sets besides."""


class Foreign:
    """Pickles such globals as a dict to which each function adds what it uses.

    The rest need not be kept, as what could not be.
    """

    def __init__(self, owner: dict[str, Any]) -> None:
        self.owner = owner

    def has_only(self, names: Iterable[str]) -> bool:
        """Return True if there are no other globals."""
        return self.owner.keys() <= {*_OF_MODULES, *names, *_OF_PYTHON}

    def __reduce__(self) -> Any:
        return make_globals, ({name: self.owner[name] for name in _OF_MODULES & self.owner.keys()},)


class Homes:
    """The globals of functions in one dump; `whole` are the ids of those that values have, too."""

    def __init__(self) -> None:
        self.whole: set[int] = set()
        self._foreign: dict[int, Foreign] = {}
        self._modules: dict[int, types.ModuleType] = {}

    def of(self, function: Any) -> Any:
        """The object to pickle for the globals of a function: `Foreign`, a dict, or a module."""
        owner = function.__globals__
        if id(owner) in self.whole:
            return self._modules.get(id(owner), owner)
        return self._foreign.setdefault(id(owner), Foreign(owner))

    def reduce_module(self, module: types.ModuleType) -> Any:
        """How to rebuild a module, or NotImplemented for one that is imported by its name."""
        if (name := registered(module)) is not None:
            same = name == vars(module).get("__name__")
            return NotImplemented if same else (the_module, (name,))
        self._modules[id(vars(module))] = module
        state = {name: value for name, value in vars(module).items() if name != "__builtins__"}
        return types.ModuleType, (module.__name__,), state, None, None, set_module_state


def registered(module: types.ModuleType) -> str | None:
    """The name under which a module can be imported again; None for one that code has made."""
    name = vars(module).get("__name__")
    if type(name) is str and sys.modules.get(name) is module:
        return name
    return next((name for name, each in list(sys.modules.items()) if each is module), None)


def the_module(name: str) -> types.ModuleType:
    """A module that has another name than its own. Raises ImportError."""
    __import__(name)
    return sys.modules[name]


def make_globals(own: dict[str, Any]) -> dict[str, Any]:
    """The dict that `Foreign` stands for."""
    return {**own, "__builtins__": _builtins()}


def set_module_state(module: types.ModuleType, state: dict[str, Any]) -> None:
    """Fill a module after it is memoized: functions in it refer to it."""
    vars(module).update(state, __builtins__=_builtins())


def _builtins() -> Any:
    """Those of cells."""
    shell: Any = get_ipython()
    return shell.user_ns["__builtins__"]
