from __future__ import annotations

import json

from kernel_mcp.policy import Diagnostic, Policy, Report, check
from kernel_mcp.policy.diagnostics import Kind, Severity

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
