"""Functions that rebuild objects from a dump, and reductions of dict views and of classes.

Dumps name the functions `make_…`, `set_…`, `the_…` and `import_module`, so these stay in this
module.
"""

# torch is a package of the session, which the kernel may not have.
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-call, unused-ignore"

from __future__ import annotations

import builtins
import contextlib
import enum
import logging
import operator
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from kernel_specs.restricted.hibernation.arrays import attributes_of, set_attributes
from kernel_specs.restricted.originals import gc
from kernel_specs.restricted.policy.guard import CELL_PREFIX

_IMPORT = compile("__import__(name)", f"{CELL_PREFIX}hibernation>", "eval")
_MAPPINGS: tuple[dict[str, int], ...] = ({}, OrderedDict())
_VIEWS = ("keys", "values", "items")
_DICT_VIEWS: dict[type, str] = {
    type(getattr(made, name)()): name for made in _MAPPINGS for name in _VIEWS
}
_DICT_ITERATORS: dict[type, str] = {type(iter(getattr({}, name)())): name for name in _VIEWS}
_TRACKER_ID = cloudpickle.cloudpickle._get_or_create_tracker_id
_TRACKED = cloudpickle.cloudpickle._lookup_class_or_track
_AS_MEMBER: Callable[[Any], Any] = getattr(enum, "member", lambda value: value)
"""Marks what an enumeration would not make a member of, as a function; from Python 3.11 on."""
_OF_MEMBERS = frozenset(
    ("_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_", "name", "value")
)
"""Attributes of members that `enum` sets."""
_ENUM_HOOKS = ("__init_subclass__", "__init__")
_OF_OSERROR = ("errno", "strerror", "filename", "filename2")
_DATA: dict[type, Callable[[Any], Any] | None] = {
    int: int.__int__,
    str: str.__str__,
    float: float.__float__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    object: None,
}
"""Classes of data of which members of enumerations are rebuilt, and functions that read it."""
SCALARS = (str, int, float, bool, bytes, type(None))
_BUILT_HOOKS = ("__prepare__", "__new__", "__init__", "__call__")
CONTAINERS: dict[type, tuple[tuple[str, ...], Callable[..., Any], Callable[..., Any]]] = {
    OrderedDict: (("__setitem__", "items"), OrderedDict.items, OrderedDict.__setitem__),
    defaultdict: (("__setitem__", "items"), dict.items, dict.__setitem__),
    dict: (("__setitem__", "items"), dict.items, dict.__setitem__),
    list: (("append", "extend", "__iter__"), list.__iter__, list.append),
    deque: (("append", "extend", "__iter__"), deque.__iter__, deque.append),
}
"""Containers, the methods that pickle calls of their subclasses, and their own to read and add."""


def import_module(name: str, submodules: list[str]) -> types.ModuleType:
    """Import as a cell would: the import policy applies. Raises ImportError."""
    eval(_IMPORT, {"__builtins__": builtins, "name": name})
    for submodule in submodules:
        with contextlib.suppress(ImportError):
            eval(_IMPORT, {"__builtins__": builtins, "name": submodule})
    return sys.modules[name]


def the_attribute(module: str, name: str) -> Any:
    """Return the attribute `name` of a module. Raises ImportError, AttributeError."""
    return getattr(import_module(module, []), name)


def set_state_and_attributes(obj: Any, state: tuple[Any, dict[str, Any]]) -> None:
    """Set the state of an object's own reduction, then further attributes."""
    usual, more = state
    _set_state(obj, usual)
    set_attributes(obj, more)


def set_state_and_missing(obj: Any, state: tuple[Any, dict[str, Any]]) -> None:
    """Set the state of a library's reduction, then the attributes that this has not set."""
    usual, more = state
    _set_state(obj, usual)
    own = getattr(obj, "__dict__", {})
    set_attributes(obj, {name: value for name, value in more.items() if name not in own})


def set_instance_state(obj: Any, everything: tuple[Any, bool, type | None, Any]) -> None:
    """Add the items of an instance by its container's own methods, then set its state.

    With `shares` the state is its `__dict__` itself, not a copy.
    """
    state, shares, container, items = everything
    if container is not None:
        add = CONTAINERS[container][2]
        for item in items:
            add(obj, *(item if issubclass(container, dict) else (item,)))
    if not shares:
        _set_state(obj, state)
        return
    attributes, slots = state if type(state) is tuple else (state, None)
    if attributes is not None:
        object.__setattr__(obj, "__dict__", attributes)
    set_attributes(obj, slots or {})


def set_last_state(obj: Any, states: tuple[None, tuple[Any, bool, type | None, Any]]) -> None:
    """Set the last state of an instance; loading the first one has set that."""
    set_instance_state(obj, states[1])


def _set_state(obj: Any, state: Any) -> None:
    if state is None:
        return
    if getattr(type(obj), "__setstate__", None) is not None:
        obj.__setstate__(state)
    else:
        parts = state if isinstance(state, tuple) else (state,)
        set_attributes(obj, {k: v for part in parts for k, v in (part or {}).items()})


def set_enum_state(kind: Any, state: tuple[Any, Any, dict[str, dict[str, Any]]]) -> None:
    """Set the state of an enumeration, then the attributes of its members."""
    setter, usual, members = state
    setter(kind, usual)
    for name, attributes in members.items():
        vars(kind[name]).update(attributes)


def make_storage(data: Any) -> Any:
    """Return an untyped torch storage with a copy of `data`."""
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().untyped_storage()


def set_block_refs(block: Any, refs: Any) -> None:
    """Add a pandas block to the references of its memory, for copy-on-write."""
    block.refs = refs
    refs.add_reference(block)


def set_index_state(index: Any, state: tuple[Any, dict[str, Any], Any]) -> None:
    """Set the state of a pandas index, and add it to the references of its memory.

    A series over the same memory copies it before its first change.
    """
    usual, more, refs = state
    set_state_and_attributes(index, (usual, more))
    index._references = refs
    refs.add_index_reference(index)


def set_gradient(tensor: Any, gradient: Any) -> None:
    """Set a tensor's gradient."""
    tensor.grad = gradient


def make_typed_storage(storage: Any, dtype: Any) -> Any:
    """Return a typed torch storage over the same memory."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def make_array_type(element: type, length: int) -> type:
    """Return a ctypes array type."""
    made: type = operator.mul(element, length)
    return made


def reduce_ctypes(kind: Any) -> Any:
    """Return the reduction of a ctypes array type; None for other types."""
    if type(kind).__name__ != "PyCArrayType" or not isinstance(getattr(kind, "_length_", 0), int):
        return None
    element, length = getattr(kind, "_type_", None), getattr(kind, "_length_", 0)
    if element is None or kind.__name__ != f"{element.__name__}_Array_{length}":
        return None
    return make_array_type, (element, length)


def the_class_dict(kind: type) -> Any:
    """Return the live view of a class's attributes."""
    return vars(kind)


def reduce_class(kind: type, usual: Any) -> Any:
    """Return the reduction of a cell's class, with what cloudpickle loses.

    That is its qualified name, the order of its attributes, and those that repeat a base's. Left
    out are the descriptors of slots, which Python makes.
    """
    make, arguments, (attributes, slots), *items, setter = usual
    own = {
        name: value
        for name, value in _in_order(kind, attributes).items()
        if not (type(value) is types.MemberDescriptorType and value.__objclass__ is kind)
    }
    if not issubclass(kind, enum.Enum):
        return make_class, (make, _with_body(kind, arguments)), (own, slots), *items, setter
    members = kind._member_map_
    own = {name: value for name, value in own.items() if name not in members}
    attributes_of_members = {
        name: {key: value for key, value in vars(each).items() if key not in _OF_MEMBERS}
        for name, each in members.items()
        if each.name == name
    }
    state = (setter, (own, slots), attributes_of_members)
    return make_enum, _enum_arguments(kind), state, *items, set_enum_state


def _in_order(kind: type, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes in the order of the class, with those that are also a base's."""
    own = vars(kind)
    if not issubclass(kind, enum.Enum):
        inherited = {key: value for base in kind.__bases__ for key, value in vars(base).items()}
        repeated = {key for key, value in own.items() if inherited.get(key, own) is value}
        attributes = attributes | {key: own[key] for key in repeated if key[:2] != "__"}
    return {key: attributes[key] for key in [*own, *attributes] if key in attributes}


def _with_body(kind: type, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the qualified name, and with `__slots__` if it has them.

    cloudpickle sets `__slots__` too late to take effect. They are not added for a named tuple: its
    base has a metaclass that makes another class, with slots.
    """
    names = vars(kind).get("__slots__")
    meta, name, bases, body, *rest = arguments
    body = {**body, "__qualname__": kind.__qualname__}
    if isinstance(names, (str, tuple, list, dict)) and all(
        isinstance(kind, type(base)) for base in types.resolve_bases(bases)
    ):
        body["__slots__"] = (names,) if isinstance(names, str) else tuple(names)
    return meta, name, bases, body, *rest


def _enum_arguments(kind: Any) -> tuple[Any, ...]:
    """Return the arguments of `make_enum` for an enumeration."""
    about = (kind.__name__, kind.__qualname__, kind.__module__, kind.__bases__)
    is_plain = all(base in _DATA or not _is_of_c(base) for base in kind.__mro__)
    members = {
        name: (each._value_, *_data(each)) if is_plain else (each._value_,)
        for name, each in kind._member_map_.items()
    }
    options = {"boundary": kind._boundary_} if hasattr(kind, "_boundary_") else {}
    return type(kind), about, members, options, _TRACKER_ID(kind)


def _is_of_c(kind: type) -> bool:
    """Return True for a class with a `__new__` in C, which only its own instances can use."""
    return isinstance(vars(kind).get("__new__"), types.BuiltinFunctionType)


def _data(member: Any) -> tuple[Any, ...]:
    """Return what a member has of a builtin class that its enumeration derives from."""
    for base, read in _DATA.items():
        if read is not None and isinstance(member, base):
            return base, read(member)
    return (object,)


def make_enum(
    meta: Any,
    about: tuple[str, str, str, tuple[type, ...]],
    members: dict[str, tuple[Any, ...]],
    options: dict[str, Any],
    tracker: Any,
) -> Any:
    """Return an enumeration of a cell with its members, made without constructors of cells.

    A member has a value, and for a builtin class that it derives from, the arguments of its
    `__new__`. Its attributes are set later. `tracker` is cloudpickle's id of the class.
    """
    name, qualname, module, bases = about

    def make_member(cls: Any, key: Any) -> Any:
        value, base, *data = members[key]
        made = base.__new__(cls, *data)
        made._value_ = value
        return made

    hooks = {each: _ENUM_HOOKS for base in bases for each in base.__mro__}
    with _without({**hooks, **dict.fromkeys(meta.__mro__, _BUILT_HOOKS)}):
        body = meta.__prepare__(name, bases)
        body["__module__"], body["__qualname__"] = module, qualname
        if is_plain := any(len(each) > 1 for each in members.values()):
            body["__new__"] = make_member
        for key, (value, *_) in members.items():
            body[key] = _AS_MEMBER(key if is_plain else value)
        kind = meta.__new__(meta, name, bases, body, **options)
    if is_plain:
        type.__delattr__(kind, "__new_member__")
    return _TRACKED(tracker, kind)


def make_exception(kind: Any, arguments: tuple[Any, ...]) -> Any:
    """Return an exception made without its `__init__`, which may require other arguments."""
    return kind.__new__(kind, *arguments)


def set_exception_state(error: BaseException, state: tuple[Any, dict[str, Any]]) -> None:
    """Set an exception's state, then its chain and other members; skip those that are read-only."""
    usual, members = state
    if usual is not None:
        error.__setstate__(usual)
    for name, value in members.items():
        with contextlib.suppress(AttributeError, TypeError):
            setattr(error, name, value)


def set_logger_state(logger: logging.Logger, state: tuple[Any, ...]) -> None:
    """Set the level of a logger, `propagate`, `disabled`, and further attributes."""
    level, logger.propagate, logger.disabled, *more = state
    logger.setLevel(level)
    for attributes in more:  # none in a dump of an earlier version
        vars(logger).update(attributes)


def set_handler_state(handler: logging.Handler, state: dict[str, Any]) -> None:
    """Give a handler of logging a lock, set its attributes, and register it under its name."""
    logging.Handler.__init__(handler)
    vars(handler).update(state)
    handler.name = state["_name"]


def make_class(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return a cell's class, made without the hooks of its bases and metaclass.

    These have run once: what they wrote into variables is loaded with the variables.
    """
    meta, _, bases = arguments[:3]
    below = {
        each: ("__init_subclass__",) for base in bases for each in getattr(base, "__mro__", ())
    }
    with _without({**below, **dict.fromkeys(getattr(meta, "__mro__", ()), _BUILT_HOOKS)}):
        return make(*arguments)


@contextlib.contextmanager
def _without(hooks: dict[type, tuple[str, ...]]) -> Iterator[None]:
    """Remove methods, by name, from classes of cells in a context."""
    removed = []
    try:
        for owner, names in hooks.items():
            if owner.__module__ != "__main__":
                continue
            for name in names:
                if name in vars(owner):
                    removed.append((owner, name, vars(owner)[name]))
                    type.__delattr__(owner, name)
        yield
    finally:
        for owner, name, value in removed:
            type.__setattr__(owner, name, value)


def make_dict_view(mapping: Any, name: str) -> Any:
    """Return the view of a dict's keys, values or items."""
    return getattr(mapping, name)()


def _reduce_dict_view(view: Any) -> Any:
    (mapping,) = gc.get_referents(view)
    return make_dict_view, (mapping, _DICT_VIEWS[type(view)])


def make_dict_iterator(mapping: Any, name: str, count: int) -> Any:
    """Return an iterator over a dict's keys, values or items, advanced by `count`."""
    iterator = iter(getattr(mapping, name)())
    for _ in range(count):
        next(iterator)
    return iterator


def _reduce_dict_iterator(iterator: Any) -> Any:
    found = gc.get_referents(iterator)
    mapping = next((each for each in found if isinstance(each, dict)), None)
    left = operator.length_hint(iterator)
    if mapping is None or not left:  # it has ended, or its dict has changed its size
        return NotImplemented
    name = _DICT_ITERATORS[type(iterator)]
    return make_dict_iterator, (mapping, name, len(mapping) - left)


def set_iterator_state(iterator: Any, index: int) -> bool:
    """Advance an iterator over a list; return False if the list is not filled yet."""
    iterator.__setstate__(index)
    return bool(iterator.__reduce__()[2:] == (index,))


def _reduce_list_iterator(iterator: Any) -> Any:
    usual = iterator.__reduce__()
    return (*usual, None, None, set_iterator_state) if len(usual) == 3 else NotImplemented


def _reduce_proxy(proxy: Any) -> Any:
    (mapping,) = gc.get_referents(proxy)
    if "__module__" in mapping and (kind := _class_of(mapping)) is not None:
        return the_class_dict, (kind,)
    return types.MappingProxyType, (mapping,)


def _class_of(mapping: Any) -> type | None:
    """Return the class whose attributes are in this dict, or None."""
    for each in gc.get_referrers(mapping):
        if isinstance(each, type) and gc.get_referents(vars(each)) == [mapping]:
            return each
    return None


def is_held(obj: Any, name: str) -> bool:
    """Return True if the module of an object has it under `name` and is not `__main__`."""
    home = getattr(obj, "__module__", None)
    module = sys.modules.get(home) if type(home) is str and home != "__main__" else None
    return module is not None and getattr(module, name, None) is obj


def members_of(error: BaseException) -> dict[str, Any]:
    """Return an exception's chain, its members of builtin classes besides `args`, its slots."""
    found: dict[str, Any] = {
        name: value
        for base in type(error).__mro__
        if base.__module__ == builtins.__name__
        for name, member in vars(base).items()
        if type(member) is types.MemberDescriptorType
        and name != "__suppress_context__"
        and (value := getattr(error, name, None)) is not None
        and (name != "obj" or type(value) in SCALARS)
    }
    if isinstance(error, OSError):  # most of them are arguments
        made = OSError(*OSError.__reduce__(error)[1])  # type: ignore[misc]
        found = {
            name: getattr(error, name)
            for name in _OF_OSERROR
            if getattr(error, name) is not getattr(made, name)
        }
    for name in ("__context__", "__cause__"):
        if getattr(error, name) is not None:
            found[name] = getattr(error, name)
    if error.__suppress_context__:
        found["__suppress_context__"] = True
    below = next(base for base in type(error).__mro__ if base.__module__ == builtins.__name__)
    own = vars(error)
    return found | {k: v for k, v in attributes_of(error, below).items() if k not in own}


def has_own_arguments(kind: Any) -> bool:
    """Return True if an exception has the default `__reduce__` and a Python `__init__`."""
    usual = kind.__reduce__ is BaseException.__reduce__
    return usual and type(kind.__init__) is types.FunctionType


REDUCTIONS: dict[type, Callable[[Any], Any]] = {
    types.MappingProxyType: _reduce_proxy,
    **dict.fromkeys(_DICT_VIEWS, _reduce_dict_view),
    **dict.fromkeys(_DICT_ITERATORS, _reduce_dict_iterator),
    **dict.fromkeys((type(iter([])), type(reversed([]))), _reduce_list_iterator),
}
"""Functions that reduce the instances of a class."""
