"""Names described without running user code."""

from __future__ import annotations

import array
import json
import math
from collections.abc import Iterator
from time import process_time
from types import ModuleType
from typing import Any, NoReturn, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_specs.restricted.variables import MAX_NAMES, PREVIEW_CHARS, NameTracker, describe


class Hostile:
    """Everything that could be called raises."""

    def _fail(self, *_: object) -> NoReturn:
        raise AssertionError("user code was run")

    __repr__ = __str__ = __len__ = __iter__ = __bool__ = _fail
    __getattr__ = __eq__ = _fail
    __hash__ = None  # type: ignore[assignment]

    @property
    def shape(self) -> NoReturn:
        """Claims to be an array."""
        raise AssertionError("user code was run")


class HostileMeta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError("user code was run")


class LoudList(list[int]):
    def __len__(self) -> int:
        raise AssertionError("user code was run")

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("user code was run")


def one(value: object) -> dict[str, Any]:
    """The description of a single variable."""
    (found,) = describe({"x": value})["variables"]
    return dict(found)


@pytest.mark.parametrize(
    ("value", "kind", "length", "preview"),
    [
        (1, "int", None, "1"),
        (1.5, "float", None, "1.5"),
        (math.nan, "float", None, "nan"),
        (None, "NoneType", None, "None"),
        (True, "bool", None, "True"),
        ("text\nmore", "str", 9, r"'text\nmore'"),
        (b"\x00", "bytes", 1, r"b'\x00'"),
        ([1, "a", None], "list", 3, "[1, 'a', None]"),
        ([], "list", 0, "[]"),
        ((1,), "tuple", 1, "(1,)"),
        (set(), "set", 0, "set()"),
        ({1}, "set", 1, "{1}"),
        (frozenset({1}), "frozenset", 1, "frozenset({1})"),
        ({"a": [1, [2, [3]]]}, "dict", 1, "{'a': [1, […]]}"),
        (range(10), "range", 10, "range(0, 10)"),
        (list(range(1000)), "list", 1000, "[0, 1, 2, 3, 4, 5, …]"),
        (math, "module", None, "<module math>"),
        (int, "class", None, "<class int>"),
        (array.array("b"), "array", None, "<array object>"),
        (len, "function", None, "<function object>"),
    ],
)
def test_known_values_are_shown(value: object, kind: str, length: int | None, preview: str) -> None:
    found = one(value)
    assert found["type"] == kind
    assert found["length"] == length
    assert found["preview"] == preview


def test_huge_integers_are_not_turned_into_digits() -> None:
    assert one(10**5000)["preview"] == "<int of 16610 bits>"


def test_functions_show_their_parameters() -> None:
    def function(a: int, b: int = 1, *rest: int, key: int, **more: int) -> None: ...
    def keyword_only(*, key: int) -> None: ...

    assert one(function)["preview"] == "function(a, b, *rest, key, **more)"
    assert one(keyword_only)["preview"] == "keyword_only(*, key)"


def test_no_code_of_the_user_is_run() -> None:
    hostile_class = HostileMeta("Evil", (), {})
    values: dict[str, object] = {
        "a": Hostile(),
        "b": [Hostile()],
        "c": {"k": Hostile()},
        "d": LoudList([1]),
        "e": hostile_class,
        "f": (Hostile(), (Hostile(), (Hostile(),))),
        "g": object.__new__(cast(type, hostile_class)),
    }
    reply = describe(values)
    json.dumps(reply)
    previews = [variable["preview"] for variable in reply["variables"]]
    assert previews[:4] == [
        "<Hostile object>",
        "[<Hostile object>]",
        "{'k': <Hostile object>}",
        "<LoudList object>",
    ]
    assert previews[4] == "<class Evil>"


def test_fake_libraries_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("numpy")
    fake.ndarray = Hostile  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "numpy", fake)
    found = one(Hostile())
    assert found["shape"] is None
    assert found["preview"] == "<Hostile object>"


def test_names_of_the_kernel_are_hidden() -> None:
    namespace = {"_": 1, "__x": 1, "_i1": "", "In": [], "exit": 1, "mine": 2}
    names = [found["name"] for found in describe(namespace, {"In", "exit"})["variables"]]
    assert names == ["mine"]


def test_size_of_the_answer_is_bounded() -> None:
    names = {f"name{i}": "x" * 1000 for i in range(MAX_NAMES + 7)}
    reply = describe(names)
    assert len(reply["variables"]) == MAX_NAMES
    assert reply["omitted"] == 7
    rest = describe(names, (), "", MAX_NAMES)
    assert (len(rest["variables"]), rest["omitted"]) == (7, 0)
    some = describe(names, (), "name5?", 3)
    assert [each["name"] for each in some["variables"]] == [f"name5{n}" for n in range(3, 10)]
    assert describe(names, (), "e50")["omitted"] == 0
    assert all(len(found["preview"]) <= PREVIEW_CHARS for found in reply["variables"])


def test_arrays_and_tables_show_shape_and_columns() -> None:
    numpy = pytest.importorskip("numpy")
    pandas = pytest.importorskip("pandas")
    found = one(numpy.zeros((3, 4)))
    assert (found["shape"], found["length"], found["size"]) == ([3, 4], 3, 96)
    assert found["preview"].startswith("float64: [0.0,")
    objects = numpy.empty(1, dtype=object)
    objects[0:1] = [Hostile] * 1
    assert one(objects)["preview"] == "object array"
    table = one(pandas.DataFrame({"a": [1, 2], "b": [3, 4]}))
    assert table["shape"] == [2, 2]
    assert table["preview"] == "columns: 'a', 'b'"
    assert one(pandas.Series([1, 2, 3]))["length"] == 3


def test_names_that_come_and_go_are_told_once() -> None:
    names, space = NameTracker(), dict[Any, Any]({"_i": "", "quit": 1})
    assert names.news(space, {"quit"}) == ([], [])
    space.update(_i1="a = 1", a=1, b=2)
    assert names.news(space, {"quit"}) == (["a", "b"], [])
    assert names.news(space, {"quit"}) == ([], [])
    space.update(_i2="", a=3)
    assert names.news(space, {"quit"}) == ([], [])
    del space["a"]
    space.update(_i3="", c=3)
    assert names.news(space, {"quit"}) == (["c"], ["a"])
    del space["c"]
    space["c"] = 4
    assert names.news(space, {"quit"}) == ([], [])
    space.clear()
    come, gone = names.news(space, {"quit"})
    assert (come, sorted(gone)) == ([], ["b", "c"])


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef_")), max_size=30))
def test_names_told_piece_by_piece_are_those_there_are(steps: list[tuple[bool, str]]) -> None:
    names, space, known = NameTracker(), dict[Any, Any](), set[str]()
    for number, (comes, name) in enumerate(steps):
        space[f"_i{number}"] = ""
        if comes:
            space[name] = number
        else:
            space.pop(name, None)
        if number % 3:
            come, gone = names.news(space, ())
            known = (known - set(gone)) | set(come)
            assert known == {key for key in space if not key.startswith("_")}


def test_odd_keys_and_long_names_are_not_told() -> None:
    names = NameTracker()
    assert names.news({1: 1, "x" * 500: 1, "ok": 1, None: 2}, ()) == (["ok"], [])


def test_a_look_at_names_costs_no_more_when_there_are_many() -> None:
    names, space = NameTracker(), {f"n{i}": i for i in range(100_000)}
    names.news(space, ())
    begin = process_time()
    for number in range(1000):
        space[f"m{number}"] = number
        names.news(space, ())
    assert process_time() - begin < 0.5  # a scan of all names would take seconds


def test_names_of_megabytes_are_counted_alone() -> None:
    found = describe({"x" * 20_000_000: 1, "y": 2})
    assert ([each["name"] for each in found["variables"]], found["omitted"]) == (["y"], 1)
