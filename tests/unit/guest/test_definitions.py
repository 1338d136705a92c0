"""Classes and functions of cells, for `inspect` and for processes that are not forked."""

from __future__ import annotations

import collections
import inspect
import linecache
import runpy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kernel_specs.restricted import definitions

CELL = """class Kind:
    value = 1
class Kinds(Kind):
    pass
def double(number):
    return number * factor
"""


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A main module without a file, as kernels have, which has run a cell."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(inspect, "getfile", inspect.getfile)
    for number, text in enumerate((CELL.replace("1", "0"), CELL)):
        name = f"<ipython-input-{number}-0>"
        monkeypatch.setitem(
            linecache.cache, name, (len(text), None, text.splitlines(keepends=True), name)
        )
    exec(compile(CELL, name, "exec"), vars(module))
    vars(module)["factor"] = 2
    return module


def test_sources_of_the_latest_class_of_a_name_are_found(main: Any) -> None:
    definitions.find_sources()
    assert inspect.getsource(main.Kind) == "class Kind:\n    value = 1\n"
    assert inspect.getsource(main.Kinds) == "class Kinds(Kind):\n    pass\n"
    assert "class Counter" in inspect.getsource(collections.Counter)


def test_sources_are_those_of_the_class_itself(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    definitions.find_sources()
    first = "class Kind:\n    def first(self): pass\n"
    for number, text in enumerate((first, first.replace("first", "second"), "'\\nclass Kind:'")):
        name = f"<ipython-input-9{number}-0>"
        lines = text.replace("\\n", "\n").splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, name, (len(text), None, lines, name))
        exec(compile(text, name, "exec"), vars(main))
        if text is first:
            earlier = main.Kind
    assert inspect.getsource(earlier) == first
    assert "second" in inspect.getsource(main.Kind)


def test_classes_without_source_are_refused_as_before(main: Any) -> None:
    definitions.find_sources()
    with pytest.raises((OSError, TypeError)):
        inspect.getsource(type("Kin", (), {"__module__": "__main__"}))


def spawned(data: dict[str, Any]) -> Any:
    definitions.follow_spawn(made := SimpleNamespace(get_preparation_data=lambda _: data))
    return made.get_preparation_data("name")


def test_new_processes_import_what_cells_define(
    main: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    vars(main)["lock"] = __import__("threading").Lock()
    exec("def held(): return lock", vars(main))
    vars(main)["__file__"] = "notebook.ipynb"  # as code claims
    found = runpy.run_path(
        spawned({"init_main_from_path": "notebook.ipynb"})["init_main_from_path"]
    )
    assert found["double"](4) == 8
    assert found["Kinds"].value == 1
    assert "held" not in found
    with pytest.raises(AttributeError, match=r"held of the main .* pickle '_thread.lock"):
        found["__getattr__"]("held")()
    with pytest.raises(AttributeError, match=r"later of .* was defined after"):
        found["__getattr__"]("later")()


def test_new_processes_have_what_is_pickled_by_its_name(
    main: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = """
import functools, typing
Number = typing.NewType("Number", int)
@functools.lru_cache(maxsize=9)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
def used(n: Number): return fib(n)
"""
    exec(code, vars(main))
    found = runpy.run_path(spawned({})["init_main_from_path"])
    assert found["used"](20) == 6765
    assert found["fib"].cache_info().maxsize == 9
    assert found["fib"].__wrapped__.__globals__["fib"].cache_info().misses == 21


def test_programs_with_a_file_of_their_own_stay_as_they_are(
    main: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "a.py").touch()
    monkeypatch.setattr(sys, "argv", [str(file)])
    vars(main)["__file__"] = str(file)
    assert spawned({"init_main_from_path": "a.py"}) == {"init_main_from_path": "a.py"}


def test_what_cannot_be_written_changes_nothing(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    assert spawned({}) == {}
