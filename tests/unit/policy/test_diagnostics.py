from __future__ import annotations

import json
import sys
import warnings

import pytest

from kernel_mcp.policy import Diagnostic, Policy, Report, check
from kernel_mcp.policy.model import Kind, Severity

POLICY = Policy.for_allow([])


def test_a_rendered_error_shows_place_text_line_and_caret() -> None:
    text = check("x = 1\n  \nimport os", POLICY).render()
    lines = text.split("\n")
    assert lines[0].startswith("line 3, column 8: import of 'os' is not allowed")
    assert lines[1:3] == ["    import os", "           ^"]
    assert lines[3].startswith("Allowed here: ")


def test_a_tab_before_the_place_stays_a_tab_before_the_caret() -> None:
    text = check("if 1:\n\timport os", POLICY).render()
    assert "    \timport os\n    \t       ^" in text


def test_a_long_line_is_shown_around_the_place() -> None:
    code = "x = [" + "1, " * 60 + "]; import os; y = [" + "2, " * 60 + "]"
    _, shown, caret, _ = check(code, POLICY).render().split("\n")
    assert len(shown) <= 104
    assert shown[caret.index("^") :].startswith("os;")


def test_a_place_beyond_what_is_kept_of_the_line_is_told_without_it() -> None:
    text = check("x = [" + "1, " * 200 + "]; import os", POLICY).render()
    assert text.startswith("line 1, column 616: ")
    assert "^" not in text


def test_errors_are_rendered_before_warnings() -> None:
    report = check("print(missing)\nimport os", POLICY, known_names=frozenset())
    text = report.render()
    assert text.index("import of 'os'") < text.index("warning: name 'missing'")
    assert [item.line for item in report.diagnostics] == [1, 2]


def test_a_clean_report_says_so() -> None:
    assert check("x = 1", POLICY).render() == "no problems found"


def test_the_json_form_has_every_field_the_tools_promise() -> None:
    data = json.loads(json.dumps(check("import os, math", POLICY).to_json()))
    assert data["valid"] is False
    assert set(data["diagnostics"][0]) == {
        "kind", "severity", "message", "line", "column", "source_line",
    }  # fmt: skip
    assert data["imports"] == [
        {"name": "os", "allowed": False, "line": 1},
        {"name": "math", "allowed": True, "line": 1},
    ]


def test_only_errors_of_the_policy_are_refusals() -> None:
    kinds: list[tuple[Kind, Severity]] = [
        ("import", "error"), ("import", "warning"), ("syntax", "error"), ("pep723", "error"),
        ("name", "warning"), ("depth", "error"), ("magic", "error"),
    ]  # fmt: skip
    items = tuple(Diagnostic(kind, severity, "text", 1, 1, "x") for kind, severity in kinds)
    refused = Report(valid=False, diagnostics=items).refusals
    assert [item.kind for item in refused] == ["import", "syntax", "depth", "magic"]


def test_an_error_of_syntax_alone_is_left_to_the_kernel() -> None:
    items = (Diagnostic("syntax", "error", "text", 1, 1, "x"),)
    assert Report(valid=False, diagnostics=items).refusals == ()


def test_many_problems_are_cut_with_their_number() -> None:
    report = check("import os\n" * 500, POLICY)
    assert len(report.diagnostics) == 50
    assert "450 more problems" in report.diagnostics[-1].message


OTHER_PYTHON = "3.12.4" if sys.version_info[:2] != (3, 12) else "3.13.1"


def test_empty_code_is_valid() -> None:
    assert check("", POLICY).valid
    assert check("\n\n  # only a comment", POLICY).valid


def test_a_syntax_error_has_its_place_and_is_no_refusal() -> None:
    report = check("x = 1\ny = (2", POLICY)
    (only,) = report.diagnostics
    assert not report.valid
    assert (only.kind, only.line, only.column) == ("syntax", 2, 5)
    assert "never closed" in only.message
    assert report.refusals == ()


def test_wrong_indentation_is_called_by_its_name() -> None:
    (only,) = check("if x:\npass", POLICY).diagnostics
    assert only.message.startswith("IndentationError")
    assert only.line == 2


@pytest.mark.parametrize(
    ("code", "line", "text"),
    [
        ("x = 1\nreturn x", 2, "outside function"),
        ("def f(a, a): pass", 1, "duplicate argument"),
        ("nonlocal x", 1, "nonlocal"),
        ("for x in y:\n  pass\nbreak", 3, "outside loop"),
        ("def f():\n  x = 1\n  global x", 3, "global"),
        ("def f():\n  await g()", 2, "await"),
        ("from __future__ import braces", 1, "chance"),
    ],
)
def test_errors_that_only_the_compiler_sees_are_found(code: str, line: int, text: str) -> None:
    (only,) = check(code, POLICY).diagnostics
    assert only.kind == "syntax"
    assert only.line == line
    assert text in only.message


def test_a_compiler_error_after_wide_characters_has_its_column_in_characters() -> None:
    (only,) = check("ü = 'äöü'; return 1", POLICY).diagnostics
    assert only.column == 12


@pytest.mark.parametrize(
    "code",
    [
        "await asyncio.sleep(0)",
        "async with a as b:\n    pass",
        "[x async for x in y]",
        "async for x in y:\n    print(x)",
    ],
)
def test_await_works_at_the_top_level(code: str) -> None:
    assert check(code, POLICY).valid


def test_what_the_compiler_warns_about_is_a_warning_here_and_nowhere_else() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check("x = '\\d'\nif x is 1:\n    pass", POLICY)
    assert report.valid
    assert {item.severity for item in report.diagnostics} == {"warning"}
    assert [item.line for item in report.diagnostics] == [1, 2]


def test_a_huge_number_is_an_error_and_no_exception() -> None:
    report = check("x = " + "9" * 10_000, POLICY)
    assert not report.valid
    assert report.diagnostics[0].kind == "syntax"


def test_a_syntax_error_mentions_another_python_version_of_the_session() -> None:
    (only,) = check("x = = 1", POLICY, python=OTHER_PYTHON).diagnostics
    assert f"the session runs {'.'.join(OTHER_PYTHON.split('.')[:2])}" in only.message
    own = ".".join(map(str, sys.version_info[:3]))
    (only,) = check("x = = 1", POLICY, python=own).diagnostics
    assert "the session runs" not in only.message


def test_a_coding_cookie_in_text_means_nothing() -> None:
    assert check("# -*- coding: utf-7 -*-\nx = 'ü'", POLICY).valid
