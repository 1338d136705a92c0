from __future__ import annotations

import time

import pytest

from kernel_mcp.policy import Policy
from kernel_mcp.policy.check import check
from kernel_mcp.policy.source import (
    MAX_CODE,
    ScriptMetadata,
    ScriptMetadataError,
    Source,
    guard,
    script_metadata,
)
from tests.unit.packages.wheels import requirements

POLICY = Policy.for_allow([])


def test_code_over_the_limit_is_refused_with_its_size_and_a_way_out() -> None:
    report = check("x" * 5_000_000, POLICY)
    assert not report.valid
    (only,) = report.refusals
    assert only.kind == "size"
    assert "5,000,000" in only.message
    assert "a file" in only.message


def test_code_at_the_limit_is_read() -> None:
    assert check("#" * MAX_CODE, POLICY).valid


@pytest.mark.parametrize(
    ("code", "line", "column"),
    [("\0", 1, 1), ("x = 1\ny = '\0'", 2, 6), ("a\r\nb\ud800", 2, 2), ("a\rb\udfff", 2, 2)],
)
def test_unusable_characters_are_refused_at_their_place(code: str, line: int, column: int) -> None:
    (only,) = check(code, POLICY).diagnostics
    assert (only.kind, only.line, only.column) == ("encoding", line, column)


def test_what_is_shown_of_the_source_can_always_be_sent() -> None:
    (only,) = check("x = '\0\ud800\x1b'", POLICY).diagnostics
    only.source_line.encode()
    assert "\0" not in only.render()
    assert "\x1b" not in only.render()


def test_a_character_that_only_some_languages_take_for_a_line_end_does_not_shift_lines() -> None:
    report = check("x = 'a\u2028b\x0cc'\nimport os", POLICY)
    assert report.refusals[0].line == 2


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_every_line_ending_counts_the_same(ending: str) -> None:
    (refusal,) = check(ending.join(["x = 1", "y = 2", "import os"]), POLICY).refusals
    assert (refusal.line, refusal.column, refusal.source_line) == (3, 8, "import os")


def test_places_outside_the_source_are_brought_inside() -> None:
    found = Source.of("ab").diagnostic("syntax", "error", "text", 99, 99)
    assert (found.line, found.column) == (1, 3)
    found = Source.of("ab").diagnostic("syntax", "error", "text", None, None)
    assert (found.line, found.column) == (1, 1)


def test_columns_count_characters_not_bytes() -> None:
    (refusal,) = check("ü = '🎉'; import os", POLICY).refusals
    assert refusal.column == 17


@pytest.mark.parametrize(
    "expression",
    [
        "a" + ".b" * 20_000,
        "f" + "()" * 20_000,
        "a" + "[0]" * 20_000,
        "+".join(["1"] * 20_000),
        "-" * 20_000 + "1",
    ],
)
def test_an_expression_that_is_too_deep_for_the_parser_is_refused(expression: str) -> None:
    report = check(expression, POLICY)
    assert [item.kind for item in report.refusals] == ["depth"]


@pytest.mark.parametrize(
    "code",
    [
        "not " * 20_000 + "1",
        "lambda: " * 20_000 + "1",
        "1 if a else " * 10_000 + "1",
        "await " * 20_000 + "a",
        "".join(" " * depth + "if a:\n" for depth in range(200)) + " " * 200 + "pass",
    ],
)
def test_nesting_that_the_parser_itself_gives_up_on_is_an_error_and_no_exception(
    code: str,
) -> None:
    assert not check(code, POLICY).valid


def test_long_flat_code_is_not_deep() -> None:
    numbers = "[" + "-1.5, " * 20_000 + "]"
    table = "{\n" + "".join(f"  'k{n}': (a.b + {n}),\n" for n in range(8000)) + "}"
    lines = "x = a.b(1) + 2\n" * 15_000
    for code in (numbers, table, lines):
        assert check(code, POLICY).valid


def test_the_guard_has_nothing_to_say_about_ordinary_text() -> None:
    code = "print('hällo 🎉')\n\tx\r\n"
    assert guard(Source.of(code), code) is None


EXAMPLE = """\
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "requests<3",
#   "rich",
# ]
# ///

import requests
"""


def test_a_block_gives_dependencies_and_python() -> None:
    assert script_metadata(EXAMPLE) == ScriptMetadata(requirements("requests<3", "rich"), ">=3.11")


@pytest.mark.parametrize("ending", ["\r\n", "\r"])
def test_a_block_is_read_with_any_line_ending(ending: str) -> None:
    found = script_metadata(EXAMPLE.replace("\n", ending))
    assert found is not None
    assert found.requires_python == ">=3.11"


@pytest.mark.parametrize(
    "script",
    ["", "import x", "#/// script\n# ///", "# /// pyproject\n# x = 1\n# ///", "  # /// script\n"],
)
def test_a_script_without_a_script_block_has_no_metadata(script: str) -> None:
    assert script_metadata(script) is None


def test_an_empty_block_asks_for_nothing() -> None:
    assert script_metadata("# /// script\n# ///") == ScriptMetadata()
    assert script_metadata("# /// script\n#\n# ///") == ScriptMetadata()


def test_a_block_may_follow_other_lines_and_hold_tool_tables() -> None:
    script = "#!/usr/bin/env python\n# a comment\n\n# /// script\n# [tool.x]\n# y = 1\n# ///\n"
    assert script_metadata(script) == ScriptMetadata()


def test_a_block_ends_at_the_last_closing_line_of_its_comments() -> None:
    script = '# /// script\n# x = """\n# ///\n# """\n# dependencies = ["a"]\n# ///\n'
    assert script_metadata(script) == ScriptMetadata(requirements("a"))


@pytest.mark.parametrize(
    ("script", "line", "reason"),
    [
        (EXAMPLE + EXAMPLE, 10, "second"),
        ("x\n# /// script\n# dependencies = []\n", 2, "no closing line"),
        ("# /// script\n# dependencies = []\n#///\n", 3, "begin with `# `"),
        ("# /// script\n# a = 1\n# dependencies = [\n# ///", 3, "not valid TOML"),
        ("# /// script\n# a = 1\n# b = = 2\n# ///", 3, "not valid TOML"),
        ("# /// script\n#\n# dependencies = 'a'\n# ///", 3, "list of strings"),
        ("# /// script\n# dependencies = ['a', 3]\n# ///", 2, "not a string"),
        ("# /// script\n# dependencies = [\n#  'a',\n#  'b >',\n# ]\n# ///", 4, "requirement"),
        ("# /// script\n# dependencies = ['']\n# ///", 2, "requirement"),
        ("# /// script\n# requires-python = 3.11\n# ///", 2, "must be a string"),
        ("# /// script\n#\n# requires-python = 'eleven'\n# ///", 3, "'eleven'"),
    ],
)
def test_a_malformed_block_is_told_with_line_and_reason(
    script: str, line: int, reason: str
) -> None:
    with pytest.raises(ScriptMetadataError, match=f"line {line} of the script") as caught:
        script_metadata(script)
    assert caught.value.line == line
    assert reason in caught.value.reason
    report = check(script, Policy.for_allow(["*"]))
    found = [item for item in report.diagnostics if item.kind == "pep723"]
    assert [(item.line, item.severity) for item in found] == [(line, "error")]


def test_deeply_nested_metadata_is_an_error_and_no_exception() -> None:
    with pytest.raises(ScriptMetadataError):
        script_metadata("# /// script\n# a = " + "[" * 50_000 + "\n# ///")


def test_malformed_metadata_does_not_keep_a_cell_from_running() -> None:
    report = check("# /// script\nx = 1", Policy.for_allow([]))
    assert not report.valid
    assert report.refusals == ()


def test_a_script_of_beginnings_of_blocks_is_read_once() -> None:
    start = time.process_time()
    assert script_metadata("# /// other\n" * 20_000) is None
    assert script_metadata("# /// other\n" * 20_000 + "# ///\n") is None
    with pytest.raises(ScriptMetadataError):
        script_metadata("# /// script\n# " + "a." * 50_000 + "a = 1\n# ///\n")
    assert time.process_time() - start < 1
