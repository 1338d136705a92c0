"""Policies and profiles, and the text of what is found in code."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_mcp.config.settings import PROFILES, Settings
from kernel_mcp.environments.metadata import EnvironmentSpec
from kernel_mcp.errors import ConfigError
from kernel_mcp.policy import (
    GUARDED_MODULES,
    STRICT_MODULES,
    Diagnostic,
    Kind,
    Policy,
    Report,
    Severity,
    profile_in_force,
    profile_in_words,
    words,
)
from kernel_mcp.policy.check import check

ALWAYS_REFUSED = sorted(
    words(
        """
        os sys subprocess socket ctypes shutil importlib signal multiprocessing http
        builtins gc code pty resource runpy pickle urllib urllib.request ssl select mmap
        webbrowser venv site
        """
    )
)

PROMISED = sorted(
    words(
        """
        collections datetime itertools math queue random re stat statistics time
        unicodedata json csv decimal fractions functools typing dataclasses string
        textwrap enum heapq bisect hashlib base64 io copy operator pprint uuid zoneinfo
        calendar pathlib tempfile glob zipfile gzip sqlite3 asyncio contextlib abc types
        numbers array struct difflib html xml urllib.parse secrets warnings traceback
        inspect logging timeit graphlib concurrent.futures threading
        """
    )
)


@pytest.mark.parametrize("module", PROMISED)
def test_the_guarded_policy_allows_the_promised_standard_library(module: str) -> None:
    assert Policy.for_allow([]).allows_members(module)


@pytest.mark.parametrize("module", ALWAYS_REFUSED)
def test_the_guarded_policy_lets_no_module_through_that_leaves_python(module: str) -> None:
    assert not Policy.for_allow([]).allows_members(module)


def test_an_allowed_package_brings_its_submodules() -> None:
    policy = Policy.for_allow(["numpy"])
    assert policy.allows("numpy")
    assert policy.allows("numpy.linalg")
    assert not policy.allows("numpyro")


def test_a_dotted_entry_brings_its_parent_as_a_bare_package_only() -> None:
    policy = Policy.for_allow([])
    assert policy.allows("urllib.parse")
    assert policy.allows("urllib")
    assert not policy.allows_members("urllib")
    assert not policy.allows("urllib.request")
    assert not policy.allows("urllib.parser")


def test_display_of_ipython_is_allowed_and_its_core_is_not() -> None:
    policy = Policy.for_allow([])
    assert policy.allows("IPython.display")
    assert not policy.allows("IPython.core")


def test_a_star_allows_everything() -> None:
    policy = Policy.for_allow(["*"])
    assert policy.allow_all
    assert policy.allows("os")
    assert policy.allows_members("ctypes.util")


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("pandas>=2", "pandas"),
        ("pandas >=2, <3", "pandas"),
        ("uvicorn[standard]>=0.30", "uvicorn"),
        ("scikit-learn", "scikit_learn"),
        ("Pillow==11.0", "pillow"),
        ("  numpy  ", "numpy"),
        ("numpy; python_version < '3.13'", "numpy"),
        ("urllib.request", "urllib.request"),
    ],
)
def test_an_entry_may_carry_extras_versions_and_markers(entry: str, module: str) -> None:
    assert Policy.for_allow([entry]).allows(module)


@pytest.mark.parametrize("entry", ["--index-url", "a b", "x @ https://e.org/x.whl", "é"])
def test_an_entry_is_read_as_the_environment_reads_it(entry: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Policy.for_allow([entry])
    with pytest.raises(ConfigError) as same:
        EnvironmentSpec.for_allow([entry])
    assert str(refused.value) == str(same.value)
    assert str(refused.value).startswith("--allow: ")


def test_empty_entries_are_ignored() -> None:
    assert Policy.for_allow(["", " "]) == Policy.for_allow([])


def test_more_modules_make_a_new_policy_and_leave_the_old_one() -> None:
    before = Policy.for_allow([])
    after = before.with_modules(["polars"])
    assert after.allows("polars")
    assert not before.allows("polars")


def test_the_strict_profile_has_the_short_list_and_no_files() -> None:
    policy = Policy.for_allow([], profile="strict")
    assert policy.modules == STRICT_MODULES
    assert {"open", "eval", "exec", "compile", "__import__", "input"} <= policy.deny_builtins
    assert not policy.allows("json")


def test_the_strict_profile_can_be_widened_by_name() -> None:
    assert Policy.for_allow(["json"], profile="strict").allows("json")


def test_the_default_profile_refuses_nothing_that_is_there() -> None:
    policy = Policy.for_allow([], profile="default").with_installed(["PIL", "google.protobuf"])
    assert policy.allow_all
    for module in ("os", "ctypes.util", "PIL.Image", "google", "google.protobuf.message"):
        assert policy.allows(module)
    for module in ("seaborn", "google.cloud", "PILlow"):
        assert not policy.allows(module)
    assert policy.with_installed(["seaborn"]).allows("seaborn.objects")


def test_a_policy_that_knows_of_no_packages_takes_them_for_installed() -> None:
    assert Policy.for_allow([], profile="default").allows("seaborn")


def test_without_a_sandbox_the_default_is_the_guarded_list() -> None:
    assert [profile_in_force(name, confined=False) for name in PROFILES] == [
        "strict", "guarded", "guarded",
    ]  # fmt: skip
    assert [profile_in_force(name, confined=True) for name in PROFILES] == list(PROFILES)


@pytest.mark.parametrize(
    ("settings", "begin", "says"),
    [
        (Settings(), "default: the whole standard library", "the boundary is the sandbox (bwrap)"),
        (Settings(profile="guarded"), "guarded: listed modules only", "(bwrap)"),
        (Settings(profile="strict"), "strict: a few modules, no files", "(bwrap)"),
        (
            Settings(sandbox=("none",)),
            "guarded, which --sandbox none makes of default: listed modules",
            "code may do all",
        ),
        (
            Settings(sandbox=("none",), allow=("*",)),
            "guarded: the whole standard library",
            "code may do all",
        ),
    ],
)
def test_the_profile_in_force_is_told_with_the_part_it_plays(
    settings: Settings, begin: str, says: str
) -> None:
    text = profile_in_words(settings, "bwrap")
    assert text.startswith(begin)
    assert says in text


def test_everything_allowed_leaves_no_builtin_denied() -> None:
    assert Policy.for_allow(["*"], profile="strict").deny_builtins == frozenset()


def test_an_unknown_profile_is_refused_with_the_list_of_profiles() -> None:
    with pytest.raises(ConfigError, match=", ".join(PROFILES)):
        Policy.for_allow([], profile="loose")


def test_a_refusal_names_the_module_the_alternative_the_list_and_the_flag() -> None:
    text = Policy.for_allow(["numpy"]).refusal("os.path")
    assert text.startswith("import of 'os.path' is not allowed in this session.")
    assert "pathlib" in text
    assert "Allowed: numpy and " in text
    assert "--allow os (or --allow '*')" in text


def test_a_refusal_of_a_package_gives_the_step_that_works_here() -> None:
    assert "--allow polars to have it" in Policy.for_allow([]).denial("polars.io")

    def step(module: str, *, once: bool) -> str:
        return "" if module == "gc" else f"get {module}{' once' * once}."

    for profile in PROFILES:
        policy = Policy.for_allow([], profile, step).with_installed([])
        assert policy.denial("polars").endswith("get polars.")
        assert replace(policy, once=True).denial("polars").endswith("get polars once.")
    assert (
        Policy.for_allow([], "guarded", step)
        .denial("gc")
        .endswith("Start the server with --allow gc (or --allow '*') to permit it.")
    )


def test_the_flag_for_a_module_beside_a_listed_one_is_dotted() -> None:
    policy = Policy.for_allow([])
    assert policy.flag("urllib.request") == "urllib.request"
    assert policy.flag("polars.io") == "polars"
    assert policy.flag("urllib.*") == "urllib"


def test_the_json_form_is_plain_sorted_and_complete() -> None:
    policy = Policy.for_allow(["numpy"], profile="strict")
    data = json.loads(json.dumps(policy.to_json()))
    assert data["modules"] == sorted(policy.modules)
    assert data["profile"] == "strict"
    assert data["allow_all"] is False
    assert "open" in data["deny_builtins"]


def test_the_documentation_lists_exactly_what_is_allowed() -> None:
    text = (Path(__file__).parents[3] / "docs" / "policy.md").read_text(encoding="utf-8")
    (listed,) = [line for line in text.splitlines() if line.startswith("> ")]
    assert words(listed.removeprefix("> ")) == GUARDED_MODULES - STRICT_MODULES


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
