"""Settings of a process that are saved where they have changed, and written in another."""

from __future__ import annotations

import decimal
import logging
import os
import random
import sys
import warnings
from pathlib import Path

import pytest

from kernel_specs.restricted.hibernation.process_state import MAX_BYTES, ProcessState

LAYER = "/packages/session"


@pytest.fixture(autouse=True)
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv("PATH", f"/shims:{LAYER}/1/bin:/usr/bin")
    monkeypatch.setenv("ALSO", "here")
    monkeypatch.setattr(warnings, "filters", list(warnings.filters))
    monkeypatch.setattr(sys, "path", [f"{LAYER}/1", *dict.fromkeys(sys.path)])
    random.seed(1)


def restored(state: ProcessState, saved: dict[str, str]) -> dict[str, str]:
    return state.restore(saved, early=True) | state.restore(saved, early=False)


def test_nothing_is_saved_of_what_has_not_changed() -> None:
    state = ProcessState([LAYER])
    os.environ["PATH"] = f"/shims:{LAYER}/2/bin:{LAYER}/1/bin:/usr/bin"
    sys.path.insert(0, f"{LAYER}/2")  # further packages of the session are no setting
    assert state.changes() == ({}, {})


def test_environment_and_paths_are_those_of_code_beside_the_kernels_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = ProcessState([LAYER])
    kernels = list(sys.path)
    os.environ.update(NEW="1", PATH=f"/shims:{LAYER}/1/bin:/usr/bin:/workspace/bin")
    del os.environ["ALSO"]
    sys.path[:] = ["lib", *kernels[:-1], "more"]
    saved, lost = state.changes()
    assert (sorted(saved), lost) == (["os.environ", "sys.path"], {})

    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.update(ALSO="here", OTHER="2", PATH=f"/shims:{LAYER}/7/bin:/usr/bin")
    del os.environ["NEW"]
    sys.path[:] = kernels
    assert restored(state, saved) == {}
    assert (os.environ["NEW"], os.environ["OTHER"], "ALSO" in os.environ) == ("1", "2", False)
    assert os.environ["PATH"] == "/shims:/usr/bin:/workspace/bin"
    assert sys.path == ["lib", *kernels[:-1], "more"]


def test_settings_are_written_as_they_were(tmp_path: Path) -> None:
    state = ProcessState([LAYER])
    (tmp_path / "below").mkdir()
    os.chdir("below")
    random.seed(5)
    warnings.filterwarnings("error", message="a thing", module="here")
    level = logging.getLogger("kernel_mcp.tests").level
    logging.getLogger("kernel_mcp.tests").setLevel(33)
    digits = decimal.getcontext().prec
    decimal.getcontext().prec = 7
    filters, numbers = warnings.filters[0], random.getstate()
    try:
        saved, lost = state.changes()
        assert lost == {}
        os.chdir(tmp_path)
        random.seed(6)
        warnings.resetwarnings()
        logging.getLogger("kernel_mcp.tests").setLevel(level)
        decimal.getcontext().prec = digits
        assert restored(state, saved) == {}
        assert (Path.cwd().name, random.getstate() == numbers) == ("below", True)
        assert warnings.filters[0] == filters
        assert logging.getLogger("kernel_mcp.tests").level == 33
        assert decimal.getcontext().prec == 7
    finally:
        logging.getLogger("kernel_mcp.tests").setLevel(level)
        decimal.getcontext().prec = digits


def test_one_that_cannot_be_saved_or_written_costs_no_other(tmp_path: Path) -> None:
    state = ProcessState([LAYER])
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    sys.path.append(lambda: None)  # type: ignore[arg-type]
    os.environ["LARGE"] = "x" * MAX_BYTES
    random.seed(2)
    numbers = random.getstate()
    saved, lost = state.changes()
    assert sorted(saved) == ["the current folder", "the state of random"]
    assert lost["os.environ"] == "too large"
    assert "sys.path" in lost

    os.chdir(tmp_path)
    (tmp_path / "gone").rmdir()
    random.seed(3)
    (failed,) = restored(state, saved).items()
    assert failed[0] == "the current folder"
    assert failed[1].startswith("FileNotFoundError")
    assert random.getstate() == numbers


def test_a_module_that_is_missing_in_the_next_kernel_is_told() -> None:
    state = ProcessState([LAYER])
    random.seed(4)
    saved = {"the options of pandas": state.changes()[0]["the state of random"]}
    missing = state.restore(saved, early=False)["the options of pandas"]
    assert missing.startswith(("ModuleNotFoundError", "AttributeError", "TypeError"))
