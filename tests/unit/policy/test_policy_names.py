from __future__ import annotations

import pytest

from kernel_mcp.policy import Policy, check
from kernel_mcp.policy.diagnostics import Diagnostic

OPEN = Policy.for_allow(["*"])


def warned(code: str, *known: str) -> list[Diagnostic]:
    """The warnings about undefined names."""
    report = check(code, OPEN, known_names=frozenset(known))
    assert report.valid, report.render()
    return [item for item in report.diagnostics if item.kind == "name"]


def test_an_undefined_name_is_a_warning_at_its_place() -> None:
    (only,) = warned("x = 1\nprint(x, yy)")
    assert only.severity == "warning"
    assert (only.line, only.column) == (2, 10)
    assert "'yy'" in only.message


def test_nothing_is_said_without_the_names_of_the_session() -> None:
    assert check("print(nothing)", OPEN).diagnostics == ()


def test_variables_of_the_session_are_defined() -> None:
    assert warned("df.head()", "df") == []


def test_a_near_miss_suggests_the_name() -> None:
    (only,) = warned("data_frme.head()", "data_frame")
    assert "did you mean 'data_frame'?" in only.message


@pytest.mark.parametrize(
    "code",
    [
        "import numpy as np\nnp.mean([1])",
        "import a.b.c\na.b",
        "from a import b as c\nc",
        "def f(x, *y, z=1, **w):\n    return x, y, z, w\nf(1)",
        "class A:\n    x = 1\n    y = x\n    def f(self):\n        return __class__\nA()",
        "[x for x in range(3) if x]\n{a: b for a, b in {}.items()}",
        "for i, (a, b) in []:\n    print(i, a, b)",
        "with open('a') as f:\n    f.read()",
        "try:\n    pass\nexcept ValueError as e:\n    print(e)",
        "if (n := 3) > 2:\n    print(n)",
        "match 1:\n  case [a, *b]:\n    print(a, b)\n  case {'k': v, **rest}:\n    print(v, rest)",
        "f = lambda q: q + 1",
        "def outer():\n    v = 1\n    def inner():\n        nonlocal v\n        v = 2\n    inner()",
        "def set_it():\n    global late\n    late = 1\nset_it()\nlate",
        "def later():\n    return defined_below\ndefined_below = 1",
        "display(1); _; __; _3; In[1]; Out; _i; __name__; __doc__; help(1); exit",
        "x: int = 1\nx",
        "async def f():\n    async for a in b():\n        print(a)\ndef b(): pass",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import z\ndef f(): return z",
        "del undefined_is_a_matter_for_the_kernel",
        "print(f'{1 + 1} {len([2])}')",
    ],
)
def test_what_a_cell_defines_is_defined(code: str) -> None:
    assert warned(code) == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("def f():\n    return missing", ["missing"]),
        ("class A(Missing):\n    pass", ["Missing"]),
        ("class A:\n    hidden = 1\n    def f(self):\n        return hidden", ["hidden"]),
        ("[x for x in range(3)]\nprint(x)", ["x"]),
        ("def f(a): pass\nprint(a)", ["a"]),
        ("print(f'{missing}')", ["missing"]),
        ("@missing\ndef f(): pass", ["missing"]),
        ("missing; missing; missing", ["missing"]),
        ("undefined += 1", []),
    ],
)
def test_what_nothing_defines_is_named_once(code: str, names: list[str]) -> None:
    found = [item.message.split("'")[1] for item in warned(code)]
    assert found == names


@pytest.mark.parametrize(
    "code",
    [
        "from math import *\nsin(1)",
        "exec('a = 1')\na",
        "globals()['a'] = 1\na",
        "get_ipython().run_line_magic('pylab', '')\nlinspace(1, 2)",
        "%run a.py\ndefined_there",
        "!ls\nmaybe",
    ],
)
def test_nothing_is_said_where_names_may_come_out_of_sight(code: str) -> None:
    assert warned(code) == []


def test_a_value_taken_from_a_command_is_defined() -> None:
    assert warned("x = !ls\nprint(x)") == []


def test_long_code_is_not_searched() -> None:
    assert warned("x = 1\n" * 20_000 + "missing") == []


def test_the_number_of_warnings_is_bounded() -> None:
    assert len(warned("\n".join(f"missing_{n}" for n in range(100)))) == 20
