from __future__ import annotations

import pytest

from kernel_mcp.policy import Policy, check

POLICY = Policy.for_allow(["numpy"])


@pytest.mark.parametrize(
    ("line", "kind", "column"),
    [
        ("import os", "import", 8),
        ("x = 1; from os import path", "import", 13),
        ("if x: import subprocess as s", "import", 14),
        ("  !ls", "magic", 3),
        ("%run a.py", "magic", 1),
        ("x = !ls", "magic", 5),
        ("x = %run a.py", "magic", 5),
        ("x = get_ipython().system('ls')", "attribute", 5),
        ("__import__('os')", "attribute", 1),
        ("f.__globals__", "attribute", 3),
    ],
)
def test_a_forbidden_line_is_refused_in_code_that_does_not_parse(
    line: str, kind: str, column: int
) -> None:
    report = check(f"x = (1\n{line}", POLICY)
    found = [item for item in report.refusals if item.kind != "syntax"]
    assert [(item.kind, item.line, item.column) for item in found] == [(kind, 2, column)]
    assert any(item.kind == "syntax" for item in report.refusals)


@pytest.mark.parametrize(
    "line",
    ["import numpy", "from math import pi", "% b", "x != 3", "%time y", "important = 1", "# no"],
)
def test_other_lines_of_code_that_does_not_parse_are_left_to_the_kernel(line: str) -> None:
    report = check(f"x = (1\n{line}\nz = = 1", POLICY)
    assert not report.valid
    assert report.refusals == ()


def test_nothing_is_refused_in_broken_code_when_everything_is_allowed() -> None:
    assert check("x = (1\nimport os\n!ls", Policy.for_allow(["*"])).refusals == ()
