"""Classes of cells come back with all that their pickling by cloudpickle loses."""

from __future__ import annotations

import enum
import io
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import cloudpickle.cloudpickle  # type: ignore[import-untyped]
import pytest

from kernel_specs.restricted.hibernation import homes, objects, pickles
from kernel_specs.restricted.hibernation.notebook_pickler import (
    Identities,
    NotebookPickler,
    NotebookUnpickler,
)

CELL: dict[str, Any] = {}
"""The namespace of cells."""


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch) -> None:
    CELL.clear()
    CELL.update(__name__="__main__")
    for module in (pickles, homes):
        monkeypatch.setattr(module, "get_ipython", lambda: SimpleNamespace(user_ns=CELL))


def loaded(code: str, names: str) -> Any:
    """The values of some names after code of a cell, as a process that lacks its classes has them.

    A single one for a single name.
    """
    exec(f"import enum, dataclasses\n{code}", CELL)
    file = io.BytesIO()
    pickler = NotebookPickler(
        file, lambda _buffer: True, namespace=CELL, identities=Identities(), ask=bool
    )
    pickler.dump([CELL[name] for name in names.split()])
    file.seek(0)
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()
    found = NotebookUnpickler(file, (), nans={}, classes=[], ask=bool).load()
    return found if len(found) > 1 else found[0]


@pytest.mark.parametrize("mixin", ["", "str, ", "Words, "])
def test_aliases_of_an_enumeration_stay(mixin: str) -> None:
    code = f"""
class Words(str): pass
class A({mixin}enum.Enum):
    X = "x"
    Y = "x"
    Z = "z"
    @classmethod
    def _missing_(cls, value): return cls.Z
"""
    kind = loaded(code, "A")
    assert list(kind.__members__) == ["X", "Y", "Z"]
    assert [each.name for each in kind] == ["X", "Z"]
    assert kind.Y is kind["Y"] is kind.X is kind("x")
    assert kind("unknown") is kind.Z


def test_flags_keep_names_of_combinations_and_of_zero() -> None:
    code = """
class Rights(enum.Flag):
    NONE = 0
    READ = 1
    WRITE = 2
    BOTH = 3
    LOOK = 1
"""
    kind = loaded(code, "Rights")
    assert list(kind.__members__) == ["NONE", "READ", "WRITE", "BOTH", "LOOK"]
    assert kind.READ | kind.WRITE is kind.BOTH
    assert (kind(0), kind.LOOK) == (kind.NONE, kind.READ)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="boundaries came with Python 3.11")
def test_a_flag_with_a_boundary_may_name_bits_of_no_member() -> None:
    code = """
class Bits(enum.Flag, boundary=enum.KEEP):
    LOW = 1
    MASK = 0xF
"""
    kind = loaded(code, "Bits")
    assert (kind.MASK.value, kind(8).value, list(kind.__members__)) == (15, 8, ["LOW", "MASK"])


def test_members_keep_their_own_attributes_and_documentation() -> None:
    code = """
class Op(enum.Enum):
    ADD = ("+", 1)
    NEG = ("-", 2)
    def __init__(self, sign, rank):
        self._sign, self.rank = sign, rank
        self.__doc__ = f"does {sign}"
"""
    kind = loaded(code, "Op")
    assert (kind.ADD._sign, kind.NEG.rank, kind.NEG.__doc__) == ("+", 2, "does -")
    assert kind(("+", 1)) is kind.ADD


def test_values_that_constructors_compute_are_computed_once() -> None:
    code = """
class Tenfold(enum.Enum):
    def __new__(cls, value):
        made = object.__new__(cls)
        made._value_ = value * 10
        return made
class A(Tenfold):
    M = 1
class Label(str, enum.Enum):
    def __new__(cls, text, number):
        made = str.__new__(cls, text)
        made._value_ = number
        return made
    ONE = ("one", 1)
@dataclasses.dataclass
class Creature:
    size: str
    legs: int
class Animal(Creature, enum.Enum):
    BEETLE = ("small", 6)
"""
    kind, label, animal = loaded(code, "A Label Animal")
    assert (kind.M.value, kind(10)) == (10, kind.M)
    assert (str.__str__(label.ONE), label.ONE.value, label(1)) == ("one", 1, label.ONE)
    assert (animal.BEETLE.legs, animal.BEETLE.size) == (6, "small")
    assert not hasattr(kind, "__new_member__") or "__new_member__" not in vars(kind)


def test_a_base_of_enumerations_is_not_told_of_those_that_are_loaded() -> None:
    code = """
seen = []
class Base(enum.Enum):
    def __init_subclass__(cls): seen.append(cls.__name__)
class A(Base):
    X = 1
"""
    kind, seen = loaded(code, "A seen")
    assert (seen, kind.X.value) == (["A"], 1)


def test_members_of_library_types_stay() -> None:
    code = """
import decimal
class Price(decimal.Decimal, enum.Enum):
    LOW = decimal.Decimal("1.5")
class Name(enum.Enum):
    F = enum.member(len) if hasattr(enum, "member") else 1
"""
    price, name = loaded(code, "Price Name")
    assert (price.LOW + 1, list(name.__members__)) == (2.5, ["F"])


def test_classes_keep_qualified_names_and_the_order_of_attributes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = """
class Outer:
    class Inner:
        user: int = 1
        age: int = 2
        bound: str
        def act(self): return 3
def make():
    class Local:
        __slots__ = ("z", "a")
    return Local
Local = make()
"""
    outer, local = loaded(code, "Outer Local")
    inner = outer.Inner
    assert (inner.__qualname__, local.__qualname__) == ("Outer.Inner", "make.<locals>.Local")
    assert [name for name in vars(inner) if name[0] != "_"] == ["user", "age", "act"]
    assert list(inner.__annotations__) == ["user", "age", "bound"]
    monkeypatch.setattr(sys.modules["__main__"], "Outer", outer, raising=False)
    assert type(pickle.loads(pickle.dumps(inner()))) is inner


def test_a_class_keeps_what_it_repeats_of_its_base() -> None:
    code = """
class Base:
    limit = 5
    def act(self): return 1
class Derived(Base):
    limit = Base.limit
    run = act = Base.act
"""
    base, derived = loaded(code, "Base Derived")
    base.limit, base.act = 6, None
    assert (derived.limit, derived().act(), derived().run()) == (5, 1, 1)


def test_named_tuples_and_typed_dicts_of_functions_come_back() -> None:
    code = """
import typing
def make():
    class Point(typing.NamedTuple):
        y: int
        x: int = 0
        def sum(self): return self.x + self.y
    class Row(typing.TypedDict):
        b: int
        a: str
    return Point, Row
Point, Row = make()
"""
    point, row = loaded(code, "Point Row")
    assert (point(1).sum(), point._fields) == (1, ("y", "x"))
    assert point.__qualname__.endswith("Point")
    assert (list(row.__annotations__), row.__qualname__) == (["b", "a"], "make.<locals>.Row")


def test_enumerations_of_earlier_dumps_still_load() -> None:
    kind: Any = cloudpickle.cloudpickle._make_skeleton_enum(
        (enum.Enum,), "A", "A", {"X": 1}, "__main__", None, None
    )
    state: Any = (cloudpickle.cloudpickle._class_setstate, ({"extra": 1}, {}), {"X": {"note": "n"}})
    objects.set_enum_state(kind, state)
    assert (kind.X.note, kind.extra) == ("n", 1)
