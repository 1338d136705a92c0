"""The report of an installation, and of packages that were there before it."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from kernel_mcp.environments.layer import Generation
from kernel_mcp.packages.result import (
    InstallOutcome,
    PackageOutcome,
    PackageStatus,
    Present,
    Verdicts,
    judge,
    principal,
)
from tests.unit.packages.wheels import requirements


def judged(verdicts: Verdicts, *, previous: str = "", asked: bool = True) -> PackageOutcome:
    return judge(
        "thing", "2.0", previous=previous, asked=asked, modules=["thing"], verdicts=verdicts
    )


@pytest.mark.parametrize(
    ("package", "modules", "expected"),
    [
        ("pillow", ("PIL",), ("PIL",)),
        ("scikit-learn", ("sklearn",), ("sklearn",)),
        ("attrs", ("attr", "attrs"), ("attr", "attrs")),
        ("python-dateutil", ("dateutil",), ("dateutil",)),
        ("thing", ("_thing", "tests", "thing"), ("thing",)),
        ("polars-runtime-32", ("_polars_runtime_32",), ("_polars_runtime_32",)),
        ("big", ("a", "b", "c", "d", "_e"), ("a", "b", "c")),
        ("google-cloud-storage", ("google.cloud.storage",), ("google.cloud.storage",)),
        ("ruff", (), ()),
    ],
)
def test_the_modules_that_tell_most_are_tried(
    package: str, modules: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert principal(package, modules) == expected


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("imported", PackageStatus.WORKS),
        ("earlier", PackageStatus.NEEDS_RESET),
        ("shadowed", PackageStatus.HIDDEN),
        ("failed", PackageStatus.FAILS),
        ("nonsense", PackageStatus.WORKS),
    ],
)
def test_the_kernels_word_becomes_a_state(word: str, state: PackageStatus) -> None:
    assert judged({"thing": (word, "why")}).state is state


def test_a_module_the_kernel_says_nothing_about_was_not_tried() -> None:
    assert judged({}).state is PackageStatus.NOT_TRIED


def test_a_package_without_modules_has_nothing_to_fail() -> None:
    found = judge("types-x", "1", previous="", asked=True, modules=[], verdicts={})
    assert found.state is PackageStatus.NO_MODULE
    assert not InstallOutcome((found,)).failed


def test_an_unchanged_package_that_is_loaded_works() -> None:
    assert judged({"thing": ("earlier", "")}, previous="2.0").state is PackageStatus.WORKS


def test_the_worst_module_counts() -> None:
    found = judge(
        "thing",
        "2.0",
        previous="",
        asked=True,
        modules=["a", "b"],
        verdicts={"a": ("failed", "ImportError: no"), "b": ("imported", "")},
    )
    assert (found.state, found.detail) == (PackageStatus.FAILS, "import a: ImportError: no")


def test_success_names_versions_and_imports() -> None:
    summary = InstallOutcome((judged({"thing": ("imported", "")}),)).summary()
    assert (
        summary == "Installed thing 2.0: import thing works in this session.\n"
        "The installation changed no variable."
    )


def test_an_older_version_in_use_asks_for_a_reset() -> None:
    outcome = InstallOutcome((judged({"thing": ("earlier", "")}, previous="1.0"),))
    assert outcome.needs_reset
    assert "in place of 1.0" in outcome.summary()
    assert "Call reset" in outcome.summary()


def test_a_failure_comes_first_and_is_no_success() -> None:
    bad = judge(
        "bad", "1", previous="", asked=True, modules=["bad"], verdicts={"bad": ("failed", "Boom")}
    )
    outcome = InstallOutcome((judged({"thing": ("imported", "")}), bad))
    assert outcome.failed
    assert outcome.summary().startswith("Installed bad 1, but it cannot be used")


def test_a_broken_dependency_is_told_without_failing_the_whole() -> None:
    outcome = InstallOutcome(
        (
            judged({"thing": ("imported", "")}),
            judged({"thing": ("failed", "Boom")}, asked=False),
        )
    )
    assert not outcome.failed
    assert "With them: thing 2.0 (fails: import thing: Boom)" in outcome.summary()


def test_a_dead_kernel_is_told_instead_of_kept_variables() -> None:
    outcome = InstallOutcome((judged({}),), trouble="The kernel was killed by SIGSEGV.")
    assert outcome.failed
    assert outcome.summary().endswith("The kernel was killed by SIGSEGV.")


def test_a_package_for_another_platform_is_told() -> None:
    assert "pywin32: left out" in InstallOutcome((), unfit=("pywin32",)).summary()


def test_an_installer_without_sandbox_is_told() -> None:
    assert "without a sandbox" in InstallOutcome((), confined=False).summary()


PRESENT = Present(
    versions={"pandas": "2.3.1", "torch": "3.0rc1"},
    modules={},
    requested=requirements("polars"),
    permitted=frozenset({"polars"}),
)


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("pandas", True),
        ("pandas>=2", True),
        ("pandas<2", False),
        ("torch>=3.0rc1", True),
        ("pandas[excel]", False),
        ("pandas; python_version > '3'", False),
        ("numpy", False),
    ],
)
def test_only_what_is_certain_counts_as_met(text: str, met: bool) -> None:
    assert PRESENT.satisfies(Requirement(text)) is met


@pytest.mark.parametrize(
    ("generation", "new"),
    [
        (Generation(requirements("polars"), permitted=("polars",)), False),
        (Generation(requirements("polars"), ("x==1",)), True),
        (Generation(requirements("pandas")), True),
        (Generation(requirements("polars"), permitted=("pandas",)), True),
    ],
)
def test_a_generation_that_adds_nothing_is_not_needed(generation: Generation, new: bool) -> None:
    assert PRESENT.lacks(generation) is new
