"""A cloudpickle pickler for the values of a notebook, and the unpickler of what it writes.

A function of a cell keeps its code; loading binds it to the live user namespace. Variables shared
between closures stay shared, modules are imported by name as user code would, caches of `lru_cache`
start empty. An object that stands for something outside the process is refused.

Pickle saves a float by value, and a builtin dict without calling the reducer. So a value that holds
a NaN or the user namespace is pickled again, by an `IdentityPickler`, whose `persistent_id` is
called for every object. Identity matters: a list finds a NaN by nothing else.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, unused-ignore"

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import pickle
import re
import struct
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
from IPython.core.getipython import get_ipython

from kernel_specs.restricted.console.streams import standard_name
from kernel_specs.restricted.hibernation import arrays, object_reducer, objects, pickles
from kernel_specs.restricted.hibernation.attempt_limits import (
    GPU_ARRAY,
    CannotKeepError,
    kind_of,
    on_gpu,
)
from kernel_specs.restricted.hibernation.homes import Foreign, Homes
from kernel_specs.restricted.hibernation.memory_ranges import BYTES, MemoryRange, MemoryRanges

_LRU_CACHE = type(functools.lru_cache(maxsize=1)(len))
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
"""Types of objects that are pickled by module and name."""
_BY_IDENTITY = re.compile(rb"G[\x7f\xff][\xf0-\xff]|\x8c\x03_oh")
"""Bytes in a pickle of a NaN, or of the user namespace, in which IPython always has `_oh`."""
_NO_METADATA = vars(dataclasses)["_EMPTY_METADATA"]
"""The metadata of fields that have none, which all dataclasses share."""
_NANS = ("numpy", "math", "cmath")
"""Modules with a `nan` of their own, which code compares with by identity."""
_SYSTEM = [name for name, value in vars(sys).items() if type(value) in (list, dict)]
"""The lists and dicts of the module `sys`."""
_ANY_GLOBAL = {"globals", "eval", "exec"}
"""Names by which a function may use globals that its code does not name."""
_HISTORY = {"_oh": "Out", "_ih": "In", "_dh": "_dh"}
"""Variables with the lists and dicts of IPython's history, and their names for people."""
_FLOAT = struct.Struct("<d")
_OWN_CLASS = cloudpickle.cloudpickle._make_skeleton_class
_OWN_ENUM = cloudpickle.cloudpickle._make_skeleton_enum
_GLOBALS_OF = cloudpickle.cloudpickle._extract_code_globals
_SUBMODULES_OF = cloudpickle.cloudpickle._find_imported_submodules
Ask = Callable[[], object]
"""Callback that raises once the time is up or the host has requested a stop."""


class Globals:
    """Pickles the user namespace as that of the loading kernel."""

    def __reduce__(self) -> Any:
        return pickles.the_namespace, ()


class HistoryReference:
    """Pickles a part of IPython's history, such as `Out`, as that of the loading kernel."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return pickles.the_history, (self._name,)


class Attribute:
    """Pickles an attribute of a module by name."""

    def __init__(self, module: str, name: str) -> None:
        self._place = (module, name)

    def __reduce__(self) -> Any:
        return objects.the_attribute, self._place


class Module:
    """Pickles a module by name."""

    def __init__(self, module: types.ModuleType, code: str) -> None:
        """Submodules that `code` names are imported too."""
        self.name = module.__name__
        below = [name for name in map(str, list(sys.modules)) if name.startswith(f"{self.name}.")]
        self._submodules = sorted(name for name in below if name in code)

    def __reduce__(self) -> Any:
        return objects.import_module, (self.name, self._submodules)


def stand_in(value: Any, namespace: dict[str, Any], code: str) -> Any:
    """Return the object to pickle for a variable: a placeholder if every process has that object.

    `code` is that of all cells. Raises CannotKeepError.
    """
    if value is namespace:
        return Globals()
    if type(value) in (list, dict):
        for name in _SYSTEM:
            if value is getattr(sys, name, None):
                return Attribute("sys", name)
        for name in _HISTORY:
            if value is namespace.get(name):
                return HistoryReference(name)
    if what := kind_of(type(value)):
        _outside(value, what)
    if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
        return Module(value, code)
    return value


def live_objects(namespace: dict[str, Any]) -> dict[int, str]:
    """Return names by id of objects that each process has of its own, such as sys.path."""
    found = {id(vars(sys).get(name)): f"sys.{name}" for name in _SYSTEM}
    found |= {id(namespace.get(name)): called for name, called in _HISTORY.items()}
    current = getattr(sys.modules.get("decimal"), "getcontext", None)
    if type(current) is types.BuiltinFunctionType:
        found[id(current())] = "the context of decimal"
    found.pop(id(None), None)
    return found


class Identities:
    """State that the picklers of one dump share: identities of NaN objects, memory, class kinds."""

    def __init__(self) -> None:
        self.homes = Homes()
        self.memory = MemoryRanges()
        self.ways: object_reducer.Ways = {}
        self.refused: dict[type, str] = {}
        self._numbers: dict[int, tuple[int, float]] = {}
        self._owners = {
            id(sys.modules[module].nan): module for module in _NANS if module in sys.modules
        }

    def of(self, nan: float) -> tuple[Any, ...]:
        """Return the persistent id of a NaN object for `NotebookUnpickler`."""
        if (module := self._owners.get(id(nan))) is not None:
            return (module,)
        number, _ = self._numbers.setdefault(id(nan), (len(self._numbers), nan))
        return (number, _FLOAT.pack(nan))


class NotebookPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles values of `namespace` with one memo.

    `modules` are those that loading requires, `changes` the reasons why values will not be equal.
    """

    def __init__(
        self,
        file: Any,
        buffer_callback: Callable[..., Any],
        *,
        namespace: dict[str, Any],
        identities: Identities,
        ask: Ask,
    ) -> None:
        """`buffer_callback` is that of protocol 5; `ask` is called for each object."""
        super().__init__(file, protocol=5, buffer_callback=self._put_aside)
        self.modules: dict[str, None] = {}
        self.changes: dict[str, None] = {}
        self.named: set[int] = set()
        """Ids of objects that are pickled as an attribute of their module."""
        self._namespace = namespace
        self._identities = identities
        self._ask = ask
        self._made = (file, buffer_callback)
        self._refused = identities.refused
        self._objects = object_reducer.ObjectReducer(
            self._change, identities.memory, identities.ways
        )
        self._special: dict[type, Callable[[Any], Any]] = {
            **pickles.REDUCTIONS,
            type(get_ipython()): pickles.reduce_shell,
            _LRU_CACHE: self._reduce_lru_cache,
            **self._objects.special,
        }
        self._numpy = sys.modules.get("numpy")
        self._arrays = arrays.ArrayReducer(self._change, identities.memory)
        if self._numpy is not None:
            self._special[self._numpy.void] = self._arrays.reduce_record
            self._special[self._numpy.record] = self._arrays.reduce_record

    def identifying(self, written: Iterable[bytes] | None = None) -> NotebookPickler | None:
        """Return a pickler for a second attempt that keeps identities; None if none is required.

        `written` holds the pickles of the first attempt, or is None if that has failed. The pickler
        has the same modules and an empty memo.
        """
        if written is not None and not any(_BY_IDENTITY.search(piece) for piece in written):
            return None
        made = IdentityPickler(
            *self._made, namespace=self._namespace, identities=self._identities, ask=self._ask
        )
        made.modules = self.modules
        return made

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduction of `obj`, or NotImplemented. Raises CannotKeepError."""
        self._ask()
        kind = type(obj)
        if issubclass(kind, _NAMED):
            self._note(obj.__module__)
            top = str(obj.__module__).partition(".")[0]
            if top in object_reducer.MODULES and kind is not type:
                self._change(object_reducer.MODULES[top])
        elif kind is Module:
            self._note(obj.name)
            if obj.name in object_reducer.MODULES:
                self._change(object_reducer.MODULES[obj.name])
        if kind is types.FunctionType:
            home = self._home(obj)
            if home == "functools" and hasattr(obj, "registry") and not pickles.is_importable(obj):
                return pickles.reduce_single_dispatch(obj)
            if home is not None and (not home or not pickles.is_importable(obj)):
                return pickles.reduce_function(obj, home)
            if home is None and not pickles.is_importable(obj):
                return self._reduce_foreign(obj, self._identities.homes.of(obj))
        elif kind is types.ModuleType:
            return self._identities.homes.reduce_module(obj)
        elif (special := self._special.get(kind)) is not None:
            if obj is _NO_METADATA:
                self.named.add(id(obj))
                return objects.the_attribute, ("dataclasses", "_EMPTY_METADATA")
            return special(obj)
        elif self._numpy is not None and issubclass(kind, self._numpy.ndarray):
            return self._arrays.reduce(obj)
        elif issubclass(kind, type):
            _load_home(obj)
            if (made := objects.reduce_ctypes(obj)) is not None:
                return made
            made = super().reducer_override(obj)
            if type(made) is tuple and made[0] in (_OWN_CLASS, _OWN_ENUM):
                return objects.reduce_class(obj, made)
            return made
        else:
            if (what := self._refused.get(kind)) is None:
                what = self._refused[kind] = kind_of(kind)
            if what or on_gpu(obj):
                return _outside(obj, what or GPU_ARRAY)
            made = self._objects.reduce(obj)
            if made is not NotImplemented:
                if made[0] is objects.the_attribute:
                    self.named.add(id(obj))
                    self._note(kind.__module__)
                return made
        return super().reducer_override(obj)

    def begin(self) -> None:
        """Prepare for another value: forget changes and memory of the last one."""
        self.changes.clear()
        self._identities.memory.begin()

    @property
    def ranges(self) -> list[MemoryRange]:
        """The memory of the last value."""
        return self._identities.memory.found

    def _put_aside(self, buffer: pickle.PickleBuffer) -> Any:
        if self._identities.memory.is_of_code(buffer):
            self._change(BYTES)
        return self._made[1](buffer)

    def _change(self, reason: str) -> None:
        """Record that a value will not be equal."""
        self.changes[reason] = None

    def _reduce_lru_cache(self, wrapper: Any) -> Any:
        if pickles.is_importable(wrapper):
            return NotImplemented
        if wrapper.cache_info().currsize:
            self._change(object_reducer.EMPTY_CACHE)
        options = wrapper.cache_parameters()
        made = (wrapper.__wrapped__, options["maxsize"], options["typed"])
        return pickles.with_attributes(wrapper, pickles.make_lru_cache, made, "cache_parameters")

    def _reduce_foreign(self, function: Any, home: Any) -> Any:
        """Reduce a function with other globals; of `Foreign` ones, those that it uses are saved."""
        made = pickles.reduce_function(function, home)
        if type(home) is not Foreign:
            return made
        function_of, arguments, state, *more = made
        names = set(_GLOBALS_OF(function.__code__)) | pickles.named_in(
            state[0].get("__annotations__", {})
        )
        used = {
            name: home.owner[name] for name in names & home.owner.keys() if name != "__builtins__"
        }
        if names & _ANY_GLOBAL and not home.has_only(used):
            self._change(object_reducer.SOME_GLOBALS)
        imported = _SUBMODULES_OF(function.__code__, used.values())  # by being unpickled
        return function_of, arguments, (*state, used, imported), *more

    def _note(self, name: Any) -> None:
        """Record a module that is required to load a value."""
        if type(name) is str and name != "__main__" and name in sys.modules:
            self.modules[name] = None

    def _home(self, function: Any) -> str | None:
        """Return the module of a function's globals; "" for the notebook, None for other dicts."""
        if function.__globals__ is self._namespace:
            return ""
        name = function.__globals__.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        return name if module is not None and vars(module) is function.__globals__ else None


class IdentityPickler(NotebookPickler):
    """Preserves the identity of NaN objects, and of the user namespace as the live one."""

    def persistent_id(self, obj: Any) -> Any:
        """Return the id of a NaN or of the user namespace, None for any other object."""
        if type(obj) is float and obj != obj:  # a NaN
            name = self._identities.of(obj)
            self._note(name[0])
            return name
        return () if obj is self._namespace else None

    def identifying(self, written: Iterable[bytes] | None = None) -> None:
        """Return None: this pickler preserves identities already."""


class NotebookUnpickler(pickle.Unpickler):
    """Loads values of a dump; `nans` are those of its other segments, by number.

    `classes` collects the classes of cells, which a later segment may refer to: until then only
    the registry of an abstract class, with weak references, may have them.
    """

    def __init__(
        self,
        file: Any,
        buffers: Iterable[Any],
        *,
        nans: dict[int, float],
        classes: list[type],
        ask: Ask,
    ) -> None:
        """`ask` is called for each class."""
        super().__init__(file, buffers=buffers)
        self._nans = nans
        self._classes = classes
        self._ask = ask
        self._late: list[tuple[Any, int]] = []
        """Iterators that are in the list over which they run, and their index."""

    def load(self) -> Any:
        """Return the next value."""
        found = super().load()
        while self._late:
            objects.set_iterator_state(*self._late.pop())
        return found

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function by name, also by one in a dump of an earlier version."""
        self._ask()
        moved = module == pickles.__name__ and _MOVED.get(name)
        found = moved or super().find_class(module, name)
        if found is objects.make_class or found is objects.make_enum:
            # Without a reference to this object: its memo, which the garbage collection of Python
            # 3.10 and 3.11.2 does not see, would keep all that was loaded.
            return functools.partial(_make_class, self._classes, found)
        if found is objects.set_iterator_state:
            return functools.partial(_set_iterator_state, self._late)
        return found

    def persistent_load(self, pid: Any) -> Any:
        """Return the object that `IdentityPickler` has given this id."""
        if pid == ():
            return pickles.the_namespace()
        if isinstance(pid[0], str):
            return objects.import_module(pid[0], []).nan
        return self._nans.setdefault(pid[0], *_FLOAT.unpack(pid[1]))


def _make_class(classes: list[type], make: Callable[..., type], *arguments: Any) -> type:
    """Make a class and add it to `classes`."""
    made = make(*arguments)
    classes.append(made)
    return made


def _set_iterator_state(late: list[tuple[Any, int]], iterator: Any, index: int) -> None:
    """Advance an iterator, now or when its list is filled."""
    if not objects.set_iterator_state(iterator, index):
        late.append((iterator, index))


_MOVED: dict[str, Callable[..., Any]] = {
    "make_view": arrays.make_view,
    "make_exception": objects.make_exception,
    "the_sentinel": functools.partial(getattr, dataclasses),
}
"""Functions by the names that dumps of earlier versions contain."""


def _outside(obj: Any, what: str) -> Any:
    if name := standard_name(obj):
        return pickles.the_stream, (name,)
    raise CannotKeepError(what, obj)


def _load_home(kind: type) -> None:
    """Import the module of a library's class, as `numpy.rec`, which may not be loaded yet."""
    name = kind.__module__
    if type(name) is str and name not in sys.modules and name.partition(".")[0] in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
