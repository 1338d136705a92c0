"""Reduce objects whose own pickling loses a part: that part is added, or reported."""

# torch is a package of the session, which the kernel may not have.
# mypy: disable-error-code="import-not-found, unused-ignore"

from __future__ import annotations

import array
import contextlib
import copyreg
import ctypes
import logging
import pickle
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any

from kernel_specs.restricted.console.streams import standard_name
from kernel_specs.restricted.hibernation import classes, objects
from kernel_specs.restricted.hibernation.arrays import attributes_of, set_attributes
from kernel_specs.restricted.hibernation.attempt_limits import CannotKeepError, module_of
from kernel_specs.restricted.hibernation.memory_ranges import COPIED, MemoryRanges, of_picture

NO_TRACEBACK = "an exception without its traceback"
NO_OBJECT = "an exception without its `obj`"
NO_HANDLERS = "a logger without its handlers and filters"
NO_OBSERVERS = "an object of traitlets without the observers that code has added"
NO_GRAPH = "a tensor without the graph of its gradient"
ALIASED = "its __dict__ is a copy in other variables now"
OVER_A_COPY = "it iterates over a copy now"
EMPTY_CACHE = "its cache starts empty"
PLAIN_SCALAR = "a plain scalar of numpy now"
SOME_GLOBALS = "has only those of its globals that functions name"
BY_NAME = "an object that is pickled by its name"
MODULES = {"duckdb": "its default connection starts empty"}
"""Modules with state that users regard as theirs, and how it changes by loading."""
_COPYING_ITERATORS: tuple[type, ...] = (
    type(iter(OrderedDict())),
    *map(type, (reversed({}), reversed({}.values()), reversed({}.items()))),
)
_LOGGER = frozenset(vars(logging.getLogger(__name__)))
"""The attributes of every logger."""
BY_IDENTITY: tuple[Any, ...] = (None, object.__hash__)
"""Values of `__hash__` of classes whose objects are compared by identity."""
_WITH_IDENTITY = (
    *(list, dict, set, bytearray, deque, array.array, partial, types.SimpleNamespace),
    BaseException,
)
"""Classes of objects that code can tell from their copies, with classes derived from them."""
_MOST_ELEMENTS = 1000
"""Elements of a tuple among which such objects are searched."""
_DICT_OF = vars(types.ModuleType)["__dict__"].__get__
"""`vars` of a module, even if its class overrides `__dict__`."""
_PLAIN = (*objects.SCALARS, list, tuple, dict, set, frozenset)
"""Types of attributes that are saved although a library's own pickling drops them."""


class _DictProbe:
    """An object with a `__dict__` that nothing else references."""


def _references(obj: Any) -> int:
    return sys.getrefcount(obj.__dict__)


_ALONE = _references(_DictProbe())
"""sys.getrefcount of such a `__dict__`, in this version of Python."""


class Early:
    """Pickles attributes that are set before further state of their object is loaded."""

    def __init__(self, obj: Any, attributes: dict[str, Any]) -> None:
        self._made = (obj, attributes)

    def __reduce__(self) -> Any:
        return set_attributes, self._made


class ObjectReducer:
    """Reduces objects by kind; `changed` gets a reason for each that will not be equal."""

    def __init__(self, changed: Callable[[str], None], memory: MemoryRanges, ways: Ways) -> None:
        """`memory` and `ways` are those of the whole dump."""
        self._changed = changed
        self._memory = memory
        self._ways = ways
        self.special: dict[type, Callable[[Any], Any]] = {
            logging.Logger: self._logger,
            logging.RootLogger: self._logger,
            **objects.REDUCTIONS,
            **dict.fromkeys(_COPYING_ITERATORS, self._copying_iterator),
        }

    def reduce(self, obj: Any) -> Any:
        """Return a reduction with the parts that its own loses; NotImplemented if none are lost."""
        kind = type(obj)
        if (known := self._ways.get(kind)) is None:
            known = self._ways[kind] = (_held_by_module(kind), _way(kind))
        names, way = known
        if names and (name := names.get(id(obj))) is not None:
            return objects.the_attribute, (kind.__module__, name)
        return NotImplemented if way is None else way(self, obj)

    def _owner(self, obj: Any) -> Any:
        self._memory.add_owner(obj)
        return NotImplemented

    def _instance(self, obj: Any, container: type | None = None, is_guarded: bool = False) -> Any:
        """Reduce an instance with a shared `__dict__`, and so that loading bypasses its methods.

        Items of a `container` are read and added by that type's own methods. Pickle would use the
        class's `__setattr__` for slots: `is_guarded` if it has one.
        """
        shares = type(obj).__dictoffset__ != 0 and self._has_shared_dict(obj)
        if container is None and not shares and not is_guarded:
            return NotImplemented
        usual = obj.__reduce_ex__(5)
        if isinstance(usual, str) or len(usual) > 5:
            return NotImplemented
        function, arguments, state, *items = (*usual, None, None, None)[:5]
        own = None
        if container is not None:
            own, items = list(objects.CONTAINERS[container][1](obj)), [None, None]
            state = state or attributes_of(obj, container)
        everything = (state, shares and classes.has_usual_dict(type(obj)), container, own)
        return function, arguments, everything, *items, objects.set_instance_state

    def _hashed(self, obj: Any, is_guarded: bool) -> Any:
        """Reduce an instance so that attributes which its `__hash__` may use are set first.

        Another attribute may be a set or dict with the instance in it.
        """
        attributes = attributes_of(obj)
        late = (*BY_IDENTITY, frozenset.__hash__)
        early = {k: v for k, v in attributes.items() if type(v).__hash__ not in late}
        if len(early) == len(attributes):
            return self._instance(obj, is_guarded=is_guarded)
        usual = self._instance(obj, is_guarded=True)
        if usual is NotImplemented:
            return NotImplemented
        function, arguments, state, *items, _ = usual
        return function, arguments, (Early(obj, early), state), *items, objects.set_last_state

    def _has_shared_dict(self, obj: Any) -> bool:
        if sys.getrefcount(obj.__dict__) > _ALONE:
            return not self._memory.is_alone(obj)
        self._memory.add_alone(obj)
        return False

    def _ctypes(self, obj: Any) -> Any:
        """Report ctypes objects that are parts, or lie in the memory, of others, as copies."""
        kept = obj._objects
        lent = kept.values() if isinstance(kept, dict) else (kept,)
        if obj._b_base_ is not None or any(type(each) is memoryview for each in lent):
            self._changed(COPIED)
        self._memory.add(obj, ctypes.addressof(obj), ctypes.sizeof(obj))
        return NotImplemented

    def _array(self, numbers: array.array[Any]) -> Any:
        begin, count = numbers.buffer_info()
        self._memory.add(numbers, begin, count * numbers.itemsize)
        return self._with_attributes(numbers, array.array)

    def _arrow_buffer(self, buffer: Any) -> Any:
        self._memory.add(buffer, buffer.address, buffer.size, writable=False)
        return NotImplemented

    def _picture(self, picture: Any) -> Any:
        """Note the pixels of a picture of PIL; it cannot write to those of another object."""
        if picture.readonly:
            if (pixels := of_picture(picture)) is None:
                self._changed(COPIED)
            else:
                self._memory.add(picture, *pixels, writable=False)
        return self._with_attributes(picture, type(picture))

    def _polars(self, obj: Any) -> Any:
        """Report columns of polars, which lie in the memory of an array, as copies."""
        for column in obj.iter_columns() if hasattr(obj, "iter_columns") else (obj,):
            with contextlib.suppress(RuntimeError):  # it cannot be an array without a copy
                numbers = column.to_numpy(allow_copy=False)
                begin = numbers.__array_interface__["data"][0]
                self._memory.add(column, begin, numbers.nbytes, writable=False)
        return self._with_attributes(obj, type(obj))

    def _kd_tree(self, tree: Any) -> Any:
        """Reduce a tree of scipy with its own points, which may be an array of the user's."""
        function, arguments, state, *more = tree.__reduce_ex__(5)
        return function, arguments, (state[0], tree.data, *state[2:]), *more

    def _block(self, block: Any) -> Any:
        """Reduce a pandas block with its own memory, which pandas copies if it has gaps.

        Its `refs` are kept: they list other blocks on this memory, for copy-on-write.
        """
        usual = block.__reduce_ex__(5)
        refs = getattr(block, "refs", None)  # from pandas 2.0 on
        if refs is None or len(usual) != 2 or type(usual[1][0]) is not type(block.values):
            return NotImplemented
        function, (_, *others) = usual
        return function, (block.values, *others), refs, None, None, objects.set_block_refs

    def _block_refs(self, refs: Any) -> Any:
        return type(refs), ()

    def _single_block(self, manager: Any) -> Any:
        """Reduce the block manager of a series, which pandas pickles without its block."""
        return type(manager), (manager.blocks[0], manager.axes[0])

    def _tensor(self, tensor: Any) -> Any:
        """Reduce a torch tensor with the gradient that it holds; report the loss of a graph."""
        if tensor.grad_fn is not None:
            self._changed(NO_GRAPH)
        elif tensor.is_leaf and tensor.grad is not None:
            usual = tensor.__reduce_ex__(5)
            if len(usual) == 2:
                return *usual, tensor.grad, None, None, objects.set_gradient
        return NotImplemented

    def _untyped_storage(self, storage: Any) -> Any:
        import torch

        if storage.device.type != "cpu" or not storage.nbytes():
            return NotImplemented
        self._memory.add(storage, storage.data_ptr(), storage.nbytes())
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        return objects.make_storage, (self._memory.lend(pickle.PickleBuffer(flat.numpy())),)

    def _typed_storage(self, storage: Any) -> Any:
        if storage.device.type != "cpu" or not storage.nbytes():
            return NotImplemented
        return objects.make_typed_storage, (storage._untyped_storage, storage.dtype)

    def _callbacks(self, registry: Any) -> Any:
        """Reduce a registry with the callbacks that matplotlib's own pickling drops."""
        state = registry.__getstate__()
        state["callbacks"] = {
            signal: {number: call for number, proxy in calls.items() if (call := proxy())}
            for signal, calls in registry.callbacks.items()
        }
        return copyreg.__newobj__, (type(registry),), state  # type: ignore[attr-defined]

    def _with_attributes(self, obj: Any, below: type) -> Any:
        if below is types.SimpleNamespace and self._has_shared_dict(obj):
            self._changed(ALIASED)
        if below.__name__ == "HasTraits" and _has_observers(obj):
            self._changed(NO_OBSERVERS)
        attributes = attributes_of(obj, below)
        top = module_of(below).partition(".")[0]
        if is_foreign := top not in (*sys.stdlib_module_names, "numpy", "pandas"):
            attributes = {k: v for k, v in attributes.items() if _is_plain_attribute(k, v)}
        elif not type(obj).__flags__ & classes.HEAP_TYPE:
            self._memory.add_owner(obj)
        refs = None
        if below.__name__ in classes.FRAMES:
            refs = attributes.get("_references")  # from pandas 2.0 on
            attributes = {k: v for k, v in attributes.items() if not k.startswith("_")}  # no caches
        if module_of(below).startswith("numpy") and type(obj).__flags__ & classes.HEAP_TYPE:
            self._changed(PLAIN_SCALAR)
            return NotImplemented
        usual = obj.__reduce_ex__(5) if attributes or refs is not None else ""
        if isinstance(usual, str) or len(usual) > 5:
            return NotImplemented
        function, arguments, state, *items = (*usual, None, None, None, None)[:5]
        if refs is not None:
            return function, arguments, (state, attributes, refs), *items, objects.set_index_state
        known = state if isinstance(state, dict) else {}
        if isinstance(state, tuple) and len(state) == 2:
            known = {**(state[0] or {}), **(state[1] or {})} if type(state[1]) is dict else {}
        more = {name: value for name, value in attributes.items() if name not in known}
        if not more:
            return usual if is_foreign else NotImplemented
        setter = objects.set_state_and_missing if is_foreign else objects.set_state_and_attributes
        return function, arguments, (state, more), *items, setter

    def _exception(self, error: BaseException) -> Any:
        kind = type(error)
        if error.__traceback__ is not None:
            self._changed(NO_TRACEBACK)
        if self._has_shared_dict(error):
            self._changed(ALIASED)
        if own := objects.has_own_arguments(kind):
            usual: Any = (objects.make_exception, (kind, error.args), vars(error) or None)
        else:
            usual = error.__reduce_ex__(5)
        members = objects.members_of(error)
        if len(usual) == 2 and classes.is_of_library(kind):
            members |= {k: v for k, v in vars(error).items() if _is_plain_attribute(k, v)}
        if isinstance(error, AttributeError) and None is not error.obj is not members.get("obj"):
            self._changed(NO_OBJECT)
        if isinstance(usual, str) or (not members and not own):
            return NotImplemented
        function, arguments, state = (*usual, None)[:3]
        return function, arguments, (state, members), None, None, objects.set_exception_state

    def _by_value(self, obj: Any) -> Any:
        """Reduce by attributes an object that its class pickles by name and no module holds.

        Another kernel has none of the notebook's names before they are loaded. Raises
        CannotKeepError if that is impossible.
        """
        usual = obj.__reduce_ex__(5)
        if not isinstance(usual, str):
            return usual
        if objects.is_held(obj, usual):
            return NotImplemented
        if any(not base.__flags__ & classes.HEAP_TYPE for base in type(obj).__mro__[:-1]):
            raise CannotKeepError(BY_NAME, obj)
        made = copyreg.__newobj__, (type(obj),)  # type: ignore[attr-defined]
        return *made, attributes_of(obj) or None, None, None, set_attributes

    def _copying_iterator(self, iterator: Any) -> Any:
        """Report that an iterator over a dict is pickled with a copy of its items."""
        usual = iterator.__reduce__()
        if usual[1] != ([],):
            self._changed(OVER_A_COPY)
        return usual

    def _logger(self, logger: logging.Logger) -> Any:
        if logger.handlers or logger.filters:
            self._changed(NO_HANDLERS)
        more = {name: value for name, value in vars(logger).items() if name not in _LOGGER}
        state = (logger.level, logger.propagate, logger.disabled, more)
        name = None if logger is logger.root else logger.name
        return logging.getLogger, (name,), state, None, None, objects.set_logger_state

    def _handler(self, handler: logging.Handler) -> Any:
        """Reduce a handler of logging without its lock: the loaded one gets its own."""
        usual: Any = handler.__reduce_ex__(5)
        function, arguments, state = usual[:3]
        if type(state) is not dict:  # it has slots, too
            return NotImplemented
        state = {name: value for name, value in state.items() if name != "lock"}
        return function, arguments, state, None, None, objects.set_handler_state


Way = Callable[[ObjectReducer, Any], Any]
Ways = dict[type, tuple[dict[int, str], Way | None]]
"""By class: names by id of instances that its module holds, and the method that reduces others."""


def _way(kind: type) -> Way | None:
    """Return the method that reduces instances of a class; None to leave them to pickle."""
    if issubclass(kind, BaseException):
        return ObjectReducer._exception
    if (own := _FOREIGN.get((module_of(kind), kind.__name__))) is not None:
        return own
    names = {f"{module_of(base)}.{base.__name__}" for base in kind.__mro__}
    if "logging.Handler" in names and classes.has_usual_state(kind):
        return ObjectReducer._handler
    if "_ctypes._CData" in names:
        return ObjectReducer._ctypes
    if "array.array" in names and classes.reducing_base(kind) is array.array:
        return ObjectReducer._array
    if "torch.Tensor" in names:
        return ObjectReducer._tensor
    if "pandas._libs.internals.Block" in names:
        return ObjectReducer._block
    if (container := classes.overridden(kind)) is not None:
        return partial(ObjectReducer._instance, container=container)
    if (below := classes.reducing_base(kind)) is not None:
        return partial(ObjectReducer._with_attributes, below=below)
    if classes.has_usual_state(kind):
        is_guarded = classes.is_python(classes.attribute(kind, "__setattr__"))
        if classes.is_python(classes.attribute(kind, "__hash__")):
            return partial(ObjectReducer._hashed, is_guarded=is_guarded)
        if is_guarded:
            return partial(ObjectReducer._instance, is_guarded=True)
    if classes.has_usual_dict(kind):
        return ObjectReducer._instance
    if classes.reduces_itself(kind):
        return ObjectReducer._by_value
    return ObjectReducer._owner if not kind.__flags__ & classes.HEAP_TYPE else None


def _held_by_module(kind: type) -> dict[int, str]:
    """Return the instances of a library class that its module holds: name by id."""
    module = sys.modules.get(module_of(kind))
    found = dict(vars(module)) if module is not None and classes.is_library(module) else {}
    return {id(each): name for name, each in found.items() if type(each) is kind}


def held_by_modules(values: Mapping[str, Any], namespace: dict[str, Any]) -> dict[str, str]:
    """Return the values that other modules hold, too, and that loading copies: reason by name.

    The reason names a module without a leading underscore if there is one.
    """
    names: dict[int, list[str]] = {}
    for name, value in values.items():
        names.setdefault(id(value), []).append(name)
    modules = {name: each for name, each in sys.modules.copy().items() if type(name) is str}
    found: dict[str, str] = {}
    for module in sorted(modules, key=lambda name: name[:1] == "_") if names else ():
        if not issubclass(type(modules[module]), types.ModuleType):
            continue
        inside = _DICT_OF(modules[module])
        for value in list(inside.values()) if inside is not namespace else ():
            for name in names.get(id(value), ()):
                found.setdefault(name, f"a copy now: the module {module} has the other")
    return found


def will_be_another(value: Any, depth: int = 2) -> bool:
    """Return True if code can tell a value from its copy, by identity or by its hash.

    Values that are pickled by reference have no copy. Tuples and frozensets count if they contain
    such a value, at most `depth` levels deep.
    """
    kind = type(value)
    if kind in (tuple, frozenset):
        some = islice(value, _MOST_ELEMENTS) if depth else ()
        return any(will_be_another(each, depth - 1) for each in some)
    if kind is types.FunctionType or issubclass(kind, type) or standard_name(value):
        return False
    if kind is not object and not issubclass(kind, _WITH_IDENTITY):
        if kind.__hash__ not in BY_IDENTITY:
            return False
        if not classes.has_usual_dict(kind) and (
            classes.is_of_library(kind) or classes.reduces_itself(kind)
        ):
            return False
    is_in_sys = any(value is each for each in vars(sys).values())
    return not is_in_sys and id(value) not in _held_by_module(kind)


def _has_observers(obj: Any) -> bool:
    """Return True if an object of traitlets has observers besides the methods of its class."""
    of_class = sys.modules["traitlets"].EventHandler
    kinds = [each for of_name in obj._trait_notifiers.values() for each in of_name.values()]
    return any(not isinstance(each, of_class) for observers in kinds for each in observers)


def _is_plain_attribute(name: str, value: object) -> bool:
    """Return True if code of cells may have set this attribute."""
    kind = type(value)
    return not name.startswith("_") and (kind in _PLAIN or module_of(kind) == "__main__")


_FOREIGN: dict[tuple[str, str], Way] = {
    ("pyarrow.lib", "Buffer"): ObjectReducer._arrow_buffer,
    ("pyarrow.lib", "ResizableBuffer"): ObjectReducer._arrow_buffer,
    ("torch.storage", "UntypedStorage"): ObjectReducer._untyped_storage,
    ("torch.storage", "TypedStorage"): ObjectReducer._typed_storage,
    ("pandas._libs.internals", "BlockValuesRefs"): ObjectReducer._block_refs,
    ("pandas.core.internals.managers", "SingleBlockManager"): ObjectReducer._single_block,
    ("polars.dataframe.frame", "DataFrame"): ObjectReducer._polars,
    ("polars.series.series", "Series"): ObjectReducer._polars,
    ("scipy.spatial._ckdtree", "cKDTree"): ObjectReducer._kd_tree,
    ("scipy.spatial._kdtree", "KDTree"): ObjectReducer._kd_tree,
    ("PIL.Image", "Image"): ObjectReducer._picture,
    ("matplotlib.cbook", "CallbackRegistry"): ObjectReducer._callbacks,
}
"""Methods for classes of libraries, by module and name, whose own pickling copies or drops data."""
