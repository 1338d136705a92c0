"""Variables of a dump are loaded one by one, in one step or in several."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_specs.restricted.hibernation.dumps import NOT_WHOLE, Arrival, Pieces
from kernel_specs.restricted.hibernation.loading import Loading
from kernel_specs.restricted.hibernation.snapshot import take


class Shell:
    """Stands for the kernel's shell: names, history and results."""

    def __init__(self, **variables: Any) -> None:
        self.user_ns: dict[str, Any] = {"_oh": {}, **variables}
        self.user_ns_hidden: dict[str, Any] = {}
        self.own_names = {"_oh": self.user_ns["_oh"]}
        self.process_state = SimpleNamespace(changes=lambda: ())
        self.displayhook = SimpleNamespace()
        self.compile = SimpleNamespace(_filename_map={})
        self.history_manager = SimpleNamespace(input_hist_parsed=[""], input_hist_raw=[""])
        self.execution_count = 1

    def push(self, names: dict[str, Any], *, interactive: bool = True) -> None:
        """Set variables."""
        self.user_ns.update(names)
        if not interactive:
            self.user_ns_hidden.update(names)

    def drop_by_id(self, names: dict[str, Any]) -> None:
        """Remove variables that still have these values."""
        for name, value in names.items():
            if self.user_ns.get(name) is value:
                del self.user_ns[name]


def dumped(shell: Shell) -> bytes:
    """The bytes of a dump of a shell."""
    dump, _ = take(shell, {"max_bytes": 10**8, "seconds": 20.0, "leave": []}, ahead=False)
    return dump.read(dump.size)


def loading(shell: Shell, data: bytes) -> Loading:
    """The loading of a dump into a shell."""
    pieces = Pieces()
    pieces.add(data)
    return Loading(shell, Arrival(pieces))


def content(**more: Any) -> dict[str, Any]:
    """The content of a request to load everything in one step, changed by `more`."""
    return {"count": 0, "seconds": 20.0, "leave": [], "files": [], **more}


class Breaks:
    """Cannot be loaded."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_variables_come_back_in_order_with_results_and_history() -> None:
    shared = [1]
    first = Shell(b=shared, a={"x": shared}, last="text")
    first.user_ns["_oh"][3] = shared
    first.execution_count = 4
    first.history_manager.input_hist_parsed[:] = ["", "b = [1]"]
    second = Shell()
    reply = loading(second, dumped(first)).step(content())
    assert (reply["names"], reply["lost"], reply["left"]) == (["b", "a", "last"], {}, 0)
    names = second.user_ns
    assert names["b"] is names["a"]["x"] is names["_oh"][3] is names["_3"] is names["_"]
    assert (second.execution_count, second.history_manager.input_hist_parsed[1]) == (4, "b = [1]")


def test_steps_load_some_each_and_leave_out_what_was_asked() -> None:
    load = loading(Shell(), dumped(Shell(a=1, b=2, c=3, d=4)))
    replies = [load.step(content(count=2)), load.step(content(count=2, leave=["c"]))]
    assert [reply["names"] for reply in replies] == [["a", "b"], ["d"]]
    assert [reply["left"] for reply in replies] == [2, 0]


def test_a_value_that_cannot_be_loaded_costs_those_pickled_with_it_and_no_other() -> None:
    shared = [1]
    values = {"good": 1, "with_it": [shared], "breaks": (shared, Breaks()), "behind": {"x": shared}}
    second = Shell()
    reply = loading(second, dumped(Shell(**values))).step(content())
    assert reply["names"] == ["good", "with_it"]
    assert list(reply["lost"]) == ["breaks"]
    assert reply["behind"] == ["behind"]


def test_of_a_dump_that_ends_early_no_variable_stays() -> None:
    data = dumped(Shell(a=1, b="x" * 1000))
    second = Shell()
    load = loading(second, data[:-1])
    with pytest.raises(ValueError, match=NOT_WHOLE):
        load.step(content())
    assert "a" not in second.user_ns


def test_what_was_loaded_is_held_by_its_variables_alone() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("class Point: pass\npoint, data = Point(), {1, 2}", names)  # pickled by value
    second = Shell()
    load = loading(second, dumped(Shell(Point=names["Point"], point=names["point"], data={1, 2})))
    assert load.step(content())["lost"] == {}
    kept = weakref.ref(second.user_ns.pop("point"))
    gc.disable()  # that of Python 3.10 and 3.11.2 does not see what a memo holds
    try:
        load.close()
        assert kept() is None
    finally:
        gc.enable()
