from __future__ import annotations

import pytest

from kernel_mcp.policy import Policy
from kernel_mcp.policy.check import check
from kernel_mcp.policy.magics import plain
from kernel_mcp.policy.source import Source

OPEN = Policy.for_allow(["*"])
POLICY = Policy.for_allow(["numpy", "pandas", "matplotlib"])


@pytest.mark.parametrize(
    ("code", "kind", "line", "column"),
    [
        ("!ls", "shell", 1, 1),
        ("!!ls", "shell", 1, 1),
        ("x = 1\n!ls -la | wc 'unclosed", "shell", 2, 1),
        ("files = !ls", "shell", 1, 9),
        ("a.b[0] = !ls", "shell", 1, 10),
        ("x = %who_ls", "line", 1, 5),
        ("%run a.py", "line", 1, 1),
        ("for i in y:\n    %run a.py", "line", 2, 5),
        ("%%bash\necho 'unclosed", "cell", 1, 1),
        ("\n\n%%bash\nls", "cell", 3, 1),
        ("# what for\n\n# and how\n%%bash\nls 'unclosed", "cell", 4, 1),
        ("np.mean?", "help", 1, 1),
        ("np.mean??", "help", 1, 1),
        ("?np.mean", "help", 1, 1),
        ("%time?", "help", 1, 1),
        (",f a b", "call", 1, 1),
    ],
)
def test_ipython_syntax_is_found_where_it_stands(
    code: str, kind: str, line: int, column: int
) -> None:
    _, found = plain(Source.of(code))
    assert [(magic.kind, magic.first, len(magic.head) + 1) for magic in found] == [
        (kind, line, column)
    ]


@pytest.mark.parametrize(
    "code",
    [
        "x = '''\n!ls\n%run a.py\n'''",
        'x = """\n%%bash\n"""',
        "x = (a\n% b)",
        "x = [1,\n  # what?\n  2]  # really?",
        "x = a != b",
        "x = f'{a!r}'",
        "print('%d items?' % n)",
        "x = a \\\n% b",
        "f(a=1, b='?')",
        "'!ls'",
    ],
)
def test_plain_python_holds_no_ipython_syntax(code: str) -> None:
    assert plain(Source.of(code))[1] == ()
    assert check(code, POLICY).valid


@pytest.mark.parametrize(
    "code",
    [
        "!ls",
        "x = !ls\nprint(x)",
        "if True:\n    !ls $HOME \\\n  && echo 'a\n    y = 1",
        "%%bash\nif [ a ]; then b; fi",
        "import numpy\nnumpy.mean?\nx = 1",
        "pip install numpy",
        "%cd /tmp\n%env A=1\nx = 2",
    ],
)
def test_code_with_commands_is_valid_when_everything_is_allowed(code: str) -> None:
    report = check(code, OPEN)
    assert report.valid, report.render()
    assert report.diagnostics == ()


def test_lines_below_a_command_keep_their_numbers() -> None:
    report = check("!ls \\\n  -la \\\n  foo\nx = 1\nimport os", POLICY)
    assert [(item.kind, item.line) for item in report.refusals] == [("magic", 1), ("import", 5)]


def test_an_error_beside_a_command_is_still_found() -> None:
    report = check("!ls\nx = (", OPEN)
    assert [(item.kind, item.line) for item in report.diagnostics] == [("syntax", 2)]


@pytest.mark.parametrize(
    "code",
    [
        "%matplotlib inline\nimport pandas",
        "%time pandas.read_csv('a.csv')",
        "%%time\nx = 1",
        "%%timeit -n 10 -r3\nx = 1",
        "%timeit -n 1000 sum(range(10))",
        "r = %timeit -o sum(range(10))",
        "%%capture\nprint(1)",
        "%config InlineBackend.figure_format = 'retina'",
        "%precision 3",
        "%whos",
        "%reset -f",
    ],
)
def test_commands_that_only_time_or_show_are_let_through(code: str) -> None:
    report = check(code, POLICY)
    assert report.valid, report.render()


@pytest.mark.parametrize(
    ("code", "line", "column"),
    [
        ("%%time\nimport os", 2, 8),
        ("%time import os", 1, 14),
        ("%timeit -n 10 import os", 1, 22),
        ("for x in y:\n    %time import os", 2, 18),
        ("%%timeit import os\nx", 1, 17),
        ("%%capture out\nimport os", 2, 8),
        ("x = %timeit -o __import__('os')", 1, 16),
    ],
)
def test_code_under_a_timing_command_is_checked_at_its_place(
    code: str, line: int, column: int
) -> None:
    (refusal,) = check(code, POLICY).refusals
    assert (refusal.line, refusal.column) == (line, column)


def test_a_command_below_a_timing_command_is_still_a_command() -> None:
    (refusal,) = check("%%time\n%%bash\nls", POLICY).refusals
    assert (refusal.kind, refusal.line) == ("magic", 2)


def test_a_common_margin_is_ignored_as_ipython_does() -> None:
    report = check("    x = 1\n    if x:\n        import os", POLICY)
    (only,) = report.diagnostics
    assert (only.kind, only.line, only.column) == ("import", 3, 16)
    assert only.source_line == "        import os"


def test_pasted_prompts_are_ignored_as_ipython_does() -> None:
    (only,) = check(">>> x = 1\n>>> import os\n", POLICY).diagnostics
    assert (only.line, only.column) == (2, 12)
    (only,) = check("In [3]: for x in y:\n   ...:     import os", POLICY).diagnostics
    assert (only.line, only.column) == (2, 20)


@pytest.mark.parametrize(
    "line", ["pip install numpy", "  pip install -q a b", "ls a*.csv", "cd .."]
)
def test_a_single_line_may_be_a_command_without_its_sign(line: str) -> None:
    assert [item.kind for item in check(line, POLICY).refusals] == ["magic"]


@pytest.mark.parametrize("code", ["time = 3", "who(3)", "pip install\nx = 1", "env [0]"])
def test_other_lines_are_not_commands_without_their_sign(code: str) -> None:
    assert plain(Source.of(code))[1] == ()


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("!pip install polars", "install tool"),
        ("%pip install polars", "install tool"),
        ("!ls", "the tools for files"),
        ("%run a.py", "plain Python"),
        ("np.mean?", "help(np.mean)"),
        ("%%bash\nls", "plain Python"),
        ("!unknown", "plain Python"),
        (",f a b", "plain Python"),
    ],
)
def test_a_refused_command_says_what_to_do_instead(code: str, advice: str) -> None:
    (refusal,) = check(code, POLICY).refusals
    assert refusal.kind == "magic"
    assert advice in refusal.message


@pytest.mark.parametrize("code", ["!cat a.txt", "%%writefile a.py\nx", "%pip install polars"])
def test_advice_names_no_tool_that_is_not_there(code: str) -> None:
    policy = Policy.for_allow([], "strict", tools=("core",))
    (refusal,) = check(code, policy).refusals
    assert "use plain Python." in refusal.message
    assert "tool" not in refusal.message


def test_a_setting_of_the_plot_backend_must_be_a_plain_value() -> None:
    assert check("%config InlineBackend.figure_formats = ['png', 'svg']", POLICY).valid
    assert not check("%config InlineBackend.x = __import__('os')", POLICY).valid
    assert not check("%config Application.log_level = 0", POLICY).valid
