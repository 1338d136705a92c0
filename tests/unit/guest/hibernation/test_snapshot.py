"""The parts of a kernel that are in its dump, and those that are not."""

from __future__ import annotations

import builtins
import gc
import io
import json
import marshal
import os
import select
import signal
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_specs.restricted.hibernation import snapshot
from kernel_specs.restricted.hibernation.dumps import Segment


def taken(
    variables: dict[Any, Any],
    seconds: float = 20.0,
    hidden: dict[str, Any] | None = None,
    ahead: bool = False,
) -> dict[str, Any]:
    """The reply to a dump request of a shell with these variables, some of them `hidden`."""
    shell: Any = SimpleNamespace(
        user_ns={**variables, **(hidden or {})},
        user_ns_hidden=hidden or {},
        process_state=SimpleNamespace(changes=lambda: ()),
        own_names={"quit": 0, "__name__": "__main__"},
        displayhook=SimpleNamespace(),
        compile=SimpleNamespace(_filename_map={}),
        history_manager=SimpleNamespace(input_hist_parsed=[], input_hist_raw=[]),
        execution_count=1,
    )
    content = {"max_bytes": 10**8, "seconds": seconds, "leave": []}
    return snapshot.take(shell, content, ahead=ahead)[1]


class Endless:
    """Is pickled for ever."""

    def __reduce__(self) -> Any:
        while True:
            pass


def test_a_variable_that_takes_long_costs_no_other() -> None:
    shared = [1]
    variables = {"small": 1, "a": shared, "slow": Endless(), "b": [shared], "last": "x"}
    reply = taken(variables, 0.4)
    assert reply["lost"] == {"slow": "took longer than 0.1 s"}
    assert reply["groups"] == [["small"], ["last"], ["a", "b"]]


def test_cleaning_up_behind_a_variable_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: Segment) -> None:
        sum(range(10**7))
        undo(self)

    undo = Segment.undo
    monkeypatch.setattr(Segment, "undo", slow)
    reply = taken({"small": 1, "gone": (each for each in ""), "last": "x"}, 0.2)
    assert reply["lost"] == {"gone": "generator"}
    assert reply["names"] == ["small", "last"]


def test_hidden_names_are_stored_unless_they_are_of_the_kernel() -> None:
    reply = taken({"shown": 1}, hidden={"linspace": 2, "quit": 3, "_i1": "a cell"})
    assert (reply["names"], reply["stored"]) == (["shown"], ["shown", "linspace"])
    assert [each["name"] for each in reply["variables"]] == ["shown"]


def test_what_is_no_name_is_told_key_by_key() -> None:
    keys = {1: 0, "Out[1]": 0, "a" * 201: 0, "a" * 202: 0, b"x": 0, (1,): 0}
    reply = taken({**keys, "_i7": "text", "__doc__": "text", "__name__": "__main__", "quit": 0})
    assert list(reply["lost"]) == [
        "globals()[1]",
        "globals()['Out[1]']",
        f"{'a' * 20}…",
        f"{'a' * 20}… (2)",
        "globals()[b'x']",
        "globals()[tuple]",
    ]
    assert reply["names"] == ["_i7", "__doc__"]
    many = taken(dict.fromkeys(range(1000), 0))["lost"]
    assert len(many) == snapshot.MAX_ODD + 1
    assert "900 more keys of globals()" in many


@pytest.mark.parametrize("ahead", [False, True])
def test_library_functions_that_code_has_replaced_cost_no_variable(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    for module, name in (
        *((json, "dumps"), (json, "loads"), (os, "write"), (os, "read"), (os, "fork")),
        *((os, "open"), (os, "pipe"), (os, "waitpid"), (os, "kill"), (select, "select")),
        *((signal, "signal"), (signal, "setitimer"), (time, "monotonic"), (time, "thread_time")),
        *((warnings, "catch_warnings"), (io, "BufferedReader"), (gc, "get_referents")),
        *((marshal, "dumps"), (builtins, "open")),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: 0)
    reply = taken({"code": taken.__code__, "number": 1, "items": {}.items()}, ahead=ahead)
    monkeypatch.undo()
    assert (reply["names"], reply["lost"]) == (["code", "number", "items"], {})
    assert reply["size"] > 500


TWO_DATACLASSES = """
import dataclasses
@dataclasses.dataclass
class A: x: int = 0
@dataclasses.dataclass(frozen=True)
class B: y: list = dataclasses.field(default_factory=list)
a, b = A(), B()
"""


def test_dataclasses_that_have_nothing_in_common_share_no_segment() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(TWO_DATACLASSES, names)
    reply = taken({name: names[name] for name in ("A", "B", "a", "b")})
    assert reply["groups"] == [["A", "a"], ["B", "b"]]
