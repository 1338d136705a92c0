from __future__ import annotations

import pytest

from kernel_mcp.policy import Policy, ScriptMetadata, ScriptMetadataError, check, script_metadata

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
    assert script_metadata(EXAMPLE) == ScriptMetadata(("requests<3", "rich"), ">=3.11")


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
    assert script_metadata(script) == ScriptMetadata(("a",))


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
