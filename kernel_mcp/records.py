"""A replacement of `dataclasses.dataclass` that builds classes in a third of the time.

The standard library writes and compiles source for up to six methods of each class. With some two
hundred classes that is an eighth of a server's start. Here only `__init__` is generated, and
the other methods are shared. `fields`, `replace`, `asdict`, patterns and pickle work as with the
standard library's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type | None = None, /, *, frozen: bool = False, slots: bool = False, eq: bool = True
    ) -> Any:
        """See `dataclasses.dataclass`. Raises TypeError for features that are not supported."""
        if cls is None:
            return lambda cls: _made(cls, frozen=frozen, slots=slots, eq=eq)
        return _made(cls, frozen=frozen, slots=slots, eq=eq)


_GIVEN_NONE = object()
"""Default of an argument for a field with a default factory."""


def _made(cls: type, *, frozen: bool, slots: bool, eq: bool) -> type:
    written = "__init__" in vars(cls), "__repr__" in vars(cls), "__eq__" in vars(cls)
    own_hash = "__hash__" in vars(cls)
    cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
    fields = dataclasses.fields(cls)
    if any(field.kw_only or not field.init for field in fields):
        raise TypeError(f"a field of {cls.__name__} takes the dataclass of the standard library")
    own_init, own_repr, own_eq = written
    if not own_init:
        _add(cls, "__init__", _init(cls, fields, frozen=frozen))
    if not own_repr:
        _add(cls, "__repr__", _repr)
    if frozen:
        _add(cls, "__setattr__", _no_assignment)
        _add(cls, "__delattr__", _no_deletion)
        if slots:
            _add(cls, "__getstate__", _state)
            _add(cls, "__setstate__", _set_state)
    if not eq or own_eq:
        return cls
    compared = [field.name for field in fields if field.compare]
    key: Callable[[Any], Any] = attrgetter(*compared) if compared else lambda _self: ()

    def equal(self: Any, other: object) -> bool:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    def hashed(self: Any) -> int:
        return hash((key(self),))

    _add(cls, "__eq__", equal)
    if not own_hash:
        _add(cls, "__hash__", hashed if frozen else None)
    return cls


def _add(cls: type, name: str, value: object) -> None:
    setattr(cls, name, value)


def _init(cls: type, fields: tuple[dataclasses.Field[Any], ...], *, frozen: bool) -> Any:
    names: dict[str, Any] = {"_given_none": _GIVEN_NONE, "_put": object.__setattr__}
    arguments, lines = [], []
    for field in fields:
        name, value = field.name, field.name
        argument = name
        if field.default is not dataclasses.MISSING:
            names[f"_default_{name}"] = field.default
            argument = f"{name}=_default_{name}"
        elif field.default_factory is not dataclasses.MISSING:
            names[f"_factory_{name}"] = field.default_factory
            argument = f"{name}=_given_none"
            value = f"_factory_{name}() if {name} is _given_none else {name}"
        arguments.append(argument)
        lines.append(f" _put(self, {name!r}, {value})" if frozen else f" self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()")
    source = f"def __init__({', '.join(['self', *arguments])}):\n" + ("\n".join(lines) or " pass")
    exec(source, names)  # names of fields are identifiers
    made = names["__init__"]
    made.__module__, made.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    made.__annotations__ = {field.name: field.type for field in fields} | {"return": None}
    return made


@recursive_repr()
def _repr(self: Any) -> str:
    shown = [
        f"{field.name}={getattr(self, field.name)!r}"
        for field in dataclasses.fields(self)
        if field.repr
    ]
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _no_assignment(_self: object, name: str, _value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _no_deletion(_self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
