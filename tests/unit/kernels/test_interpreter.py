"""Interpreters: the tools that they lack, and whose kernel outlives a session."""

from __future__ import annotations

import pytest

from kernel_mcp.errors import InputError
from kernel_mcp.kernels.interpreter import PYTHON, Interpreter

R = Interpreter("r", "R", lacking={"undo": "Call reset."})


def test_a_tool_that_is_not_available_says_what_to_do_instead() -> None:
    R.require("execute")
    with pytest.raises(InputError, match=r"undo is not available: this session runs R. Call reset"):
        R.require("undo")
    assert (R.offers("undo"), PYTHON.offers("undo")) == (False, True)


def test_its_names_are_those_of_the_kernel_and_the_language_in_notebooks() -> None:
    spec = {"name": "ir", "display_name": "R", "language": "R"}
    found = Interpreter("stats", "R", notebook={"kernelspec": spec, "language_info": {"name": "R"}})
    assert found.names == {"stats", "ir", "r"}
    assert PYTHON.names == {"python", "python3"}


def test_only_a_kernel_with_a_place_outlives_its_session() -> None:
    there = Interpreter("attached", "Python", place="/run/kernel.json", external=True)
    assert (there.external, R.external, PYTHON.external) == (True, False, False)
    assert there.remark.endswith("/run/kernel.json")
    assert R.remark == PYTHON.remark == ""
