"""A cloudpickle pickler for the values of a notebook.

A function of a cell keeps its code; loading binds it to the live user namespace. Variables shared
between closures stay shared, modules are imported by name as user code would, caches of `lru_cache`
start empty. An object that stands for something outside the process is refused.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, unused-ignore"

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import importlib
import marshal
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import cloudpickle
from IPython.core.getipython import get_ipython

from kernel_specs.restricted.hibernation.attempt_limits import CannotKeepError, kind_of
from kernel_specs.restricted.policy.guard import CELL_PREFIX

# Arrays of numpy that are views: loading makes views of the same memory again.


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


IMPORT = compile("__import__(name)", f"{CELL_PREFIX}hibernation>", "eval")
_LRU_CACHE = type(functools.lru_cache(maxsize=1)(len))
_SENTINELS: dict[type, str] = {
    type(getattr(dataclasses, name)): name
    for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")
    if hasattr(dataclasses, name)
}
"""Objects that a dataclass compares by identity."""


_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
"""Types of objects that are pickled by module and name."""


class Globals:
    """Pickles the user namespace as that of the loading kernel."""

    def __reduce__(self) -> Any:
        return the_namespace, ()


class Module:
    """Pickles a module by name."""

    def __init__(self, module: types.ModuleType, code: str) -> None:
        """Submodules that `code` names are imported too."""
        self.name = module.__name__
        below = [name for name in list(sys.modules) if name.startswith(f"{self.name}.")]
        self._submodules = sorted(name for name in below if name in code)

    def __reduce__(self) -> Any:
        return import_module, (self.name, self._submodules)


def stand_in(value: Any, namespace: dict[str, Any], code: str) -> Any:
    """The object to pickle for a variable; `code` is that of all cells. Raises CannotKeepError."""
    if value is namespace:
        return Globals()
    if what := kind_of(type(value)):
        _outside(value, what)
    if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
        return Module(value, code)
    return value


class NotebookPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles values of `namespace` with one memo; `modules` are those that they need to load."""

    def __init__(
        self, file: Any, namespace: dict[str, Any], buffer_callback: Callable[..., Any]
    ) -> None:
        """`buffer_callback` is that of protocol 5."""
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.arrays = ArrayReducer()
        self.modules: dict[str, None] = {}
        self._namespace = namespace
        self._refused: dict[type, str] = {}
        self._special: dict[type, Callable[[Any], Any]] = {
            types.CellType: _reduce_cell,
            types.CodeType: _reduce_code,
            _LRU_CACHE: _reduce_lru_cache,
            functools.cached_property: _reduce_cached_property,
            typing.NewType: _reduce_new_type,
            type(get_ipython()): _reduce_shell,
            **dict.fromkeys(_SENTINELS, _reduce_sentinel),
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            self._special[numpy.ndarray] = self.arrays.reduce

    def reducer_override(self, obj: Any) -> Any:
        """How to rebuild `obj`. Raises CannotKeepError."""
        kind = type(obj)
        if issubclass(kind, _NAMED):
            self._note(obj.__module__)
        elif kind is Module:
            self._note(obj.name)
        if kind is types.FunctionType:
            home = self._home(obj)
            if home == "functools" and hasattr(obj, "registry") and not _is_importable(obj):
                return _reduce_single_dispatch(obj)
            if home is not None and (not home or not _is_importable(obj)):
                return _reduce_function(obj, home)
        elif (special := self._special.get(kind)) is not None:
            return special(obj)
        else:
            if (what := self._refused.get(kind)) is None:
                what = self._refused[kind] = kind_of(kind)
            if what:
                return _outside(obj, what)
            if isinstance(obj, BaseException) and _has_own_arguments(kind):
                return make_exception, (kind, obj.args), vars(obj) or None
        return super().reducer_override(obj)

    def _note(self, name: Any) -> None:
        """Record a module that a value needs to load."""
        if type(name) is str and name != "__main__" and name in sys.modules:
            self.modules[name] = None

    def _home(self, function: Any) -> str | None:
        """The module of a function's globals; empty for the notebook, None for others."""
        if function.__globals__ is self._namespace:
            return ""
        name = function.__globals__.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        return name if module is not None and vars(module) is function.__globals__ else None


def make_function(code: Any, name: str, closure: Any, home: str) -> Any:
    """A function whose globals are the live user namespace, or those of the module `home`."""
    namespace = vars(importlib.import_module(home)) if home else the_namespace()
    return types.FunctionType(code, namespace, name, None, closure)


def set_function_state(function: Any, state: Any) -> None:
    """Set attributes after the function is memoized: they may refer to it."""
    attributes, own = state
    for name, value in attributes.items():
        setattr(function, name, value)
    vars(function).update(own)


def make_cell() -> types.CellType:
    """An empty closure cell."""
    return types.CellType()


def set_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    """Set the value of a closure cell, if it had one."""
    if contents:
        cell.cell_contents = contents[0]


def make_lru_cache(function: Any, maxsize: int | None, typed: bool) -> Any:
    """`functools.lru_cache` with an empty cache."""
    return functools.lru_cache(maxsize=maxsize, typed=typed)(function)


def make_cached_property(function: Any, attribute: str | None) -> Any:
    """`functools.cached_property`; up to Python 3.11 it holds a lock."""
    made: functools.cached_property[Any] = functools.cached_property(function)
    if attribute is not None:
        made.__set_name__(object, attribute)
    return made


def make_new_type(name: str, base: Any) -> Any:
    """`typing.NewType` of a cell."""
    made: Any = typing.NewType(name, base)  # type: ignore[misc]
    made.__module__ = "__main__"
    return made


def make_single_dispatch(function: Any, registry: dict[type, Any]) -> Any:
    """`functools.singledispatch`; its cache of weak references starts empty."""
    made = functools.singledispatch(function)
    for kind, implementation in registry.items():
        made.register(kind, implementation)
    return made


def make_exception(kind: Any, arguments: tuple[Any, ...]) -> Any:
    """An exception made without its `__init__`, which may take other arguments."""
    return kind.__new__(kind, *arguments)


def import_module(name: str, submodules: list[str]) -> types.ModuleType:
    """Import as a cell would: the import policy applies. Raises ImportError."""
    eval(IMPORT, {"__builtins__": builtins, "name": name})
    for submodule in submodules:
        with contextlib.suppress(ImportError):
            eval(IMPORT, {"__builtins__": builtins, "name": submodule})
    return sys.modules[name]


def the_shell() -> Any:
    """What `get_ipython()` returns."""
    return get_ipython()


def the_namespace() -> Any:
    """What `globals()` returns in a cell."""
    return the_shell().user_ns


def the_sentinel(name: str) -> Any:
    """A sentinel of `dataclasses`."""
    return getattr(dataclasses, name)


def the_stream(name: str) -> Any:
    """`sys.stdout` or `sys.stderr`."""
    return getattr(sys, name)


def _reduce_function(function: Any, home: str) -> Any:
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


def _reduce_cell(cell: types.CellType) -> Any:
    # The contents come as state: they may lead back to the cell, as in a recursive closure.
    try:
        contents: tuple[Any, ...] = (cell.cell_contents,)
    except ValueError:
        contents = ()
    return make_cell, (), contents, None, None, set_cell


def _reduce_lru_cache(wrapper: Any) -> Any:
    if _is_importable(wrapper):
        return NotImplemented
    options = wrapper.cache_parameters()
    return make_lru_cache, (wrapper.__wrapped__, options["maxsize"], options["typed"])


def _reduce_cached_property(made: Any) -> Any:
    return make_cached_property, (made.func, made.attrname)


def _reduce_code(code: types.CodeType) -> Any:
    """With the file that it is from: cloudpickle leaves that out from 3.1.3 on, and with it goes
    the source in tracebacks and for `inspect`.
    """
    try:
        return marshal.loads, (marshal.dumps(code),)
    except ValueError:  # a constant that no source can have
        return NotImplemented


def _reduce_new_type(made: Any) -> Any:
    if _is_importable(made):
        return NotImplemented
    return make_new_type, (made.__name__, made.__supertype__)


def _reduce_single_dispatch(function: Any) -> Any:
    return make_single_dispatch, (function.__wrapped__, dict(function.registry))


def _has_own_arguments(kind: Any) -> bool:
    """Whether an exception has the default `__reduce__` and a Python `__init__`."""
    usual = kind.__reduce__ is BaseException.__reduce__
    return usual and type(kind.__init__) is types.FunctionType


def _reduce_shell(shell: Any) -> Any:
    return (the_shell, ()) if shell is get_ipython() else NotImplemented


def _reduce_sentinel(mark: Any) -> Any:
    return the_sentinel, (_SENTINELS[type(mark)],)


def _outside(obj: Any, what: str) -> Any:
    for name in ("stdout", "stderr"):
        if obj is getattr(sys, name):
            return the_stream, (name,)
    raise CannotKeepError(what, obj)


def _is_importable(obj: Any) -> bool:
    if obj.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj
