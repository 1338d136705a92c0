from __future__ import annotations

import sys
import warnings

import pytest

from kernel_mcp.policy import Policy, check

POLICY = Policy.for_allow([])
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
