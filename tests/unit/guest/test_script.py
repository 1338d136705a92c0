"""How a script ends, and the names inside Python that this relies on."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing.util
import threading
import weakref

import pytest

from kernel_specs.restricted import script


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (threading, ("_threading_atexits",)),
        (asyncio, ("_get_running_loop",)),
        (multiprocessing.util, ("_exit_function",)),
        (weakref.finalize, ("_registry", "atexit")),
    ],
)
def test_names_inside_python_exist(owner: object, names: tuple[str, ...]) -> None:
    assert [name for name in names if not hasattr(owner, name)] == []


def test_only_what_is_registered_meanwhile_is_called_last_one_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = atexit.register, atexit.unregister
    said: list[str] = []
    calls = script._ExitCalls(lambda _: None)
    calls.record()
    try:
        atexit.register(said.append, "one")
        atexit.register(int, "no number")
        atexit.register(said.append, "two")
        atexit.register(said.clear)
        atexit.unregister(said.clear)
    finally:
        calls.restore()
    assert (atexit.register, atexit.unregister) == original
    calls._workers = False
    calls.run()
    assert said == ["two", "one"]
    assert "invalid literal" in capsys.readouterr().err


def test_a_docstring_is_found_where_there_is_one() -> None:
    assert script._docstring("'text'\nx = 1") == "text"
    assert script._docstring("x = 1") is None
    assert script._docstring("%magic") is None
