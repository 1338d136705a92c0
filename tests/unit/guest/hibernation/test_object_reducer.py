"""Parts of objects that their own pickling loses come back, or the loss is reported."""

from __future__ import annotations

import array
import io
import logging
import os
import random
import re
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_specs.restricted.hibernation import object_reducer
from kernel_specs.restricted.hibernation.notebook_pickler import (
    Identities,
    NotebookPickler,
    NotebookUnpickler,
)
from kernel_specs.restricted.hibernation.object_reducer import held_by_modules, will_be_another


def passed_on(value: object) -> tuple[Any, list[str]]:
    """The value after a way through a pickle, and what has changed."""
    file = io.BytesIO()
    pickler = NotebookPickler(
        file, lambda _buffer: True, namespace={}, identities=Identities(), ask=bool
    )
    pickler.dump(value)
    file.seek(0)
    return NotebookUnpickler(file, (), nans={}, classes=[], ask=bool).load(), list(pickler.changes)


class Plain:
    """Has a `__dict__` and nothing else."""


def test_a_dict_that_is_also_that_of_an_object_stays_it() -> None:
    each = Plain()
    each.__dict__["x"] = 1
    (found, own), changes = passed_on([each, vars(each)])
    own["x"] = 2
    assert (found.x, changes) == (2, [])


def test_views_and_iterators_of_a_dict_follow_it() -> None:
    mapping = {"a": 1, "b": 2}
    iterator = iter(mapping)
    next(iterator)
    (found, keys, left), changes = passed_on([mapping, mapping.keys(), iterator])
    assert list(left) == ["b"]
    found["c"] = 3
    assert (list(keys), changes) == (["a", "b", "c"], [])


@pytest.mark.parametrize("way", [iter, reversed, enumerate])
def test_an_iterator_in_the_list_over_which_it_runs_goes_on(way: Any) -> None:
    listed: list[Any] = [1, 2, 3]
    iterator = way(listed)
    next(iterator)
    listed.append(iterator)
    (found, left), changes = passed_on([listed, iterator])
    assert (found[3] is left, changes) == (True, [])
    assert next(left) == next(iterator)


def test_a_reversed_iterator_over_a_dict_runs_over_a_copy() -> None:
    found, changes = passed_on(reversed({"a": 1, "b": 2}))
    assert (list(found), changes) == (["b", "a"], [object_reducer.OVER_A_COPY])


class Keyed:
    """Is found by its key, which it has from its class until its own is set."""

    key = 0

    def __init__(self, key: int) -> None:
        self.seen: set[Keyed] = set()
        self.key = key

    def __hash__(self) -> int:
        return self.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and self.key == other.key


def test_an_object_is_found_in_a_set_of_its_own() -> None:
    made = Keyed(5)
    made.seen.add(made)
    found, changes = passed_on(made)
    assert (found in found.seen, found.key, changes) == (True, 5, [])


def test_a_system_error_keeps_what_was_set() -> None:
    error = FileNotFoundError(2, "no", "file")
    error.errno, error.filename, error.filename2 = 5, None, "other"
    found, _ = passed_on(error)
    assert (found.errno, found.strerror, found.filename) == (5, "no", None)
    assert found.filename2 == "other"


class OwnArguments(Exception):
    """Has arguments that `BaseException` does not know."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code = code


def test_an_exception_keeps_its_cause_and_is_made_without_its_init() -> None:
    try:
        raise OwnArguments(3, where="here") from KeyError("cause")
    except OwnArguments as error:
        found, changes = passed_on(error)
    assert (found.code, str(found), found.__cause__.args) == (3, "3 at here", ("cause",))
    assert changes == [object_reducer.NO_TRACEBACK]


def test_a_failed_look_up_keeps_its_names_and_a_plain_object() -> None:
    found, changes = passed_on([AttributeError("a", name="n", obj=5), NameError("b", name="m")])
    assert ([found[0].name, found[0].obj, found[1].name], changes) == (["n", 5, "m"], [])
    found, changes = passed_on(AttributeError("a", name="n", obj=Plain()))
    assert (found.name, found.obj, changes) == ("n", None, [object_reducer.NO_OBJECT])


class Counting(OrderedDict[str, int]):
    """Counts what is set."""

    sets = 0

    def __setitem__(self, key: str, value: int) -> None:
        type(self).sets += 1
        super().__setitem__(key, value)


def test_methods_of_a_container_do_not_run_when_it_is_loaded() -> None:
    made = Counting(a=1)
    before = Counting.sets
    found, _ = passed_on(made)
    assert (found, Counting.sets) == (made, before)


def test_a_value_that_a_module_holds_too_will_be_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    value = [1]
    monkeypatch.setattr(object_reducer, "held", value, raising=False)
    assert will_be_another(value)
    reasons = held_by_modules({"mine": value, "other": [1]}, {})
    assert reasons == {"mine": f"a copy now: the module {object_reducer.__name__} has the other"}


class Slotted:
    """Has slots and nothing else."""

    __slots__ = ("a",)


@pytest.mark.parametrize(
    "value",
    [
        *(object(), OrderedDict(), defaultdict(list), deque(), Counter(), array.array("i")),
        *(Slotted(), SimpleNamespace(), partial(print), ValueError("x"), (1, [2]), {"a": 1}),
        *(frozenset([object()]), UserDict(), Plain(), Counting()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_code_can_tell_from_its_copy_will_be_another(value: object) -> None:
    assert will_be_another(value)


@pytest.mark.parametrize(
    "value",
    [
        *(1, "a", None, ..., (1, "a"), frozenset([1]), print, len, Plain, int, Any, random.randint),
        *(os.environ, sys.path, sys.modules, re.compile("a"), re.I, Decimal(1), random.random),
        *(random._inst, logging.getLogger("a")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_equal_or_found_by_name_will_not_be_another(value: object) -> None:
    assert not will_be_another(value)
