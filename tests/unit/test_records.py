"""`kernel_mcp.records.dataclass` beside that of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any

import pytest

from kernel_mcp import records

FLAGS = ("plain", "frozen", "slots", "frozen slots")


def made(decorate: Callable[..., Any], flags: str) -> type[Any]:
    """The same class by either decorator."""

    class Place:
        """Where something is."""

        path: str
        line: int = 1
        tags: list[str] = field(default_factory=list)
        secret: str = field(default="", repr=False, compare=False)

        def __post_init__(self) -> None:
            if self.line < 0:
                raise ValueError("no such line")

        @property
        def words(self) -> str:
            return f"{self.path}:{self.line}"

    Place.__annotations__ = {"path": str, "line": int, "tags": list[str], "secret": str}
    given = {flag: True for flag in flags.split() if flag != "plain"}
    return decorate(**given)(Place)  # type: ignore[no-any-return]


@pytest.fixture(params=FLAGS)
def pair(request: pytest.FixtureRequest) -> tuple[type[Any], type[Any]]:
    """The class made here, and the one of the standard library."""
    return made(records.dataclass, request.param), made(dataclasses.dataclass, request.param)


def test_instances_are_made_shown_compared_and_replaced_alike(
    pair: tuple[type[Any], type[Any]],
) -> None:
    def seen(cls: type[Any]) -> list[object]:
        one, same, other = cls("a", 2, secret="s"), cls("a", line=2), cls("b", tags=["x"])
        return [
            repr(one),
            one == same,
            one != other,
            one == ("a", 2, [], "s"),
            dataclasses.asdict(other),
            repr(dataclasses.replace(one, path="c")),
            [each.name for each in dataclasses.fields(cls)],
            cls.__match_args__,
            one.tags is not same.tags,
            one.words,
            hasattr(one, "__dict__"),
            str(inspect.signature(cls)).replace("<factory>", "").partition("tags")[0],
        ]

    assert seen(pair[0]) == seen(pair[1])


def test_copies_and_pickles_are_equal(pair: tuple[type[Any], type[Any]]) -> None:
    one = pair[0]("a", 2, ["x"], secret="s")
    for twin in (copy.copy(one), copy.deepcopy(one)):
        assert twin == one
        assert twin.secret == "s"


def test_what_cannot_be_hashed_by_one_cannot_by_the_other(
    pair: tuple[type[Any], type[Any]],
) -> None:
    def hashable(cls: type[Any]) -> bool:
        try:
            return hash(cls("a", tags=())) == hash(cls("a", tags=(), secret="other"))
        except TypeError:
            return False

    assert hashable(pair[0]) == hashable(pair[1])


@pytest.mark.parametrize("flags", ["frozen", "frozen slots"])
def test_nothing_is_assigned_to_what_is_frozen(flags: str) -> None:
    one = made(records.dataclass, flags)("a")
    with pytest.raises(dataclasses.FrozenInstanceError, match="path"):
        one.path = "b"
    with pytest.raises(dataclasses.FrozenInstanceError, match="path"):
        del one.path
    assert one.path == "a"


def test_wrong_arguments_are_refused(pair: tuple[type[Any], type[Any]]) -> None:
    for cls in pair:
        with pytest.raises(TypeError, match="path"):
            cls()
        with pytest.raises(TypeError, match="nonsense"):
            cls("a", nonsense=1)
        with pytest.raises(ValueError, match="no such line"):
            cls("a", -1)


@records.dataclass(frozen=True, slots=True)
class Base:
    """Has one field."""

    one: int


@records.dataclass(frozen=True, slots=True)
class Derived(Base):
    """Has one more, and methods of its own."""

    two: int = 2

    def __repr__(self) -> str:
        return "derived"

    def __hash__(self) -> int:
        return 7


def test_a_class_takes_the_fields_of_its_base_and_keeps_its_own_methods() -> None:
    found = Derived(1)
    assert (found.one, found.two, repr(found), hash(found)) == (1, 2, "derived", 7)
    assert found == Derived(1, 2) != Derived(1, 3)
    assert found != Base(1)
    assert pickle.loads(pickle.dumps(found)) == found


def test_identity_counts_where_no_comparison_is_wanted() -> None:
    @records.dataclass(frozen=True, slots=True, eq=False)
    class Handle:
        number: int

    one, other = Handle(1), Handle(1)
    assert one != other
    assert len({one, other}) == 2


def test_a_repr_that_leads_back_to_itself_ends() -> None:
    @records.dataclass
    class Node:
        next: Any = None

    node = Node()
    node.next = node
    assert "..." in repr(node)


def test_a_kind_of_field_that_is_left_out_is_refused() -> None:
    with pytest.raises(TypeError, match="of the standard library"):

        @records.dataclass
        class _Odd:
            number: int = field(default=1, init=False)
