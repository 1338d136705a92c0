"""Reductions of functions, wrappers and types of cells, and the functions that rebuild them.

Dumps name the functions `make_…`, `set_…` and `the_…`, so these stay in this module.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, unused-ignore"

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython

from kernel_specs.restricted.hibernation import objects
from kernel_specs.restricted.originals import marshal

_DISPATCH = ("registry", "dispatch", "register", "_clear_cache")
"""The attributes of a function of `functools.singledispatch`."""
_TYPE_PARAMETERS: tuple[Any, ...] = (
    typing.TypeVar,
    typing.ParamSpec,
    getattr(typing, "TypeVarTuple", None),
)
_OF_PARAMETERS: tuple[Any, ...] = (typing.ParamSpecArgs, typing.ParamSpecKwargs)
_TYPE_ALIASES: tuple[Any, ...] = (getattr(typing, "TypeAliasType", None),)
"""Classes of `typing`; None for one that this version of Python does not have."""
_VARIANCES = ("covariant", "contravariant", "infer_variance")


def make_function(code: Any, name: str, closure: Any, home: Any) -> Any:
    """Return a function whose globals are those of `home`; "" means the live user namespace.

    `home` is the name of a module, a module, or the dict that the function was made in.
    """
    if isinstance(home, str):
        home = vars(importlib.import_module(home)) if home else the_namespace()
    elif isinstance(home, types.ModuleType):
        home = vars(home)
    return types.FunctionType(code, home, name, None, closure)


def set_function_state(function: Any, state: Any) -> None:
    """Set attributes after the function is memoized: they may refer to it.

    The state has these, its `__dict__`, and the names that it adds to `Foreign` globals.
    """
    attributes, own, *more = state
    for name, value in attributes.items():
        setattr(function, name, value)
    function.__dict__ = own  # itself: it may be a variable, too
    if more:
        function.__globals__.update(more[0])


def set_wrapper_state(wrapper: Any, own: dict[str, Any]) -> None:
    """Set attributes after the wrapper is memoized: they may refer to it."""
    vars(wrapper).update(own)


def make_cell() -> types.CellType:
    """Return an empty closure cell."""
    return types.CellType()


def set_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    """Set the value of a closure cell, if it had one."""
    if contents:
        cell.cell_contents = contents[0]


def make_lru_cache(function: Any, maxsize: int | None, typed: bool) -> Any:
    """Return a `functools.lru_cache` with an empty cache."""
    return functools.lru_cache(maxsize=maxsize, typed=typed)(function)


def make_cached_property(function: Any, attribute: str | None) -> Any:
    """Return a `functools.cached_property`; up to Python 3.11 it holds a lock."""
    made: functools.cached_property[Any] = functools.cached_property(function)
    if attribute is not None:
        made.__set_name__(object, attribute)
    return made


def make_new_type(name: str, base: Any) -> Any:
    """Return a `typing.NewType` of a cell."""
    made: Any = typing.NewType(name, base)  # type: ignore[misc]
    made.__module__ = "__main__"
    return made


def make_of_typing(kind: Any, arguments: Any, options: Any, module: str) -> Any:
    """Return a type parameter or alias; typing reads its module from the calling frame."""
    space = {"__name__": module, "kind": kind, "arguments": arguments, "options": options}
    return eval("kind(*arguments, **options)", space)


def make_single_dispatch_method(function: Any, dispatcher: Any) -> Any:
    """Return a `functools.singledispatchmethod`; from Python 3.13 on it has a cache of weakrefs."""
    made: functools.singledispatchmethod[Any] = functools.singledispatchmethod(function)
    made.dispatcher = dispatcher
    return made


def make_single_dispatch(function: Any, registry: dict[type, Any]) -> Any:
    """Return a `functools.singledispatch`; its cache of weak references starts empty."""
    made = functools.singledispatch(function)
    for kind, implementation in registry.items():
        made.register(kind, implementation)
    return made


def the_shell() -> Any:
    """Return the shell, as `get_ipython()` does."""
    return get_ipython()


def the_namespace() -> Any:
    """Return the namespace of cells, as `globals()` does there."""
    return the_shell().user_ns


def the_history(name: str) -> Any:
    """Return `Out`, `In` or `_dh` of this process."""
    return the_namespace()[name]


def the_stream(name: str) -> Any:
    """Return `sys.stdout` or `sys.stderr` of this process."""
    return getattr(sys, name)


def reduce_function(function: Any, home: Any) -> Any:
    attributes = {
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
    }
    if sys.version_info >= (3, 14):
        attributes["__annotate__"] = function.__annotate__
    else:
        attributes["__annotations__"] = function.__annotations__
    if sys.version_info >= (3, 12):
        attributes["__type_params__"] = function.__type_params__
    arguments = (function.__code__, function.__name__, function.__closure__, home)
    state = (attributes, vars(function))
    return make_function, arguments, state, None, None, set_function_state


def named_in(annotations: dict[str, Any]) -> set[str]:
    """Return the names in annotations that are strings, for `typing.get_type_hints`."""
    found: set[str] = set()
    for text in annotations.values():
        if type(text) is str:
            with contextlib.suppress(SyntaxError, ValueError):
                found.update(compile(text, "", "eval", dont_inherit=True).co_names)
    return found


def _reduce_cell(cell: types.CellType) -> Any:
    # The contents are set as state: they may refer to the cell, as in a recursive closure.
    try:
        contents: tuple[Any, ...] = (cell.cell_contents,)
    except ValueError:
        contents = ()
    return make_cell, (), contents, None, None, set_cell


def _reduce_cached_property(made: Any) -> Any:
    arguments = (made.func, made.attrname)
    return with_attributes(made, make_cached_property, arguments, "func", "attrname", "lock")


def _reduce_code(code: types.CodeType) -> Any:
    """Reduce a code object with its file name, which cloudpickle omits from 3.1.3 on.

    Without it, tracebacks and `inspect` do not find the source.
    """
    try:
        return marshal.loads, (marshal.dumps(code),)
    except ValueError:  # a constant that no source can have
        return NotImplemented


def _reduce_new_type(made: Any) -> Any:
    if is_importable(made):
        return NotImplemented
    arguments = (made.__name__, made.__supertype__)
    return with_attributes(made, make_new_type, arguments, "__supertype__")


def _reduce_type_parameter(made: Any) -> Any:
    if objects.is_held(made, made.__name__):
        return NotImplemented
    options = {name: True for name in _VARIANCES if getattr(made, f"__{name}__", False)}
    arguments = (made.__name__, *getattr(made, "__constraints__", ()))
    if type(made) is typing.TypeVar and made.__bound__ is not None:
        options["bound"] = made.__bound__
    if getattr(made, "has_default", bool)():  # from Python 3.13 on
        options["default"] = made.__default__
    return make_of_typing, (type(made), arguments, options, made.__module__)


def _reduce_of_parameter(made: Any) -> Any:
    return getattr, (made.__origin__, "args" if type(made) is typing.ParamSpecArgs else "kwargs")


def _reduce_type_alias(made: Any) -> Any:
    if objects.is_held(made, made.__name__):
        return NotImplemented
    options = {"type_params": made.__type_params__}
    return make_of_typing, (type(made), (made.__name__, made.__value__), options, made.__module__)


def reduce_single_dispatch(function: Any) -> Any:
    made = (function.__wrapped__, dict(function.registry))
    return with_attributes(function, make_single_dispatch, made, *_DISPATCH)


def _reduce_single_dispatch_method(method: Any) -> Any:
    made = (method.func, method.dispatcher)
    left = ("func", "dispatcher", "_method_cache")
    return with_attributes(method, make_single_dispatch_method, made, *left)


def _reduce_method(method: Any) -> Any:
    return with_attributes(method, type(method), (method.__func__,))


def with_attributes(
    wrapper: Any, make: Callable[..., Any], arguments: tuple[Any, ...], *made: str
) -> Any:
    """Return the reduction of a wrapper, with the attributes that `make` does not set (`made`)."""
    own = {k: v for k, v in vars(wrapper).items() if k not in ("__wrapped__", *made)}
    return make, arguments, own or None, None, None, set_wrapper_state


def reduce_shell(shell: Any) -> Any:
    return (the_shell, ()) if shell is get_ipython() else NotImplemented


def is_importable(obj: Any) -> bool:
    if obj.__module__ == "__main__" or type(obj.__module__) is not str:
        return False
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


REDUCTIONS: dict[type, Callable[[Any], Any]] = {
    types.CellType: _reduce_cell,
    types.CodeType: _reduce_code,
    functools.cached_property: _reduce_cached_property,
    functools.singledispatchmethod: _reduce_single_dispatch_method,
    staticmethod: _reduce_method,
    classmethod: _reduce_method,
    typing.NewType: _reduce_new_type,
    **dict.fromkeys(_TYPE_PARAMETERS, _reduce_type_parameter),
    **dict.fromkeys(_OF_PARAMETERS, _reduce_of_parameter),
    **dict.fromkeys(_TYPE_ALIASES, _reduce_type_alias),
}
"""Functions that reduce the instances of a class."""
