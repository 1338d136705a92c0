"""Pickles of what a notebook holds: cloudpickle's, with functions that stay in the notebook.

A function of a cell keeps its code and is bound to the live user namespace when it comes back, so
that it sees names as they are then. Variables shared between closures stay shared, modules are
imported again by name as user code would, and the caches of `lru_cache` start empty. What stands
for something outside the process is refused by name instead of being turned into something else.
"""

# mypy: disable-error-code="import-untyped, no-untyped-call"

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
from IPython.core.getipython import get_ipython

from kernel_specs.restricted.guard import CELL_PREFIX

MAX_REASON_CHARS = 160
KINDS = {
    "_thread.lock": "a thread lock",
    "_thread.RLock": "a thread lock",
    "_thread._local": "thread-local data",
    "threading.Thread": "a thread",
    "builtins.generator": "a generator",
    "builtins.coroutine": "a coroutine",
    "builtins.async_generator": "an asynchronous generator",
    "builtins.frame": "a frame",
    "builtins.traceback": "a traceback",
    "builtins.memoryview": "a memory view",
    "_io.BytesIO": "",
    "_io.StringIO": "",
    "_io._IOBase": "an open file",
    "tempfile._TemporaryFileWrapper": "an open file",
    "mmap.mmap": "a memory map",
    "socket.socket": "a connection",
    "_socket.socket": "a connection",
    "ssl.SSLContext": "a connection",
    "sqlite3.Connection": "a connection",
    "sqlite3.Cursor": "a database cursor",
    "subprocess.Popen": "a process",
    "multiprocessing.process.BaseProcess": "a process",
    "multiprocessing.pool.Pool": "a pool of workers",
    "concurrent.futures._base.Executor": "a pool of workers",
    "concurrent.futures._base.Future": "a pending result",
    "_asyncio.Future": "an asynchronous task",
    "_asyncio.Task": "an asynchronous task",
    "asyncio.events.AbstractEventLoop": "an event loop",
    "weakref.ReferenceType": "a weak reference",
    "_contextvars.ContextVar": "a context variable",
}
"""What cannot leave the process, by the name of its class or of one it derives from."""
_ENDINGS = (("Connection", "a connection"), ("Cursor", "a database cursor"), ("Lock", "a lock"))
_REFUSAL = re.compile(r"cannot pickle '([\w.]+)' object")
_IMPORT = compile("__import__(name)", f"{CELL_PREFIX}hibernation>", "eval")
_LRU_CACHE = type(functools.lru_cache(maxsize=1)(len))
_SENTINELS: dict[type, str] = {
    type(getattr(dataclasses, name)): name
    for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")
    if hasattr(dataclasses, name)
}
"""Objects that a dataclass compares by identity."""


class CannotKeepError(Exception):
    """An object that only exists in this process; `what` names its kind with an article."""

    def __init__(self, what: str, culprit: object) -> None:
        """`culprit` is the object itself, found at any depth."""
        super().__init__(what)
        self.what = what
        self.culprit = culprit


class Globals:
    """Stands for the user namespace itself where that is the value of a variable."""

    def __reduce__(self) -> Any:
        """The namespace of whichever kernel loads this."""
        return the_namespace, ()


class NotebookPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles values of the user namespace `namespace`, several in a row with one memo."""

    def __init__(
        self, file: Any, namespace: dict[str, Any], inputs: str, buffer_callback: Callable[..., Any]
    ) -> None:
        """`inputs` is the code of all cells: submodules named there are imported again."""
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._namespace = namespace
        self._inputs = inputs
        self._refused: dict[type, str] = {}
        self._special: dict[type, Callable[[Any], Any]] = {
            types.CellType: _reduce_cell,
            _LRU_CACHE: _reduce_lru_cache,
            functools.cached_property: _reduce_cached_property,
            type(get_ipython()): _reduce_shell,
            **dict.fromkeys(_SENTINELS, _reduce_sentinel),
        }

    def reducer_override(self, obj: Any) -> Any:
        """How to rebuild `obj`. Raises CannotKeepError."""
        kind = type(obj)
        if kind is types.FunctionType:
            if obj.__globals__ is self._namespace:
                return _reduce_function(obj)
        elif (special := self._special.get(kind)) is not None:
            return special(obj)
        elif isinstance(obj, types.ModuleType):
            if sys.modules.get(obj.__name__) is obj:
                return import_module, (obj.__name__, self._submodules(obj.__name__))
        else:
            if (what := self._refused.get(kind)) is None:
                what = self._refused[kind] = _kind_of(kind)
            if what:
                return _outside(obj, what)
        return super().reducer_override(obj)

    def _submodules(self, name: str) -> list[str]:
        """Loaded modules below this one that some cell has named."""
        below = [found for found in list(sys.modules) if found.startswith(f"{name}.")]
        return sorted(found for found in below if found in self._inputs)


def reason_for(error: BaseException, value: object) -> str:
    """Why `value` cannot be kept, in words for a list: `thread lock`, `holds an open file`."""
    if isinstance(error, MemoryError):
        return "too large for the memory limit"
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return "nested too deeply"
    if isinstance(error, CannotKeepError):
        what, itself = error.what, error.culprit is value
    elif match := _REFUSAL.search(_text(error)):
        what, itself = _words_for(match[1]), type(value).__name__ == match[1].rpartition(".")[2]
    else:
        return _cut(f"{type(error).__name__}: {_text(error)}")
    return _cut(what.removeprefix("an ").removeprefix("a ") if itself else f"holds {what}")


def make_function(code: Any, name: str, closure: Any) -> Any:
    """A function whose globals are the live user namespace."""
    return types.FunctionType(code, the_namespace(), name, None, closure)


def set_function_state(function: Any, state: Any) -> None:
    """Attributes of a function, when it can already be referred to."""
    attributes, own = state
    for name, value in attributes.items():
        setattr(function, name, value)
    vars(function).update(own)


def make_cell() -> types.CellType:
    """A variable shared by closures, still without a value."""
    return types.CellType()


def set_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    """Give the variable its value, if it had one."""
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


def import_module(name: str, submodules: list[str]) -> types.ModuleType:
    """Import as a cell would, so that the import policy has its say. Raises ImportError."""
    eval(_IMPORT, {"__builtins__": builtins, "name": name})
    for submodule in submodules:
        with contextlib.suppress(ImportError):
            eval(_IMPORT, {"__builtins__": builtins, "name": submodule})
    return sys.modules[name]


def the_shell() -> Any:
    """What `get_ipython()` returns."""
    return get_ipython()


def the_namespace() -> Any:
    """What `globals()` returns in a cell."""
    return the_shell().user_ns


def the_sentinel(name: str) -> Any:
    """A mark of the module `dataclasses`."""
    return getattr(dataclasses, name)


def the_stream(name: str) -> Any:
    """`sys.stdout` or `sys.stderr`."""
    return getattr(sys, name)


def _reduce_function(function: Any) -> Any:
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
    arguments = (function.__code__, function.__name__, function.__closure__)
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


def _kind_of(kind: type) -> str:
    """What the class stands for when it cannot leave the process, else an empty text."""
    for base in kind.__mro__:
        what = KINDS.get(f"{base.__module__}.{base.__qualname__}")
        if what is not None:
            return what
        if any(
            type(vars(base).get(name)) is types.FunctionType
            for name in ("__reduce__", "__reduce_ex__", "__getstate__")
        ):
            return ""  # it knows how to do better
    return ""


def _words_for(name: str) -> str:
    """The kind of an object that pickle refused by the name of its class."""
    endings = (words for ending, words in _ENDINGS if name.endswith(ending))
    return KINDS.get(name) or next(endings, f"a {name} object")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # the text of a user's exception may fail
        return ""


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 1] + "…"
