"""What of a kernel is in its dump, and what is not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_specs.restricted.hibernation import snapshot
from kernel_specs.restricted.hibernation.dumps import Segment


def taken(variables: dict[str, Any], seconds: float = 20.0) -> dict[str, Any]:
    """The reply to a dump request of a shell with these variables."""
    shell: Any = SimpleNamespace(
        user_ns=variables,
        user_ns_hidden={},
        displayhook=SimpleNamespace(),
        compile=SimpleNamespace(_filename_map={}),
        history_manager=SimpleNamespace(input_hist_parsed=[], input_hist_raw=[]),
        execution_count=1,
    )
    content = {"max_bytes": 10**8, "seconds": seconds, "leave": []}
    return snapshot.take(shell, content, ahead=False)[1]


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


def test_semaphores_hold_no_data_that_could_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, tmp = tmp_path / "shm", tmp_path / "tmp"
    for path in (shared / "sem.loky-1", shared / "psm_1", tmp / "sem.csv"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.setattr(snapshot, "SHARED_MEMORY", str(shared))
    monkeypatch.setattr(snapshot, "SEMAPHORES", f"{shared}/sem.")
    assert snapshot.left_files(str(tmp)) == [str(tmp / "sem.csv"), str(shared / "psm_1")]
