from __future__ import annotations

import ast
import keyword
import re
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernel_mcp.policy import Diagnostic, Policy, Report
from kernel_mcp.policy.check import check, own_modules

POLICIES = [
    Policy.for_allow([]),
    Policy.for_allow([], profile="strict"),
    Policy.for_allow(["numpy"], profile="default").with_installed(["numpy"]),
    Policy.for_allow(["*"]),
]

FRAGMENTS = st.sampled_from(
    [
        "import os", "from a import b", "x", " = ", "\n", "\n    ", "%", "%%", "!", "?", "ls",
        "time ", "timeit -n 3 ", "bash", "(", ")", "[", "]", "{", "}", "'", '"', "'''", '"""',
        "\\", "\\\n", "#", "# /// script\n", "# ///\n", "# dependencies = [", "try:",
        "except ImportError:", "def f():", "class A:", "pass", "lambda ", "await ", "async ",
        "f'{", "}'", ".", ",", ":", ":=", "é", "🎉", "\t", "\r", "\f", "\u2028", "\0", "\ud800",
        "__import__", "get_ipython()", "random._os", "1", ">>> ", "... ", "In [1]: ",
        "match x:", "case ", "@", "*", "**", "=", "==", "if TYPE_CHECKING:",
        "\N{FULLWIDTH LATIN SMALL LETTER O}", "pip install x", "global x", "return", "yield",
    ]
)  # fmt: skip


def assert_sound(code: str, report: Report) -> None:
    """Every place lies in the source, and the report can be shown and sent."""
    lines = code.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for item in report.diagnostics:
        assert 1 <= item.line <= len(lines)
        assert 1 <= item.column <= len(lines[item.line - 1]) + 1
        assert len(item.source_line) <= 300
        assert item.message
    for use in report.imports:
        assert 1 <= use.line <= len(lines)
    assert report.valid == all(item.severity == "warning" for item in report.diagnostics)
    report.render().encode()


@settings(max_examples=300, deadline=None)
@given(code=st.text(), policy=st.sampled_from(POLICIES))
@example(code="\ufeffx", policy=POLICIES[0])
@example(code="\x0c", policy=POLICIES[0])
def test_any_text_gets_a_sound_report(code: str, policy: Policy) -> None:
    assert_sound(code, check(code, policy, known_names=frozenset({"df"})))


@settings(max_examples=1000, deadline=None)
@given(parts=st.lists(FRAGMENTS, max_size=25), policy=st.sampled_from(POLICIES))
@example(parts=["!ls ", "\\\n"], policy=POLICIES[3])
@example(parts=["x = !", "\\"], policy=POLICIES[3])
@example(parts=["%time "], policy=POLICIES[0])
@example(parts=["%%timeit -n 3 "], policy=POLICIES[0])
def test_any_mixture_of_python_and_commands_gets_a_sound_report(
    parts: list[str], policy: Policy
) -> None:
    code = "".join(parts)
    assert_sound(code, check(code, policy, known_names=frozenset({"df"}), python="3.14"))


HELP = re.compile(r"show_usage|run_line_magic\('(?:pinfo2?|psearch)'")
HARMLESS = re.compile(r"magic\('%?(?:time|timeit|who|whos|capture|matplotlib|precision)'")


COMMANDS = FRAGMENTS.filter(lambda part: part not in ("get_ipython()", "\u2028", "\f"))
"""Without the characters that only IPython takes for line ends; the kernel refuses those."""


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(parts=st.lists(COMMANDS, max_size=12))
@example(parts=["\\\n", "!ls"])
@example(parts=["x", "\n", ">>> ", "!ls"])
@example(parts=["(\n", "x = !", "ls"])
@example(parts=["%%", "&", "\n", "x"])
def test_no_command_that_ipython_would_run_is_missed(parts: list[str]) -> None:
    """Where IPython's own transformation yields a command in code that compiles."""
    transform = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager()
    code = "".join(parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = transform.transform_cell(code)
            compile(plain, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except (SyntaxError, ValueError, RuntimeError, IndexError):
            return
    if "get_ipython()" in plain and not HELP.search(plain) and not HARMLESS.search(plain):
        assert check(code, POLICIES[0]).refusals, plain


NAMES = st.from_regex(r"[a-z]{1,6}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name)
)


@settings(max_examples=200, deadline=None)
@given(root=NAMES, below=st.lists(NAMES, max_size=2), indent=st.integers(0, 3))
def test_an_import_passes_exactly_when_the_policy_allows_the_module(
    root: str, below: list[str], indent: int
) -> None:
    policy = Policy.for_allow(["a", "os.path"])
    module = ".".join([root, *below])
    code = "".join(" " * level + "if x:\n" for level in range(indent)) + " " * indent
    report = check(f"{code}import {module}", policy)
    (use,) = report.imports
    assert (use.name, use.line) == (module, indent + 1)
    assert use.allowed == policy.allows(module)
    if not use.allowed:
        (refusal,) = report.refusals
        assert (refusal.line, refusal.column) == (indent + 1, indent + 8)


@settings(max_examples=200, deadline=None)
@given(value=st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=20))
def test_a_literal_is_never_refused(value: object) -> None:
    code = f"x = {value!r}"
    ast.parse(code)
    report = check(code, POLICIES[1])
    assert report.refusals == ()
    assert report.valid


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_ever_run(policy: Policy, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    touch = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    for code in (
        touch,
        f"%time {touch}",
        f"%%time\n{touch}",
        f"!touch {canary}",
        f"%%bash\ntouch {canary}",
        f"x = !touch {canary}",
        f"@{touch}\ndef f(): pass",
        f"def f(a={touch}) -> {touch}: pass",
        f"class A(metaclass={touch}):\n    {touch}",
        f"f'{{{touch.replace(chr(39), chr(34))}}}'",
        f"x: {touch} = 1",
        f"from __future__ import annotations\nx: {touch}",
        f"# /// script\n# dependencies = ['x']\n# ///\n{touch}",
        f"exec({touch!r})\neval({touch!r})",
        f"lambda: {touch}\n[{touch} for _ in range(3)]",
    ):
        assert check(code, policy, known_names=frozenset()).diagnostics is not None
        assert not canary.exists(), code


def test_the_tree_is_walked_without_recursion() -> None:
    code = "x = " + "a" + ".b" * 700 + "\n" + "-" * 300 + "1"
    assert check(code, POLICIES[0]).valid


def test_checks_may_run_in_many_threads_and_leave_warnings_as_they_were() -> None:
    before = list(warnings.filters)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: check("x = '\\d'", POLICIES[0]), range(40)))
    assert {len(report.diagnostics) for report in reports} == {1}
    assert list(warnings.filters) == before


def test_a_notebook_of_ordinary_cells_is_clean() -> None:
    policy = Policy.for_allow(["numpy", "pandas", "matplotlib"])
    cells = [
        (
            "%matplotlib inline\nimport numpy as np\nimport pandas as pd\n"
            "import matplotlib.pyplot as plt\nfrom pathlib import Path"
        ),
        "df = pd.read_csv('sales.csv', parse_dates=['day'])\ndf.head()",
        "df['os'] = df.os.str.lower()\ndf.query('os == \"linux\"').eval('a = b + 1', inplace=True)",
        (
            "summary = (\n    df.groupby(['os', df.day.dt.month])\n"
            "    .agg(total=('amount', 'sum'))\n    .reset_index()\n)\nsummary"
        ),
        (
            "fig, ax = plt.subplots(figsize=(8, 4))\nfor name, part in summary.groupby('os'):\n"
            "    ax.plot(part['day'], part.total, label=f'{name!r:>10}')\nax.legend()\nplt.show()"
        ),
        "sys_time = 3\nPath('out.csv').write_text(summary.to_csv())\nnp.isclose(sys_time, 3)",
    ]
    known: set[str] = set()
    for cell in cells:
        report = check(cell, policy, known_names=frozenset(known))
        assert report.diagnostics == (), report.render()
        known |= {"np", "pd", "plt", "Path", "df", "summary", "fig", "ax", "name", "part"}


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


POLICY = Policy.for_allow([])


def test_files_and_folders_of_the_workspace_are_modules(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").touch()
    (tmp_path / "package").mkdir()
    for other in ("data.csv", "not-a-name.py", "1st.py", "os.py", "a.b.py", ".hidden"):
        (tmp_path / other).touch()
    assert own_modules([tmp_path]) == {"helpers", "package"}


def test_a_workspace_that_is_not_there_has_no_modules(tmp_path: Path) -> None:
    assert own_modules([tmp_path / "missing"]) == frozenset()


def test_a_huge_workspace_is_read_in_part(tmp_path: Path) -> None:
    for number in range(2100):
        (tmp_path / f"m{number}.py").touch()
    assert len(own_modules([tmp_path])) == 2000


def test_modules_of_the_workspace_may_be_imported() -> None:
    code = "import helpers\nfrom package.inner import f"
    assert check(code, POLICY, own_modules=frozenset({"helpers", "package"})).valid
    assert not check(code, POLICY).valid


def test_a_module_of_the_workspace_hands_nothing_out() -> None:
    report = check("import helpers\nhelpers.os", POLICY, own_modules=frozenset({"helpers"}))
    assert [item.kind for item in report.refusals] == ["attribute"]


def test_options_of_a_timing_command_are_read_once() -> None:
    start = time.process_time()
    check("%timeit " + "-a11 " * 5000 + "\\\n x", POLICIES[0])
    assert time.process_time() - start < 1


def test_a_later_statement_may_import_from_the_future_as_in_a_cell() -> None:
    policy = Policy.for_allow(["*"])
    assert check("x = 1\nfrom __future__ import annotations", policy).valid
    assert not check("x = 1\nfrom __future__ import nothing", policy).valid
    assert not check("def f():\n    from __future__ import annotations", policy).valid
