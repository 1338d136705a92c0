from __future__ import annotations

import ast
import keyword
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernel_mcp.policy import Policy, Report, check

POLICIES = [
    Policy.for_allow([]),
    Policy.for_allow([], profile="strict"),
    Policy.for_allow(["numpy"], profile="data"),
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
